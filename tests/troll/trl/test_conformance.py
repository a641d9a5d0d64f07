"""TrollTrainer keeps the contract of an adapter: `troll.testing.check_adapter` on a network that is a table."""

from typing import Any

import pytest
import torch

from tests.tables import set_table, table_model
from tests.troll.trl.tiny import Maker, gradients, rollout
from troll.testing import METRICS, Case, Update, check_adapter


def trainer_of(make: Maker, case: Case, **settings: Any) -> Any:
    """A trainer whose rollout is the case's samples, four completions of one group."""
    micro_batches, samples = len(case.micro_batches), case.samples
    settings |= {name: getattr(case, name) for name in ("kl_bound", "regression_weight", "mass_threshold")}
    trainer = make(
        model=table_model(case.old_table),
        support_top_k=case.top_k,
        temperature=case.temperature,
        per_device_train_batch_size=len(samples) // micro_batches,
        gradient_accumulation_steps=micro_batches,
        steps_per_generation=micro_batches,
        num_iterations=2,
        num_generations=len(samples),
        max_completion_length=9,
        **settings,
    )
    ids = {"prompt_ids": [x.prompt.tolist() for x in samples], "completion_ids": [x.response.tolist() for x in samples]}
    masks = [sample.counts.int().tolist() for sample in samples]
    trainer.rollout_func = lambda prompts, trainer: {**ids, "logprobs": None, "env_mask": masks}
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
        loss = torch.stack(losses).sum()
        loss.backward()
        found = trainer.monitor.tally.values()
        named = dict(zip(METRICS, ("kl_before_mean", "kl_after_mean", "projected_fraction", "regression"), strict=True))
        metrics = {name: float(found[ours]) for name, ours in named.items()}
        return Update(loss.detach(), gradients(trainer.model)["lm_head.weight"].T, metrics)

    equal = ((2, 0), (3, 1))
    check_adapter(adapter, aggregation=aggregation, max_length=max_length, layouts=["padded"], micro_batches=equal)
