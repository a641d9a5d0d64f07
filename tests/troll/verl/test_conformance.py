"""The plug-in keeps the contract of an adapter: `troll.testing.check_adapter` on verl's FSDP2 engine."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from verl.utils import tensordict_utils as tu

from tests.tables import set_table, table_model
from tests.troll.verl.actor import Actor, Sample, as_batch, configuration, in_this_process, saved
from troll.testing import METRICS, VOCAB_SIZE, Case, Update, check_adapter


@functools.cache
def actor_of(folder: Path, packed: bool) -> Actor:
    padding = f"actor_rollout_ref.model.use_remove_padding={packed}"
    return in_this_process(configuration(folder, padding))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(table_model(torch.zeros(VOCAB_SIZE, VOCAB_SIZE)), tmp_path_factory.mktemp("table"))


def samples_of(case: Case) -> list[Sample]:
    return [
        Sample(x.prompt, x.response, x.counts.long(), torch.full((len(x.response),), x.advantage)) for x in case.samples
    ]


@pytest.mark.parametrize(
    ("mode", "aggregation"), [("seq-mean-token-mean", "sequence_mean"), ("token-mean", "token_mean")]
)
def test_engine_keeps_the_contract(folder: Path, mode: str, aggregation: Any) -> None:
    def adapter(case: Case) -> Update:
        settings = {name: getattr(case, name) for name in ("kl_bound", "regression_weight", "top_k", "mass_threshold")}
        actor = actor_of(folder, case.layout == "packed").reset(loss_agg_mode=mode, **settings)
        set_table(actor.engine.module, case.old_table)
        batch = actor.score(as_batch(samples_of(case), temperature=case.temperature))
        set_table(actor.engine.module, case.new_table)
        # Shuffled after they were scored.
        order = [number for numbers in case.micro_batches for number in numbers]
        size = len(order) // len(case.micro_batches)
        metrics = actor.update(tu.index_select_tensor_dict(batch, order), micro_batch_size_per_gpu=size)
        named = ("kl_before_mean", "kl_after_mean", "projected_fraction", "regression")
        found = {ours: metrics[f"trust_region/{name}"][0] for ours, name in zip(METRICS, named, strict=True)}
        (step,) = actor.steps
        return Update(metrics["loss"][0], step.gradients["lm_head.weight"].T, found)

    check_adapter(adapter, aggregation=aggregation, micro_batches=((2, 0), (3, 1)))
