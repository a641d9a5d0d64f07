"""Mixtures of experts, vision-language models and reward models train like dense language models."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoModelForSequenceClassification

from tests.tolerance import within
from tests.troll.trl import tiny, vision
from tests.troll.trl.tiny import changed, logged, make_tokenizer, parameters
from troll.trl import TrollTrainer
from troll.trl.trainer import OLD_POLICY
from troll_lab.rewards.preference import load_reward_model

BOUND = 1e-3


def assert_the_trust_region_acts_and_bounds(trainer: Any) -> None:
    """At the first update of each rollout both policies are equal, after it the bound is reached and holds."""
    before = logged(trainer, "trust_region/kl_before_max")
    assert max(before[::2]) < within(1e-6)
    assert min(before[1::2]) > BOUND
    assert min(logged(trainer, "trust_region/projected_fraction")[1::2]) > 0
    assert max(logged(trainer, "trust_region/kl_after_max")) <= BOUND * (1 + within(1e-3))
    assert max(logged(trainer, "trust_region/nonfinite")) == 0


@pytest.mark.parametrize("architecture", ["granitemoe", "phimoe"])
def test_the_experts_of_a_configuration_may_have_another_name(make, architecture):
    """By the trust region the routers' loss is read with the policy, and by the clip it is TRL's own."""
    changes: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}
    found = []
    for surrogate in ("troll", "clip"):
        trainer = make(model=tiny.make_model(architecture, **changes).train(), surrogate=surrogate)
        tiny.loss_and_gradients(trainer, tiny.rollout(trainer)[0])
        found += trainer._metrics["train"]["aux_loss"]
        assert "num_experts" not in trainer.model.config.to_dict()
    assert found[0] > 0 and found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("surrogate", ["troll", "clip"])
def test_a_mixture_without_experts_has_no_router_loss(make, surrogate):
    """Granite's dense models have the configuration of its mixtures."""
    changes: dict[str, Any] = {"num_local_experts": 0, "num_experts_per_tok": 0, "router_aux_loss_coef": 0.1}
    changes |= {"mamba_n_heads": 4, "mamba_d_head": 16, "layer_types": ["attention", "attention"]}
    trainer = make(model=tiny.make_model("granitemoehybrid", **changes).train(), surrogate=surrogate, max_steps=2)
    trainer.train()
    assert len(logged(trainer, "loss")) == 2 and not logged(trainer, "aux_loss")


def vision_trainer(make: tiny.Maker, family: str, **settings: Any) -> TrollTrainer:
    data = {"train_dataset": vision.make_dataset(), "processing_class": vision.make_processor(family)}
    return make(model=vision.make_model(family), kl_bound=BOUND, **data, **settings)


@pytest.mark.parametrize("family", vision.FAMILIES)
def test_a_vision_language_model_trains_and_saves(make, tmp_path, family):
    trainer = vision_trainer(make, family, save_strategy="steps", save_steps=2)
    before = parameters(trainer.model)
    trainer.train()
    assert_the_trust_region_acts_and_bounds(trainer)
    # Images reach the policies: without them, the tower would have no gradients.
    assert any(".vision_model." in name or ".visual." in name for name in changed(before, trainer.model))
    saved = AutoModelForImageTextToText.from_pretrained(tmp_path / "checkpoint-4", dtype=torch.float32)
    torch.testing.assert_close(saved.state_dict(), trainer.model.state_dict(), rtol=0, atol=0)
    assert (tmp_path / "checkpoint-4" / "processor_config.json").is_file()


@pytest.mark.parametrize("family", vision.FAMILIES)
def test_shuffling_keeps_images_and_policies_together(make, family):
    """The policy never moves here, so one next to another one's image would be seen as a divergence."""
    trainer = vision_trainer(
        make, family, per_device_train_batch_size=2, steps_per_generation=4, max_steps=4, learning_rate=0.0
    )
    trainer.train()
    before = logged(trainer, "trust_region/kl_before_max")
    assert len(before) == 4 and max(before) < within(1e-6)
    micro_batches: Any = trainer._buffered_inputs
    assert [len(batch[OLD_POLICY]) for batch in micro_batches] == [2, 2, 2, 2]
    if family == "qwen2_5_vl":  # Idefics3 resizes all images to one size
        grids = torch.cat([batch["image_grid_thw"] for batch in micro_batches])
        assert len(grids.unique(dim=0)) > 1
        assert [len(batch["pixel_values"]) for batch in micro_batches] == grids.prod(-1).view(4, 2).sum(-1).tolist()


@pytest.mark.parametrize("given", ["path", "model"])
def test_a_reward_model_trains(make, tmp_path, given):
    torch.manual_seed(0)
    judge = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("llama", **tiny.COMMON, num_labels=1))
    with torch.no_grad():
        judge.score.weight *= 10
    folder = str(tmp_path / "judge")
    judge.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    reward: Any = folder if given == "path" else load_reward_model(folder, conversational=False)
    trainer = make(reward_funcs=reward, kl_bound=BOUND, reward_weights=[1.0])
    trainer.train()
    assert_the_trust_region_acts_and_bounds(trainer)
    assert len(logged(trainer, "rewards/judge/mean")) == 2 and min(logged(trainer, "reward_std")) > 0
