"""TrollTrainer keeps the contract of an adapter: `troll.testing.check_adapter` on a network that is a table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tables import set_table, table_model
from tests.trl.tiny import Maker, gradients, rollout
from troll.testing import METRICS, Case, Update, check_adapter
from troll.trl import TrollTrainer


def trainer_of(make: Maker, case: Case, **settings: Any) -> Any:
    """A trainer whose rollout is the case's samples, four completions of one group."""
    micro_batches = len(case.micro_batches)
    trainer = make(
        TrollTrainer,
        table_model(case.old_table),
        kl_bound=case.kl_bound,
        regression_weight=case.regression_weight,
        support_top_k=case.top_k,
        mass_threshold=case.mass_threshold,
        temperature=case.temperature,
        per_device_train_batch_size=len(case.samples) // micro_batches,
        gradient_accumulation_steps=micro_batches,
        steps_per_generation=micro_batches,
        num_iterations=2,
        num_generations=len(case.samples),
        max_completion_length=9,
        **settings,
    )
    trainer.rollout_func = lambda prompts, trainer: {
        "prompt_ids": [sample.prompt.tolist() for sample in case.samples],
        "completion_ids": [sample.response.tolist() for sample in case.samples],
        "logprobs": None,
        "env_mask": [sample.counts.int().tolist() for sample in case.samples],
    }
    return trainer


def with_advantages(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """TRL shuffles its samples: each is known by its completion."""
    lengths = inputs["completion_mask"].sum(-1).tolist()
    completions = [ids[:length].tolist() for ids, length in zip(inputs["completion_ids"], lengths, strict=True)]
    advantages = {tuple(sample.response.tolist()): sample.advantage for sample in case.samples}
    return inputs | {"advantages": torch.tensor([advantages[tuple(ids)] for ids in completions])}


@pytest.mark.parametrize(
    ("loss_type", "aggregation", "max_length"), [("grpo", "sequence_mean", None), ("dr_grpo", "fixed_length", 9)]
)
def test_the_trainer_keeps_the_contract(make: Maker, loss_type: str, aggregation: Any, max_length: int | None) -> None:
    def adapter(case: Case) -> Update:
        trainer = trainer_of(make, case, loss_type=loss_type)
        inputs = rollout(trainer)
        set_table(trainer.model, case.new_table)
        trainer.model.zero_grad()
        losses = [trainer._compute_loss(trainer.model, with_advantages(batch, case)) for batch in inputs]
        torch.stack(losses).sum().backward()
        found = trainer.monitor.tally.values()
        named = dict(zip(METRICS, ("kl_before_mean", "kl_after_mean", "projected_fraction", "regression"), strict=True))
        metrics = {name: float(found[ours]) for name, ours in named.items()}
        return Update(torch.stack(losses).sum().detach(), gradients(trainer.model)["lm_head.weight"].T, metrics)

    check_adapter(adapter, aggregation=aggregation, max_length=max_length, layouts=["padded"])
