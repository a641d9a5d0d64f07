"""Everything that needs a GPU, in at most 20 minutes: kernel tests, benchmarks at real shapes, a short training.

It uses the packages that are installed, names the parts that it skips or that do not fit in time, and needs no network.
It writes one JSON file and one Markdown page under the name of the GPU. `make bench-gpu` runs it with the right Python.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from rich.console import Console

from benchmarks import measure
from troll.files import json_text

#: The packages that `troll compare` imports. Below, the model of its runs, untrained, with 0.1 billion parameters.
TRAINING_NEEDS = ("trl", "transformers", "accelerate", "datasets", "peft", "reasoning_gym", "yamlcore", "rich")
MODEL = {"vocab_size": 151_936, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
SMALL_MODEL = {"vocab_size": 512, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
TRAINING = {"max_steps": 16, "per_device_train_batch_size": 64, "steps_per_generation": 4, "max_completion_length": 64}
SMALL_TRAINING = TRAINING | {"max_steps": 4, "per_device_train_batch_size": 8, "max_completion_length": 4}


class Part(NamedTuple):
    """One part of the run.

    Attributes:
        name: The name of the part.
        seconds: The seconds that it may take.
        run: Takes the device, the repeats, a folder and the seconds that are left, and returns the rows of its table.
    """

    name: str
    seconds: float
    run: Callable[[str, int, Path, float], list[dict[str, Any]]]


class Skipped(Exception):
    """Raised when a part cannot run here, with the reason."""


def benchmark(name: str) -> Callable[[str, int, Path, float], list[dict[str, Any]]]:
    """Makes a part of another benchmark, which runs in a separate process."""

    def run(device: str, repeats: int, folder: Path, seconds: float) -> list[dict[str, Any]]:
        options = ["--device", device, "--repeats", str(repeats), "--output", str(folder)]
        options += ["--small"] if measure.small else []
        _call([sys.executable, "-m", "benchmarks", name, *options], seconds)
        rows: list[dict[str, Any]] = json.loads((folder / f"{name}-{device}.json").read_text())["rows"]
        return rows

    return run


def kernel_tests(device: str, repeats: int, folder: Path, seconds: float) -> list[dict[str, Any]]:
    """Tests the Triton kernels against the torch code and float64, on this GPU, or interpreted without one."""
    if missing := _missing("pytest", "triton", "hypothesis", "scipy"):
        raise Skipped(missing)
    files = sorted(map(str, Path("tests/troll/trust_region").rglob("test_*_triton*.py")))
    if measure.small:
        files = files[:1]
    report = folder / "tests.xml"
    # Compiling takes most of the time, and that is the CPU's work.
    workers = [] if _missing("xdist") else ["-n", str(min(os.cpu_count() or 1, 12)), "--dist", "worksteal"]
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *workers, *files]
    _call(command, seconds, accepted=(0, 1))
    suite = next(ElementTree.parse(report).iter("testsuite"))
    row = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    if row["failures"] + row["errors"]:
        raise RuntimeError(f"{row['failures']} of {row['tests']} tests failed, {row['errors']} broke down")
    return [row]


def training(device: str, repeats: int, folder: Path, seconds: float) -> list[dict[str, Any]]:
    """Times a few steps of TROLL and of the clip on an untrained model, by `troll compare`."""
    if missing := _missing(*TRAINING_NEEDS):
        raise Skipped(missing)
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from troll_lab.runs.toy_model import character_tokenizer

    tokenizer = character_tokenizer()
    size: dict[str, Any] = SMALL_MODEL if measure.small else MODEL
    config = Qwen3Config(
        **size,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=size["hidden_size"] // 8,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    settings = (SMALL_TRAINING if measure.small else TRAINING) | {
        "model_name_or_path": folder / "model",
        "output_dir": folder / "compare",
        "bf16": device == "cuda",
        "use_cpu": device == "cpu",
        "eval_strategy": "no",
        "eval_on_start": False,
        "eval_size": 8,
        "save_strategy": "no",
    }
    options = []
    for key, value in settings.items():
        options += [f"--{key}", str(value).lower() if isinstance(value, bool) else str(value)]
    program = "import sys; from troll_lab.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "compare", "quickstart", "--surrogate", "clip", "troll", "--jobs", "1"]
    _call([*command, *options], seconds)
    summaries = {path.parent.name: json.loads(path.read_text()) for path in (folder / "compare").glob("*/summary.json")}
    keys = ("steps", "seconds", "training_seconds")
    parameters = sum(x.numel() for x in model.parameters())
    return [{"run": name, "parameters": parameters} | {key: x[key] for key in keys} for name, x in summaries.items()]


#: The parts in their order; each may use the time that is left.
PARTS = (
    Part("tests", 240, kernel_tests),
    Part("head", 240, benchmark("head")),
    Part("capture", 120, benchmark("capture")),
    Part("step", 180, benchmark("step")),
    Part("scaling", 180, benchmark("scaling")),
    Part("projection", 60, benchmark("projection")),
    Part("packed", 60, benchmark("packed")),
    Part("training", 240, training),
)


def main(device: str, repeats: int, output: Path, minutes: float) -> bool:
    """Runs all parts, writes the results to the folder after each, and returns whether none failed."""
    environment = measure.environment(device)
    name = "-".join("".join(x if x.isalnum() else " " for x in environment["device"]).lower().split())
    end = time.monotonic() + 60 * minutes
    found: list[dict[str, Any]] = []
    for part in PARTS:
        began = time.monotonic()
        limit = min(part.seconds, end - began)
        rows: list[dict[str, Any]] = []
        try:
            with tempfile.TemporaryDirectory() as folder:
                rows, outcome = part.run(device, repeats, Path(folder), limit), "done"
        except Skipped as reason:
            outcome = f"skipped: {reason}"
        except subprocess.TimeoutExpired:
            outcome = f"did not fit in {max(limit, 0):.0f} s"
        except Exception as error:  # the others go on
            outcome = f"failed: {type(error).__name__}: {error}"
        found.append({"part": part.name, "outcome": outcome, "seconds": time.monotonic() - began, "rows": rows})
        Console().print(f"[bold]{part.name}[/bold]: {outcome}, {found[-1]['seconds']:.0f} s", highlight=False)
        (output / f"{name}.json").write_text(json_text({"environment": environment, "parts": found}, indent=1))
        (output / f"{name}.md").write_text(page(environment, found))
    Console().print(output / f"{name}.md")
    return not any(part["outcome"].startswith("failed") for part in found)


def page(environment: dict[str, Any], found: list[dict[str, Any]]) -> str:
    """All rows as Markdown tables."""
    lines = [f"# {environment['device']}", "", ", ".join(f"{key} {value}" for key, value in environment.items()), ""]
    for part in found:
        lines += [f"## {part['part']}: {part['outcome']}, {part['seconds']:.0f} s", ""]
        rows = [{key: _cell(key, value) for key, value in row.items() if key != "names"} for row in part["rows"]]
        for keys, same in groupby(rows, key=tuple):
            lines += [f"| {' | '.join(keys)} |", "|" + "---|" * len(keys)]
            lines += [f"| {' | '.join(row.values())} |" for row in same]
            lines.append("")
    return "\n".join(lines)


def _cell(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} ≤ {bar:g}" for name, bar in value.items())
    if isinstance(value, list):
        if not value or isinstance(value[0], str):
            return ", ".join(value)
        value = statistics.median(value)
    if key.endswith("seconds") and isinstance(value, float):
        return measure.duration(value)
    if key == "peak_bytes":
        return f"{value / measure.MEGABYTE:.0f} MB"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _missing(*modules: str) -> str:
    names = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"{', '.join(names)} not installed" if names else ""


def _call(command: list[str], seconds: float, accepted: tuple[int, ...] = (0,)) -> None:
    """Runs a command with its output on the terminal, and kills it and its children once its time is up."""
    offline = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    process = subprocess.Popen(command, env=os.environ | offline, start_new_session=True)
    try:
        code = process.wait(max(seconds, 0))
    except BaseException:
        os.killpg(process.pid, 9)
        process.wait()
        raise
    if code not in accepted:
        raise RuntimeError(f"exit code {code}")
