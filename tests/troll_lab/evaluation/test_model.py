import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.troll.trl.tiny import adapted
from troll_lab.evaluation import model as model_module
from troll_lab.evaluation.config import EvaluationError
from troll_lab.evaluation.model import find_model, load_model, load_tokenizer


def save_adapter(base: Any, folder: Path, **settings: Any) -> Any:
    """Trains an adapter on a model and saves it; returns the model in training."""
    config = LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"], **settings})
    trained = adapted(base, config)
    trained.save_pretrained(str(folder))
    return trained


def logits_of(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = load_model(find_model(str(folder)), "float64").eval()(ids).logits
    return found


@pytest.fixture
def base(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)


IDS = torch.arange(4, 20).unsqueeze(0)


def test_run_folder_means_its_model(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "run" / "model")
    source = find_model(str(tmp_path / "run"))
    assert source.path == source.base == str(tmp_path / "run" / "model")
    assert (source.adapter_rank, source.context) == (None, 1024)
    assert load_model(source, "float32").dtype == torch.float32
    assert load_model(source, "bfloat16").dtype == torch.bfloat16


def test_fingerprint_changes_with_the_weights(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    before = find_model(str(folder)).fingerprint
    assert find_model(str(folder)).fingerprint == before
    (folder / "README.md").write_text("a corrected card")
    assert find_model(str(folder)).fingerprint == before
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert find_model(str(folder)).fingerprint != before


def test_load_model_has_adapter_of_training(tiny_model: Path, tmp_path: Path, base: Any) -> None:
    plain = base(IDS).logits.detach().clone()
    trained = save_adapter(base, tmp_path)
    source = find_model(str(tmp_path))
    assert (source.path, source.base) == (str(tmp_path), str(tiny_model))
    assert (source.adapter_rank, source.context) == (4, 1024)
    torch.testing.assert_close(logits_of(tmp_path, IDS), trained(IDS).logits, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(trained(IDS).logits, plain)
    assert load_tokenizer(source).get_vocab() == AutoTokenizer.from_pretrained(tiny_model).get_vocab()


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["lm_head"]},
        {"target_modules": ["embed_tokens"], "use_dora": True},
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_rslora": True},
        {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "lora_bias": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [4, 5]},
        {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [4, 5]}},
    ],
    ids=str,
)
def test_load_model_has_adapter_of_shared_weights(tiny_model, tmp_path, base, settings):
    assert base.lm_head.weight is base.model.embed_tokens.weight
    trained = save_adapter(base, tmp_path, **settings)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    torch.testing.assert_close(logits_of(tmp_path, IDS), trained(IDS).logits, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("more_rows", [0, 8])
def test_embedding_has_the_rows_of_training(tiny_model: Path, tmp_path: Path, base: Any, more_rows: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    rows = len(tokenizer) + more_rows
    tokenizer.add_tokens(["<new>", "<newer>"])
    if more_rows:
        base.resize_token_embeddings(rows)
    trained = save_adapter(base, tmp_path)
    tokenizer.save_pretrained(tmp_path)
    logits = logits_of(tmp_path, IDS)
    assert logits.shape[-1] == rows
    torch.testing.assert_close(logits, trained(IDS).logits, rtol=1e-12, atol=1e-12)


def test_find_model_downloads_an_adapter_of_the_hub(
    tiny_model: Path, tmp_path: Path, base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_adapter(base, tmp_path)
    asked: list[tuple[str, str | None]] = []

    def download(name: str, *_: str, revision: str | None, **__: Any) -> str:
        asked.append((name, revision))
        return str(tmp_path)

    monkeypatch.setattr(model_module, "hf_hub_download", download)
    monkeypatch.setattr(model_module, "snapshot_download", download)
    found = find_model("you/adapter", revision="v1")
    assert (found.name, found.path, found.base) == ("you/adapter", str(tmp_path), str(tiny_model))
    assert found.adapter_rank == 4 and tmp_path.name in found.fingerprint.split()
    assert asked == [("you/adapter", "v1")] * 2


def test_adapter_is_not_rounded_to_dtype_of_base(tmp_path: Path, base: Any) -> None:
    base.bfloat16().save_pretrained(tmp_path / "base")
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    trained = save_adapter(stored, tmp_path, task_type=None)
    loaded = load_model(find_model(str(tmp_path)), "auto").eval()
    assert isinstance(loaded, PeftModelForCausalLM)  # whose `generate` takes the configuration that it is given
    assert stored.dtype == torch.bfloat16 and torch.equal(loaded(IDS).logits, trained(IDS).logits)
    assert {weight.dtype for name, weight in loaded.named_parameters() if "lora" in name} == {torch.float32}


def save_config(folder: Path, **settings: Any) -> str:
    """Writes the configuration of an adapter without its weights."""
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


def test_find_model_names_what_is_no_model(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(EvaluationError, match="cannot load the model 'nobody/nothing': there is no such folder"):
        find_model("nobody/nothing")
    with pytest.raises(EvaluationError, match="does not hold a model that transformers can load"):
        find_model(str(tmp_path))
    with pytest.raises(EvaluationError, match="or the model 'nobody/nothing' that it changes"):
        find_model(save_config(tmp_path, peft_type="LORA", base_model_name_or_path="nobody/nothing", r=4))
    prompts = {"peft_type": "PROMPT_TUNING", "base_model_name_or_path": str(tiny_model), "task_type": "CAUSAL_LM"}
    with pytest.raises(EvaluationError, match="is an adapter without a rank"):
        find_model(save_config(tmp_path, **prompts))
    with pytest.raises(EvaluationError, match="the toy model is made by troll train: give the folder of a run"):
        find_model("toy")
    with pytest.raises(EvaluationError, match="model_revision is for models on the hub"):
        find_model(str(tiny_model), revision="v2")


def test_model_may_lack_tokenizer_and_weights(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_model / "config.json", tmp_path)
    source = find_model(str(tmp_path))
    with pytest.raises(EvaluationError, match="has no tokenizer"):
        load_tokenizer(source)
    with pytest.raises(EvaluationError, match="does not hold a model"):
        load_model(source, "auto")


def test_weights_that_are_cut_short_are_named(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(EvaluationError, match=r"the weights of .*model cannot be read, .*: download or save"):
        load_model(find_model(str(folder)), "auto")


def test_code_of_a_model_has_to_be_allowed(tmp_path: Path) -> None:
    (tmp_path / "configuration_own.py").write_text(
        "from transformers import PretrainedConfig\n\n\nclass Own(PretrainedConfig):\n    model_type = 'own'\n"
    )
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.Own"}}')
    with pytest.raises(EvaluationError, match="comes with its own code: let it run with --trust_remote_code"):
        find_model(str(tmp_path))
    assert find_model(str(tmp_path), trust_remote_code=True).trust_remote_code


def test_revision_and_remote_code_reach_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def spy(path: str, **options: Any) -> Any:
        seen.append({name: options[name] for name in ("revision", "trust_remote_code")})
        return SimpleNamespace(get_text_config=lambda: None, to=lambda device: None)

    for loader in ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"):
        monkeypatch.setattr(f"troll_lab.evaluation.model.{loader}.from_pretrained", spy)
    source = find_model("some/model", revision="v2", trust_remote_code=True)
    load_tokenizer(source)
    load_model(source, "auto")
    assert seen == [{"revision": "v2", "trust_remote_code": True}] * 3
