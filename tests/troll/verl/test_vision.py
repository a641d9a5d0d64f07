"""Vision-language models on verl's FSDP engine: their forward is another, and so is the place of their head."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from tests.tolerance import within
from tests.troll.verl.actor import (
    SHAPE,
    SMALL,
    Actor,
    as_batch,
    configuration,
    in_this_process,
    policy_loss,
    rollout,
    saved,
)
from tests.troll.verl.reference import compared
from troll_lab.runs.toy_model import character_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = {**SHAPE, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "rope_parameters": rope}
    vision: dict[str, Any] = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {"out_hidden_size": 32, "deepstack_visual_indexes": [0]}
    vision |= {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 1, "num_position_embeddings": 16}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, image_token_id=1, tie_word_embeddings=False)
    return saved(Qwen3VLForConditionalGeneration(config), tmp_path_factory.mktemp("model"))


def trained(actor: Actor) -> tuple[Any, Any]:
    batch = as_batch(rollout())
    scored = actor.reset().score(batch)
    return scored["old_log_probs"].values(), (actor.update(scored), actor.steps[0].gradients)


def test_head_of_a_vision_language_model_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its updates are those from its logits, and its scores those of verl's own engine."""
    padded = "actor_rollout_ref.model.use_remove_padding=False"
    actor = in_this_process(configuration(folder, padded, *policy_loss(*SMALL)))
    stock = in_this_process(configuration(folder, padded, plug_in=()))
    assert type(actor.engine.module).forward.__module__.startswith("verl.")
    (head_scores, (head_metrics, head_gradients)) = trained(actor)
    assert actor.engine.from_head
    monkeypatch.setitem(vars(actor.engine), "reads_head", False)
    (scores, (metrics, gradients)) = trained(actor)
    assert not actor.engine.from_head
    own = stock.reset().score(as_batch(rollout()))["old_log_probs"].values()
    for got in (head_scores, scores):
        torch.testing.assert_close(got, own, rtol=0, atol=within(1e-5))
    assert metrics["trust_region/projected_fraction"][-1] > 0
    assert head_metrics["loss"][0] == pytest.approx(metrics["loss"][0], abs=within(1e-5))
    assert compared(head_gradients, gradients) < within(3e-5)
