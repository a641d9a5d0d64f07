"""Generation in chunks: the same completions as in one call, from fewer sequences at a time."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig
from trl import GRPOTrainer

from tests.troll.trl import tiny, vision
from troll_lab.trl.generation import generate_in_chunks, split

GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


def prompts(rows: int = 7) -> dict[str, torch.Tensor]:
    """Left-padded, of different lengths."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(7, len(tiny.VOCABULARY), (rows, 5), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows):
        ids[row, : row % 3], mask[row, : row % 3] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def record_rows(model: Any) -> list[int]:
    """The rows of every forward of the prompts from now on."""
    rows: list[int] = []

    def record(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        if inputs["input_ids"].shape[1] > 1:
            rows.append(len(inputs["input_ids"]))

    model.register_forward_pre_hook(record, with_kwargs=True)
    return rows


@pytest.mark.parametrize(("size", "peft"), [(1, False), (3, True), (7, False), (100, False)])
def test_the_same_completions_from_fewer_sequences_at_a_time(size, peft):
    model: Any = tiny.make_model("llama").eval()
    if peft:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    config = GenerationConfig(**GREEDY, eos_token_id=[2, 3, 4, 5, 6])
    expected = model.generate(**prompts(), generation_config=config)
    assert len({int((row != 0).sum()) for row in expected}) > 1, "completions of one length would show nothing"
    generate_in_chunks(model, size)
    rows = record_rows(model.base_model.model if peft else model)
    assert torch.equal(model.generate(**prompts(), generation_config=config), expected)
    assert rows == ([size] * (7 // size) + [7 % size] * (7 % size > 0) if size < 7 else [7])


def test_generate_keeps_its_checks_and_other_calls():
    model: Any = tiny.make_model("llama").eval()
    documentation = model.generate.__doc__
    generate_in_chunks(model, 2)
    assert model.generate.__doc__ == documentation
    with pytest.raises(ValueError, match=r"model_kwargs.* are not used by the model.*nonsense"):
        model.generate(**prompts(), nonsense=torch.zeros(7), **GREEDY)
    rows = record_rows(model)
    settings = {**GREEDY, "return_dict_in_generate": True}  # more than ids
    for given in (settings, {"generation_config": GenerationConfig(**settings)}):
        assert model.generate(**prompts(), **given).sequences.shape[0] == 7
    assert rows == [7, 7]


def test_processes_that_share_weights_generate_equally_often(monkeypatch):
    model: Any = tiny.make_model("llama").eval()
    monkeypatch.setattr("troll_lab.trl.generation.FSDPModule", type(model))  # as if `fully_shard` had changed its class
    monkeypatch.setattr("troll_lab.trl.generation.gather_object", lambda own: [*own, False])  # of one that cannot split
    generate_in_chunks(model, 2)
    rows = record_rows(model)
    model.generate(**prompts(), **GREEDY)
    assert rows == [7]


def test_a_copy_generates_with_its_own_weights():
    model: Any = tiny.make_model("llama").eval()
    generate_in_chunks(model, 2)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    fresh: Any = tiny.make_model("llama").eval()
    assert torch.equal(other.generate(**prompts(), **GREEDY), fresh.generate(**prompts(), **GREEDY))
    assert not torch.equal(other.generate(**prompts(), **GREEDY), model.generate(**prompts(), **GREEDY))


@pytest.mark.parametrize(
    "changed",
    [
        {"image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 2], [1, 2, 2], [1, 2, 2]])},  # two images in a prompt
        {"pixel_values": torch.zeros(13, 1)},
        {"cache_position": torch.zeros(5)},
        {"input_ids": torch.zeros(2, 5)},
    ],
)
def test_split_leaves_tensors_without_a_row_a_prompt_whole(changed):
    inputs = {"input_ids": torch.zeros(3, 5), "image_grid_thw": torch.tensor([[1, 2, 2]] * 3)}
    inputs["pixel_values"] = torch.zeros(12, 1)
    assert [part.keys() for part in split(inputs | {"use_cache": True}, 2) or []] == [inputs.keys()] * 2
    assert split(inputs | changed, 2) is None


@pytest.mark.parametrize("family", ["llama", *vision.FAMILIES])
def test_trl_gets_the_same_rollout(make, family):
    """Images go with their prompts, in patches (Qwen) or frames (Idefics3)."""
    source: Any = vision if family in vision.FAMILIES else tiny
    processing_class = vision.make_processor(family) if source is vision else None
    rollouts: list[list[list[int]]] = []
    rows: list[int] = []
    for size in (None, 3):
        data = {"train_dataset": source.make_dataset(), "processing_class": processing_class}
        trainer = make(GRPOTrainer, source.make_model(family), top_k=1, **data)
        if size is not None:
            generate_in_chunks(trainer.model, size)
            rows = record_rows(trainer.model)
        batches = tiny.rollout(trainer)
        ids = torch.cat([torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1) for batch in batches])
        rollouts.append(sorted(ids.tolist()))  # TRL shuffles them
    assert rows[:3] == [3, 3, 2], "a rollout is two prompts, four completions each"
    if "image_grid_thw" in batches[0]:
        assert len(torch.cat([batch["image_grid_thw"] for batch in batches]).unique(dim=0)) > 1, "images of one size"
    assert rollouts[0] == rollouts[1]
    assert rollouts[0][0] != rollouts[0][-1]
