import json
import os
import re
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from troll_lab.runs.toy_model import CHARACTERS, character_tokenizer, toy_model
from troll_lab.runs.toy_network import TOY_MOE, cached_model, default_cache_dir, model_config
from troll_lab.tasks import TaskConfig, TaskError, load_task
from troll_lab.tasks.reasoning_gym import questions

OPTIONS = {"min_terms": 2, "max_terms": 2, "max_digits": 1, "prompt": "{expression} ="}
SHORT = {"max_steps": 3, "batch_size": 8, "num_questions": 64, "test_size": 8, "test_every": 2}
TASK = TaskConfig(task_options=OPTIONS, train_size=64, eval_size=64, warm_up=SHORT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy_model(TASK, cache_dir=tmp_path_factory.mktemp("cache"))


def test_one_id_per_character_and_exact_round_trip(folder):
    texts = [CHARACTERS, "  two  spaces , 'quoted' n't .", "", "\n\n"]
    for tokenizer in (character_tokenizer(), AutoTokenizer.from_pretrained(folder)):
        assert len(tokenizer) == 99
        for text in texts:
            ids = tokenizer(text)["input_ids"]
            assert len(ids) == len(text)
            assert tokenizer.decode(ids) == text
            assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
        assert len(set(tokenizer(CHARACTERS)["input_ids"])) == len(CHARACTERS) == 96
        assert tokenizer("é")["input_ids"] == [tokenizer.unk_token_id]
        assert tokenizer.pad_token_id != tokenizer.eos_token_id
        assert tokenizer.chat_template is None


def test_the_folder_loads_and_generates(folder):
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == "qwen3"
    assert 500_000 < model.num_parameters() < 1_500_000
    generation = model.generation_config
    assert (generation.eos_token_id, generation.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert (generation.do_sample, generation.top_k) == (True, 0)
    batch = tokenizer(["4 + 3 =", "9 - 10 ="], return_tensors="pt", padding=True)
    assert model.generate(**batch, max_new_tokens=2).shape == (2, 10)


def test_the_mixture_of_experts_is_as_large_and_generates(folder, tmp_path):
    dense: Any = AutoModelForCausalLM.from_pretrained(folder)
    mixture: Any = AutoModelForCausalLM.from_pretrained(toy_model(TASK, TOY_MOE, cache_dir=tmp_path))
    assert mixture.config.model_type == "qwen3_moe"
    # What the experts' routers add: one row for each of eight experts in each of three layers.
    assert mixture.num_parameters() == dense.num_parameters() + 3 * 8 * 128
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = tokenizer(["4 + 3 ="], return_tensors="pt")
    assert mixture.generate(**prompts, min_new_tokens=2, max_new_tokens=2).shape == (1, 9)


def test_the_same_arguments_give_the_same_model(folder, tmp_path, caplog, capsys):
    """And leave the random state alone. It ends below its target, and says so."""
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    again = toy_model(TASK, cache_dir=tmp_path)
    assert torch.equal(torch.rand(3), expected)
    assert again.name == folder.name
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert "below its target of 30 %" in caplog.text
    assert "ready" not in capsys.readouterr().out


def test_toy_model_depends_on_seed_and_warm_up_not_on_sizes(folder):
    cache = {"cache_dir": folder.parent}
    before = os.stat(folder / "model.safetensors")
    assert toy_model(TaskConfig(task_options=OPTIONS, train_size=9, eval_size=9, warm_up=SHORT), **cache) == folder
    assert os.stat(folder / "model.safetensors") == before
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".")]
    longer = replace(TASK, task_options=OPTIONS | {"max_terms": 3})
    assert len({toy_model(TASK, seed=1, **cache), toy_model(longer, **cache), folder}) == 3
    assert toy_model(replace(longer, warm_up={**SHORT, "task_options": {"max_terms": 2}}), **cache) == folder


@pytest.mark.parametrize(("name", "is_there"), [("model.safetensors", True), ("manifest.json", False)])
def test_a_damaged_cache_is_made_anew(folder, name, is_there):
    content, damaged = (folder / "model.safetensors").read_bytes(), folder / name
    os.truncate(damaged, damaged.stat().st_size // 2) if is_there else damaged.unlink()
    assert toy_model(TASK, cache_dir=folder.parent) == folder
    assert (folder / "model.safetensors").read_bytes() == content
    assert json.loads((folder / "manifest.json").read_text())["steps"] == SHORT["max_steps"]


def test_the_slower_of_two_processes_takes_the_fasters_model(tmp_path):
    tokenizer, files = character_tokenizer(), []

    def make(warm_up):
        return cached_model(model_config(tokenizer), tokenizer, warm_up, determined_by={}, seed=0, cache_dir=tmp_path)

    def slower(model):
        files.append(os.stat(make(lambda model: {}) / "model.safetensors"))
        return {}

    folder = make(slower)
    assert os.stat(folder / "model.safetensors") == files[0]
    assert list(tmp_path.iterdir()) == [folder]


def test_a_cache_that_cannot_be_made_is_found_before_the_warm_up(tmp_path, monkeypatch):
    monkeypatch.setattr("troll_lab.runs.toy_model._train", lambda *_: pytest.fail("it was warmed up"))
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory"):
        toy_model(TASK, cache_dir=tmp_path / "file" / "x")


def test_an_interrupted_warm_up_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("troll_lab.runs.toy_network._sha256", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        toy_model(TASK, cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_default_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "troll"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "troll"


def test_a_share_of_the_answers_in_a_format_is_calibrated(tmp_path):
    options = {**OPTIONS, "answer_format": "<{answer}>"}
    warm_up = {**SHORT, "target_success": None, "max_steps": 20, "batch_size": 16, "learning_rate": 3e-3}
    config = TaskConfig(task_options=options, warm_up={**warm_up, "format_share": 0.2, "test_size": 32})
    folder = toy_model(config, cache_dir=tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["steps"] == 20
    # Measured again from what was saved, of the same questions.
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [question.prompt for question in questions("chain_sum", options, split="train", size=32)]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    with torch.no_grad():
        last = model(**batch).logits[:, -1].double().softmax(-1)
    probability = last[:, tokenizer.convert_tokens_to_ids("<")].mean().item()
    assert probability == pytest.approx(0.2, rel=0.051)
    assert probability == pytest.approx(manifest["format_probability"], rel=1e-4)


def test_calibration_has_its_own_number_of_steps(tmp_path, monkeypatch, caplog):
    batches = []
    monkeypatch.setattr("troll_lab.runs.toy_model.learn", lambda model, optimizer, ids, labels: batches.append(ids))
    monkeypatch.setattr("troll_lab.runs.toy_model._CALIBRATION_STEPS", 3)
    options = {**OPTIONS, "answer_format": "<{answer}>"}
    warm_up = {**SHORT, "max_steps": 50, "target_success": 1e-9, "test_every": 1, "format_share": 0.5}
    toy_model(TaskConfig(task_options=options, warm_up=warm_up), cache_dir=tmp_path)
    assert len(batches) == 1 + 3
    assert "not with format_share=0.5" in caplog.text


def test_learning_rate_rises_and_falls(tmp_path, monkeypatch):
    rates = []
    monkeypatch.setattr(
        "troll_lab.runs.toy_model.learn", lambda model, optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
    )
    warm_up = {**SHORT, "max_steps": 7, "learning_rate": 1.0, "rise_steps": 2, "fall_steps": 4, "target_success": None}
    toy_model(TaskConfig(task_options=OPTIONS, warm_up=warm_up), cache_dir=tmp_path)
    assert rates == [0.5, 1, 1, 1, 0.75, 0.5, 0.25]


def test_the_bar_of_a_warm_up_that_reaches_its_target_is_full(tmp_path, capsys):
    at_once = {**SHORT, "max_steps": 50, "target_success": 1e-9}
    toy_model(TaskConfig(task_options=OPTIONS, warm_up=at_once), cache_dir=tmp_path)
    assert re.search(r" 2/2 ready at \d+%", capsys.readouterr().out)


def sums(warm_up, **options):
    return TaskConfig(task_options=OPTIONS | options, warm_up=warm_up)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (sums({"steps": 3}), "warm_up: the toy model has no setting 'steps', did you mean max_steps"),
        (sums({"format_share": 0}), r"format_share of the toy model must be in \(0, 1\], got 0"),
        (sums({"max_steps": "many"}), "max_steps of the toy model must be an integer, at least 1, got 'many'"),
        (sums({"task_options": 2}), "task_options of the toy model must be a mapping, got 2"),
        (sums({"target_success": "half"}), r"target_success of the toy model must be in \(0, 1\], got 'half'"),
        (sums({"target_success": 30}), r"target_success of the toy model must be in \(0, 1\], got 30"),
        (sums({"learning_rate": 0}), "learning_rate of the toy model must be finite and above 0, got 0"),
        (sums({**SHORT, "format_share": 0.1}), "needs a task option answer_format"),
        (
            sums({**SHORT, "format_share": 0.1}, answer_format="{answer}!"),
            "needs a task option answer_format",
        ),
        (TaskConfig("free_text", warm_up=SHORT), "'free_text' takes none"),
        (TaskConfig("gsm8k"), "learns 'free_text' and 'reasoning_gym:<data set>' tasks, not 'gsm8k'"),
        (TaskConfig("reasoning_gym:nothing"), "unknown reasoning-gym data set 'nothing'"),
    ],
)
def test_toy_model_refuses_what_it_cannot_learn_from(config, message, tmp_path):
    with pytest.raises(TaskError, match=message) as error:
        toy_model(config, cache_dir=tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_full_warm_up_reaches_its_target_in_samples(tmp_path, seed):
    options = {"min_terms": 3, "max_terms": 3, "max_digits": 1, "prompt": "{expression} ="}
    config = TaskConfig(task_options=options, train_size=1, eval_size=512)
    folder = toy_model(config, seed=seed, cache_dir=tmp_path)
    task = load_task(config)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = task.eval_dataset[:]
    batch = tokenizer(rows["prompt"], return_tensors="pt", padding=True)
    torch.manual_seed(0)
    generated = model.generate(**batch, max_new_tokens=8)
    answers = tokenizer.batch_decode(generated[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    rewards = task.reward_funcs[0](prompts=rows["prompt"], completions=answers, question_id=rows["question_id"])
    assert 0.2 <= sum(rewards) / len(rewards) <= 0.5
