"""TROLL on verl's Megatron engine: its layouts of tokens, and whole updates in four processes without a GPU."""

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hydra.errors import InstantiationException
from megatron.core import parallel_state as mpu
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from tensordict import TensorDict
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from verl.models.mcore.util import preprocess_bshd_engine, preprocess_thd_engine
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine.base import EngineRegistry

from tests.troll.verl import megatron_worker, worker
from tests.troll.verl.actor import ACTOR, SMALL, Sample, Step, as_batch, in_this_process, policy_loss, rollout
from tests.troll.verl.actor import configuration as fsdp_configuration
from tests.troll.verl.fresh import Fresh
from tests.troll.verl.megatron_worker import CASES, LAYOUTS, SAMPLES, Layout, configuration, save_divisible_model
from tests.troll.verl.reference import Settings, check, check_captured, check_left_out, mini_batches
from troll.verl import TrollMcoreActorConfig
from troll.verl import settings as settings_module
from troll.verl.megatron import MegatronKLTargetScheduler, TrollMegatronEngine, hidden_states_for_logits
from troll.verl.settings import TrollPolicyLossConfig

#: Layouts that together have tensors, contexts and stages spread; the others are slow.
FAST = ("tensor and context", "pipeline and tensor")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_divisible_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    @cache
    def run(*, fast: bool) -> dict[str, Any]:
        layouts = tuple(layout for layout in LAYOUTS if (layout.name in FAST) is fast)
        folder = tmp_path_factory.mktemp("found")
        return worker.run(4, megatron_worker.all_layouts, folder / "of.pt", model, folder, layouts)

    return run


EVERY_CASE = [
    pytest.param(
        *(layout, case, head),
        id=f"{layout.name}-{case}-{'head' if head else 'logits'}",
        marks=() if layout.name in FAST else pytest.mark.slow,
    )
    for layout in LAYOUTS
    for case, head in layout.readings
]


def in_whole_tokens(step: Step, mini_batch: Sequence[Sample], processes: int) -> Step:
    """verl divides by the whole tokens that a micro-batch has for each process of a sequence: by too few, if odd."""
    lengths = [len(sample.input_ids) for sample in mini_batch]
    tokens = [first + second for first, second in zip(lengths[::2], lengths[1::2], strict=True)]
    share = sum(number // processes * processes for number in tokens) / sum(tokens)
    return Step(step.parameters, {name: gradient * share for name, gradient in step.gradients.items()})


@pytest.mark.parametrize(("layout", "case", "head"), EVERY_CASE)
def test_updates_equal_the_core(
    layout: Layout, case: str, head: bool, run: Callable[..., dict[str, Any]], model: Path
) -> None:
    """Old policies, losses, whole gradients and metrics are those of the core, on one process and one sequence each."""
    found = run(fast=layout.name in FAST)[layout.name][case, head]
    settings = Settings(**CASES[case])
    check_captured(model, found["old_policies"], SAMPLES, settings)
    batches, steps = mini_batches(SAMPLES), found["steps"]
    if layout.per_token:
        steps = [in_whole_tokens(*each, layout.context) for each in zip(steps, batches, strict=True)]
    check(model, steps, found["metrics"], batches, settings)
    assert all((calls > 0) is last for last, calls in found["asked"])


def test_nan_on_the_last_stage_leaves_out_all_updates(run: Callable[..., dict[str, Any]]) -> None:
    check_left_out(run(fast=True)["pipeline and tensor"]["left out"])


@pytest.fixture(scope="module")
def rates_of_one_process(model: Path) -> list[float]:
    settings = policy_loss(*SMALL, *worker.KL_TARGET)
    return worker.rates_of(
        in_this_process(fsdp_configuration(model, *settings, f"{ACTOR}.optim.clip_grad=1e9")), SAMPLES
    )


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, id=each.name, marks=() if each.name in FAST else pytest.mark.slow) for each in LAYOUTS],
)
def test_learning_rate_follows_the_kl(
    layout: Layout, run: Callable[..., dict[str, Any]], rates_of_one_process: list[float]
) -> None:
    """On every process, the first stages included, it is that of one process with FSDP."""
    first, *others = run(fast=layout.name in FAST)[layout.name]["KL target"]
    assert others == [first] * 3 and len({*first}) > 3
    assert first == pytest.approx(rates_of_one_process, rel=1e-3)


def test_resumed_run_equals_an_uninterrupted_one(run: Callable[..., dict[str, Any]]) -> None:
    """Bit by bit, with a KL target."""
    (metrics, parameters), (got, own) = run(fast=True)["pipeline and tensor"]["resumed"]
    assert all(torch.equal(own[name], value) for name, value in parameters.items())
    assert got["lr"] == metrics["lr"] == metrics["trust_region/kl_target/rate"][-1:]


def scheduler_of(*groups: dict[str, float]) -> OptimizerParamScheduler:
    """Megatron's own: a warm-up of two steps, and a decay."""
    steps = {"lr_warmup_steps": 2, "lr_decay_steps": 6, "lr_decay_style": "cosine", "wd_incr_steps": 6}
    decay = {"start_wd": 0.0, "end_wd": 0.0, "wd_incr_style": "constant"}
    optimizer = SimpleNamespace(param_groups=list(groups))
    return OptimizerParamScheduler(optimizer, init_lr=0.0, max_lr=1e-2, min_lr=1e-3, **steps, **decay)


SETTINGS = TrollPolicyLossConfig(kl_target=0.1, train_batch_size=8)


def test_schedule_and_groups_multiply_the_rate() -> None:
    """A pipeline stage may lack a group: the rate that is the same everywhere is that of the others."""
    groups: tuple[dict[str, float], ...] = ({}, {"max_lr": 5e-2, "min_lr": 0.0})
    scheduler = MegatronKLTargetScheduler(scheduler_of(*groups), SETTINGS)
    alone = scheduler_of(*({**group} for group in groups))
    for _ in range(7):
        wanted = [group["lr"] / 100 for group in alone.optimizer.param_groups]
        assert [group["lr"] for group in groups] == pytest.approx(wanted, rel=1e-12)
        scheduler.update({"kl_before_mean": math.nan, "length": math.nan, "teaching": 1.0, "entropy": 1.0})
        assert scheduler._target.state_dict()["walked"][-1] == pytest.approx(wanted[0], rel=1e-12)
        scheduler.step(1)
        alone.step(1)
        assert scheduler.get_last_lr() == pytest.approx(wanted, rel=1e-12)


def test_scheduler_of_another_kind_is_refused() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match=r"the rates of OptimizerParamScheduler, .* is LambdaLR: set kl_target=null"):
        MegatronKLTargetScheduler(LambdaLR(optimizer, lambda step: 1.0), SETTINGS)


@contextmanager
def place_in_groups(*, tensor: int, context: int, rank: int) -> Iterator[None]:
    """As if this process were the one of this rank among those that share a sequence."""
    sizes = {
        "get_tensor_model_parallel_world_size": tensor,
        "get_context_parallel_world_size": context,
        "get_context_parallel_rank": rank,
        "get_context_parallel_group": "the group",
    }
    with mock.patch.multiple(mpu, **{name: mock.Mock(return_value=value) for name, value in sizes.items()}):
        yield


def engine(*, fp8: str | None = None, bucket: int | None = None) -> TrollMegatronEngine:
    """One without a model, which has what its layout depends on."""
    bare = object.__new__(TrollMegatronEngine)
    bare.module = [SimpleNamespace(config=SimpleNamespace(fp8=fp8))]
    bare.engine_config = SimpleNamespace(pad_to_length=bucket is not None, pad_to_length_bucket=bucket)
    return bare


def distinct(samples: list[Sample]) -> TensorDict:
    ids = itertools.count(1)

    def renumbered(sample: Sample) -> Sample:
        prompt, response = (torch.tensor([next(ids) for _ in part]) for part in (sample.prompt, sample.response))
        return dataclasses.replace(sample, prompt=prompt, response=response)

    return as_batch([renumbered(sample) for sample in samples])


@pytest.mark.parametrize("context", [1, 4])
@pytest.mark.parametrize("fp8", [None, "hybrid"])
@pytest.mark.parametrize(
    ("data_format", "options"), [("thd", {}), ("thd", {"bucket": 96}), ("bshd", {}), ("bshd", {"longest": 40})]
)
def test_response_tokens_are_where_verl_puts_their_labels(
    data_format: str, options: dict[str, int], fp8: str | None, context: int
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
        with place_in_groups(tensor=2, context=context, rank=rank):
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


def test_group_selects_the_engine_and_its_settings(model: Path) -> None:
    config = omega_conf_to_dataclass(configuration(model).actor_rollout_ref.actor)
    assert isinstance(config, TrollMcoreActorConfig) and config.engine.strategy == "troll_megatron"
    assert EngineRegistry.get_engine_cls("language_model", config.engine.strategy) is TrollMegatronEngine
    assert isinstance(config.policy_loss, TrollPolicyLossConfig) and config.engine.trust_region is config.policy_loss


def test_what_cannot_be_trained_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    megatron = f"{ACTOR}.megatron"
    dynamic = (f"{megatron}.dynamic_context_parallel=true", f"+{megatron}.max_seqlen_per_dp_cp_rank=64")
    with pytest.raises(InstantiationException, match=r"megatron\.dynamic_context_parallel=False"):
        omega_conf_to_dataclass(configuration(model, *dynamic).actor_rollout_ref.actor)
    lost = (f"{ACTOR}.policy_loss.kl_target=0.1", f"{ACTOR}.optim.use_checkpoint_opt_param_scheduler=false")
    with pytest.raises(InstantiationException, match=r"set .*\.optim\.use_checkpoint_opt_param_scheduler=True"):
        omega_conf_to_dataclass(configuration(model, *lost).actor_rollout_ref.actor)
    monkeypatch.setattr(settings_module, "MegatronEngine", None)
    with pytest.raises(InstantiationException, match=r"pip install 'verl\[megatron\]'"):
        omega_conf_to_dataclass(configuration(model).actor_rollout_ref.actor)


VOCABULARY, WIDTH = 11, 6


class Head(torch.nn.Module):
    sequence_parallel = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        return input_ @ (self.weight if weight is None else weight).T, None


class Model(torch.nn.Module):
    """A model that ends as `GPTModel._postprocess` of megatron-core 0.18, which wants Python 3.12.

    Before, the logits have no multiplier.
    """

    def __init__(self, tied: bool, multiplier: float) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.output_layer = Head()
        self.tied, self.multiplier = tied, multiplier

    def decoded(self, input_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Hidden states (L, B, H), and the weight of the head where it is not the head's own."""
        return self.embedding(input_ids).transpose(0, 1).tanh(), self.embedding.weight if self.tied else None

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden_states, output_weight = self.decoded(input_ids)
        logits, _ = self.output_layer(hidden_states, weight=output_weight, runtime_gather_output=None)
        return (logits * self.multiplier).transpose(0, 1).contiguous()


@pytest.mark.parametrize(("tied", "multiplier"), [(False, 1.0), (True, 0.25)])
def test_hidden_states_and_weight_give_the_logits(tied: bool, multiplier: float) -> None:
    torch.manual_seed(0)
    model, waited = Model(tied, multiplier), []
    # As Megatron waits for the weight, where it is gathered while other layers compute.
    model.output_layer.register_forward_pre_hook(lambda *_: waited.append(True))
    head: Any = model.output_layer
    head.forward = calls = mock.Mock(wraps=head.forward)
    ids = torch.randint(VOCABULARY, (2, 5))
    with hidden_states_for_logits(model) as weights:
        hidden = model(ids)
    (weight,) = weights
    assert hidden.shape == (2, 5, WIDTH) and calls.call_count == 0 and waited == [True]
    assert weight is (model.embedding.weight if tied else model.output_layer.weight)
    # Afterwards it is the model that it was.
    torch.testing.assert_close(hidden @ weight.T, model(ids))
    assert calls.call_count == 1


def test_stage_without_a_head_is_left_as_it_is() -> None:
    model = torch.nn.Linear(2, 2)
    with hidden_states_for_logits(model) as weights:
        assert model(torch.ones(2)).shape == (2,)
    assert weights == []


@pytest.mark.slow
def test_fsdp_needs_no_megatron(fresh: Fresh) -> None:
    program = """
import sys
sys.modules["megatron"] = None
from troll.verl import TrollFSDPActorConfig
from verl.workers.engine.base import EngineRegistry
print({"troll_fsdp2", "troll_megatron"} & EngineRegistry._engines["language_model"].keys())
"""
    assert fresh(program).said[-1] == "{'troll_fsdp2'}"
