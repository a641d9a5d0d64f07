"""TROLL on verl's Megatron engine: its layouts of tokens, and whole updates in four processes without a GPU."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hydra.errors import InstantiationException
from megatron.core import parallel_state as mpu
from tensordict import TensorDict
from verl.models.mcore.util import preprocess_bshd_engine, preprocess_thd_engine
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine.base import EngineRegistry

from tests.verl import megatron_worker
from tests.verl.actor import ACTOR, Sample, Step, as_batch, rollout
from tests.verl.megatron_worker import CASES, LAYOUTS, Layout, configuration, save_divisible_model
from tests.verl.reference import Settings, check, check_captured, check_left_out, divided
from troll.verl import TrollMcoreActorConfig
from troll.verl import settings as settings_module
from troll.verl.megatron import TrollMegatronEngine
from troll.verl.settings import TrollPolicyLossConfig

#: Layouts that together have tensors, contexts and stages spread; the others are slow.
FAST = ("tensor and context", "pipeline and tensor")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_divisible_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def fast(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    layouts = tuple(layout for layout in LAYOUTS if layout.name in FAST)
    return megatron_worker.run(model, tmp_path_factory.mktemp("fast") / "found.pt", layouts)


@pytest.fixture(scope="module")
def slow(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    layouts = tuple(layout for layout in LAYOUTS if layout.name not in FAST)
    return megatron_worker.run(model, tmp_path_factory.mktemp("slow") / "found.pt", layouts)


def cases(*, fast: bool) -> list[Any]:
    return [
        pytest.param(layout, case, head, id=f"{layout.name}-{case}-{'head' if head else 'logits'}")
        for layout in LAYOUTS
        for head in layout.heads
        for case in layout.cases
        if (layout.name in FAST) is fast
    ]


def in_whole_tokens(step: Step, mini_batch: list[list[Sample]], processes: int) -> Step:
    """verl divides by the whole tokens that a micro-batch has for each process of a sequence: by too few, if odd."""
    tokens = [sum(len(sample.input_ids) for sample in micro_batch) for micro_batch in mini_batch]
    share = sum(number // processes * processes for number in tokens) / sum(tokens)
    return Step(step.parameters, {name: gradient * share for name, gradient in step.gradients.items()})


def check_equals_the_core(layout: Layout, case: str, found: dict[str, Any], model: Path) -> None:
    """Old policies, losses, whole gradients and metrics are those of the core, on one process and one sequence each."""
    settings, samples = Settings(**CASES[case]), rollout()
    check_captured(model, found["old_policies"], samples, settings)
    mini_batches, steps = divided(samples, world=layout.data), found["steps"]
    if layout.per_token:
        steps = [in_whole_tokens(*each, layout.context) for each in zip(steps, mini_batches, strict=True)]
    check(model, steps, found["metrics"], mini_batches, settings)
    assert all((calls > 0) is last for last, calls in found["asked"])


@pytest.mark.parametrize(("layout", "case", "head"), cases(fast=True))
def test_updates_equal_the_core(layout: Layout, case: str, head: bool, fast: dict[str, Any], model: Path) -> None:
    check_equals_the_core(layout, case, fast[layout.name][case, head], model)


def test_nan_on_the_last_stage_leaves_out_the_update_on_all(fast: dict[str, Any]) -> None:
    check_left_out(fast["pipeline and tensor"]["left out"])


def test_weight_of_pull_adapts_on_all_stages(fast: dict[str, Any]) -> None:
    assert fast["pipeline and tensor"]["adaptive"]["weights"] == [2.0] * 4


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "case", "head"), cases(fast=False))
def test_updates_equal_the_core_in_further_layouts(
    layout: Layout, case: str, head: bool, slow: dict[str, Any], model: Path
) -> None:
    check_equals_the_core(layout, case, slow[layout.name][case, head], model)


@contextmanager
def place_in_groups(*, tensor: int, context: int, rank: int) -> Iterator[None]:
    """As if this process were the one of this rank among those that share a sequence."""
    sizes = {
        "get_tensor_model_parallel_world_size": tensor,
        "get_context_parallel_world_size": context,
        "get_context_parallel_rank": rank,
        "get_context_parallel_group": "the group",
    }
    with ExitStack() as stack:
        for name, value in sizes.items():
            stack.enter_context(mock.patch.object(mpu, name, lambda value=value: value))
        yield


def engine(*, fp8: str | None = None, bucket: int | None = None) -> TrollMegatronEngine:
    """One without a model, which has what its layout depends on."""
    bare = object.__new__(TrollMegatronEngine)
    bare.module = [SimpleNamespace(config=SimpleNamespace(fp8=fp8))]
    bare.engine_config = SimpleNamespace(pad_to_length=bucket is not None, pad_to_length_bucket=bucket)
    return bare


def distinct(samples: list[Sample]) -> TensorDict:
    """A batch no token of which occurs twice."""
    ids = itertools.count(1)
    return as_batch(
        [
            dataclasses.replace(
                sample,
                prompt=torch.tensor([next(ids) for _ in sample.prompt]),
                response=torch.tensor([next(ids) for _ in sample.response]),
            )
            for sample in samples
        ]
    )


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("context", [1, 2, 4])
@pytest.mark.parametrize("fp8", [None, "hybrid"])
@pytest.mark.parametrize(
    ("data_format", "options"), [("thd", {}), ("thd", {"bucket": 96}), ("bshd", {}), ("bshd", {"longest": 40})]
)
def test_every_response_token_is_where_verl_puts_its_label(
    data_format: str, options: dict[str, int], fp8: str | None, context: int, tensor: int
) -> None:
    pads = "pad_target" in inspect.getsource(preprocess_thd_engine)
    if data_format == "thd" and context > 1 and (fp8 or options) and not pads:
        pytest.skip("before 0.9.1, verl cannot spread short sequences that are padded over processes")
    batch = distinct(rollout(7))
    bucket, longest = options.get("bucket"), options.get("longest")
    if longest is not None:
        tu.assign_non_tensor(batch, forced_max_seqlen=longest)
    responses, seen = batch["responses"].values(), []
    for rank in range(context):
        with place_in_groups(tensor=tensor, context=context, rank=rank):
            tokens = engine(fp8=fp8, bucket=bucket)._response_tokens(batch, data_format)
            common = {"need_roll": True, "use_fp8_padding": fp8 is not None}
            if data_format == "thd":
                label = preprocess_thd_engine(batch["input_ids"], pad_to_length_bucket=bucket, **common)[0]
            else:
                label = preprocess_bshd_engine(batch["input_ids"], forced_max_seqlen=longest, **common)[0]
        assert torch.equal(label.flatten()[tokens.rows], responses[tokens.numbers])
        assert tokens.total == len(responses)
        assert tokens.group == ("the group" if context > 1 else None)
        seen += tokens.numbers.tolist()
    assert sorted(seen) == list(range(len(responses)))


def test_the_group_selects_the_engine_and_gives_it_the_settings(model: Path) -> None:
    config = omega_conf_to_dataclass(configuration(model).actor_rollout_ref.actor)
    assert isinstance(config, TrollMcoreActorConfig) and config.engine.strategy == "troll_megatron"
    assert EngineRegistry.get_engine_cls("language_model", config.engine.strategy) is TrollMegatronEngine
    assert isinstance(config.policy_loss, TrollPolicyLossConfig) and config.engine.trust_region is config.policy_loss


def test_dynamic_context_parallelism_is_refused(model: Path) -> None:
    changed = configuration(
        model,
        f"{ACTOR}.megatron.dynamic_context_parallel=true",
        f"+{ACTOR}.megatron.max_seqlen_per_dp_cp_rank=64",
    )
    with pytest.raises(InstantiationException, match=r"megatron\.dynamic_context_parallel=False"):
        omega_conf_to_dataclass(changed.actor_rollout_ref.actor)


def test_megatron_is_asked_for_where_it_is_missing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "MegatronEngine", None)
    with pytest.raises(InstantiationException, match=r"pip install 'verl\[megatron\]'"):
        omega_conf_to_dataclass(configuration(model).actor_rollout_ref.actor)


@pytest.mark.slow
def test_fsdp_needs_no_megatron() -> None:
    code = (
        "import sys; sys.modules['megatron'] = None\n"
        "from troll.verl import TrollFSDPActorConfig\n"
        "from verl.workers.engine.base import EngineRegistry\n"
        "assert 'troll_fsdp2' in EngineRegistry._engines['language_model']\n"
        "assert 'troll_megatron' not in EngineRegistry._engines['language_model']\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
