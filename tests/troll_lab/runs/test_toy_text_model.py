import json
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from troll_lab.runs.toy_model import toy_model
from troll_lab.runs.toy_network import TOY_MOE
from troll_lab.runs.toy_text_model import TextWarmUp, toy_text_model, word_piece_tokenizer
from troll_lab.tasks import TaskConfig

PARAGRAPHS = [
    ["The first sentence names a thing.", "The second sentence says what the thing does and why it is there."],
    ["Every function returns a value, and the caller may ignore the value."],
] * 20
SHORT = TextWarmUp(vocab_size=320, max_steps=60, batch_size=8, max_length=16, learning_rate=3e-3, test_size=4)


@pytest.fixture(scope="module", autouse=True)
def little_text():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("troll_lab.runs.toy_text_model.paragraphs", lambda split: PARAGRAPHS)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy_text_model(cache_dir=tmp_path_factory.mktemp("cache"), warm_up=SHORT)


@pytest.mark.parametrize("text", ["The first sentence.", "  spaces \n\n and 'quotes' ", "ünïcode – ✓", ""])
def test_word_pieces_encode_any_text_and_give_it_back(text):
    tokenizer = word_piece_tokenizer([" ".join(sentences) for sentences in PARAGRAPHS], 300)
    assert len(tokenizer) == 300
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer.chat_template is None
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_the_folder_loads_and_has_learned_to_continue_the_text(folder):
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (len(tokenizer), model.config.vocab_size) == (320, 320)
    assert (model.generation_config.do_sample, model.generation_config.top_k) == (True, 0)
    prompt = tokenizer("Every function returns", return_tensors="pt")
    (written,) = tokenizer.batch_decode(model.generate(**prompt, max_new_tokens=5, do_sample=False))
    assert "Every function returns a value, and the caller may ignore".startswith(written)
    assert json.loads((folder / "manifest.json").read_text())["loss"] < 1


def test_the_best_weights_are_kept_where_the_loss_rises(tmp_path):
    # Far too fast: it ends at the second test.
    hasty = TextWarmUp(**{**vars(SHORT), "learning_rate": 1.0, "rise_steps": 40, "test_every": 2})
    folder = toy_text_model(cache_dir=tmp_path, warm_up=hasty)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["steps"] < hasty.max_steps
    assert manifest["loss"] < 6
    ids = AutoTokenizer.from_pretrained(folder)(" ".join(PARAGRAPHS[0]), return_tensors="pt")["input_ids"][:, :16]
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        assert model(ids, labels=ids).loss < 5  # 6.1 with the last weights


def test_toy_text_model_depends_on_all_its_arguments(folder, tmp_path, monkeypatch):
    again = toy_text_model(cache_dir=tmp_path, warm_up=SHORT)
    assert again.name == folder.name
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert toy_text_model(cache_dir=folder.parent, warm_up=SHORT) == folder
    quick = TextWarmUp(**{**vars(SHORT), "max_steps": 1})
    names = {folder.name, toy_text_model(cache_dir=tmp_path, warm_up=quick).name}
    names.add(toy_text_model(cache_dir=tmp_path, warm_up=quick, seed=1).name)
    monkeypatch.setattr("troll_lab.runs.toy_text_model.paragraphs", lambda split: PARAGRAPHS[:3])
    names.add(toy_text_model(cache_dir=tmp_path, warm_up=quick).name)
    assert len(names) == 4


def test_it_is_the_toy_model_of_free_text(folder, monkeypatch):
    stand_in = Mock(return_value=folder)
    monkeypatch.setattr("troll_lab.runs.toy_model.toy_text_model", stand_in)
    assert toy_model(TaskConfig(task="free_text"), TOY_MOE, seed=3) == folder
    stand_in.assert_called_once_with("toy-moe", seed=3, cache_dir=None)
