"""The laboratory's trainer next to TrollTrainer: whose configuration is whose, and that its defaults change nothing."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from tests.troll.trl import tiny
from troll.trl import TrollConfig, TrollTrainer
from troll_lab.trl import LabConfig, LabTrainer

TIMES = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second", "eval_runtime"}
TIMES |= {"eval_samples_per_second", "eval_steps_per_second"}

OF_A_LOSS = ("eval_loss", "eval_entropy", "eval_clip_ratio/")
EVALUATED = ("eval_reward", "eval_rewards/reward/mean")

#: What the method has: defaults, other estimators and surrogates, adapters of the rollout, and several micro-batches.
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "resumed": {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "RLOO, KL in the reward": {"advantage_estimator": "rloo", "kl_in_reward": True, "beta": 0.1},
    "clip": {"surrogate": "clip", "diagnostics_steps": 2, "loss_type": "dapo"},
}


def log(trainer: Any) -> list[dict[str, Any]]:
    """What a trainer has logged, without times."""
    return [{k: v for k, v in entry.items() if k not in TIMES} for entry in trainer.state.log_history]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_lab_trainer_is_bit_by_bit_troll_trainer_by_default(make, tmp_path, settings):
    given = {
        "kl_bound": 0.01,
        "eval_dataset": tiny.make_dataset(4),
        "eval_strategy": "steps",
        "eval_steps": 2,
        **settings,
    }
    trained = {}
    for kind in (TrollTrainer, LabTrainer):
        trainer = make(kind, output_dir=str(tmp_path / kind.__name__), **given)
        trainer.train()
        if "save_steps" in settings:
            trainer = make(kind, output_dir=str(tmp_path / kind.__name__), **given)
            trainer.train(resume_from_checkpoint=str(tmp_path / kind.__name__ / "checkpoint-2"))
        trained[kind] = log(trainer), tiny.parameters(trainer.model)
    (base, weights), (lab, lab_weights) = trained.values()
    assert any("trust_region/kl_before_mean" in entry for entry in base) or settings.get("surrogate") == "clip"
    # But for what the loss of an evaluation measures.
    assert not any(name.startswith(OF_A_LOSS) for entry in lab for name in entry)
    # And but for the mean rewards of an evaluation, which are means over all completions in float64.
    means = [[[entry[name] for entry in logs if name in entry] for name in EVALUATED] for logs in (lab, base)]
    assert means[0] == [pytest.approx(values, rel=1e-6) for values in means[1]]
    lab, base = (
        [{k: v for k, v in entry.items() if not k.startswith(OF_A_LOSS) and k not in EVALUATED} for entry in logs]
        for logs in (lab, base)
    )
    assert lab == base and [list(entry) for entry in lab] == [list(entry) for entry in base]
    torch.testing.assert_close(lab_weights, weights, rtol=0, atol=0)


def test_an_evaluation_scores_no_answers(make, monkeypatch):
    held_out = {"eval_dataset": tiny.make_dataset(4), "beta": 0.1, "advantage_estimator": "rloo"}
    metrics = make(LabTrainer, **held_out).evaluate()
    trainer = make(LabTrainer, **held_out)

    def score(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("scored")

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", score)
    assert trainer.evaluate().keys() == metrics.keys()
    assert "eval_loss" not in metrics and "eval_reward" in metrics
    # With an engine, TRL compares the scores with what the engine reports.
    trainer.use_vllm = True
    with pytest.raises(AssertionError, match="scored"):
        trainer._get_per_token_logps_and_entropies(trainer.model, torch.ones(2, 5), torch.ones(2, 5), 3)


def test_each_trainer_refuses_the_configuration_of_the_other(make, tmp_path):
    common: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    with pytest.raises(
        TypeError, match=r"must be a TrollConfig, got LabConfig, which .* only troll_lab.trl.LabTrainer"
    ):
        TrollTrainer(make.model(), tiny.reward, LabConfig(**common))
    with pytest.raises(TypeError, match="must be a LabConfig, got TrollConfig: change the name"):
        LabTrainer(make.model(), tiny.reward, TrollConfig(**common))  # type: ignore[arg-type]  # which is refused


def test_lab_config_adds_no_more_than_it_says():
    """And `TrollConfig` at most sixteen fields to TRL's."""
    trl, method, laboratory = ({field.name for field in fields(kind)} for kind in (GRPOConfig, TrollConfig, LabConfig))
    assert len(method - trl) <= 16
    assert laboratory - method == {
        "critic_kwargs",
        "generation_chunk_size",
        "resampling_rounds",
        "rollout_delay",
        "eval_temperature",
    }
