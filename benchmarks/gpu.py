"""Everything that needs a GPU, in at most 12 minutes: training first, and then the kernels.

    make smollm2                  # the model of the training parts, from the package index
    make bench-gpu
    make bench-gpu OPTIONS="--device cpu --small"    # a trial without a GPU: tiny models, all parts

The training parts ask whether a KL target carries over. The tuned rate of `smollm2-sums` is 2e-4 with LoRA and 1e-5
with all weights; here both begin with the same `learning_rate`, and follow a third of `TARGET`, `TARGET`, and three
times `TARGET`. It carries over if at `TARGET` no method's mean success over three seeds is more than 5 points below
that of the tuned rate (LoRA's is in docs/results/smollm2.csv, and may be run again). It does not if LoRA and all
weights have other best targets, and each loses more than 5 points at the other's. Then come completions of a thousand
tokens: does the model learn, what does a step cost, does anything break.

The script uses the packages that are installed, names the parts that it skips or that do not fit in time, and needs no
network: copy models/SmolLM2-135M-Instruct to a machine that has none. Every result is a line of `GPU.jsonl` as soon as
it is there, where GPU is the card's name. Tables of them are in `GPU.md`, and printed at the end. The same command goes
on where the last one stopped, and makes no finished part again. The folders of the runs are under `GPU/`, for
`python -m experiments collect`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import torch
from rich.console import Console

from benchmarks import measure
from troll.files import write_atomically

#: Fields of a recipe, and the values of each.
Fields = dict[str, tuple[str, ...]]
Rows = Iterator[dict[str, Any]]

#: The packages that `troll compare` imports.
TRAINING_NEEDS = ("trl", "transformers", "accelerate", "datasets", "peft", "reasoning_gym", "yamlcore", "rich")
#: The model of the training parts; for a trial a random one, in the shape of Qwen3.
MODEL = Path("models/SmolLM2-135M-Instruct")
SMALL_MODEL: dict[str, Any] = {"vocab_size": 512, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}

#: The KL target that the documentation recommends, and the learning rate at a hundredth of which its search begins.
TARGET, START = 0.1, "1e-5"
TARGETS = tuple(f"{factor * TARGET:.2g}" for factor in (1 / 3, 1, 3))
METHODS: Fields = {"--surrogate": ("troll", "kl_penalty", "clip"), "--seed": ("0", "1", "2")}
LORA = METHODS | {"--kl_target": TARGETS, "--learning_rate": (START,)}
LORA_TUNED = METHODS | {"--learning_rate": ("2e-4",)}
#: Without a target the rate is the tuned one.
ALL_WEIGHTS = METHODS | {"--use_peft": ("false",), "--kl_target": ("null", *TARGETS), "--learning_rate": (START,)}
#: One GPU shares these runs; each takes about 3 GB.
JOBS = 9
TRIAL: Fields = {
    "--max_steps": ("4",),
    "--updates_per_rollout": ("2",),
    "--per_device_train_batch_size": ("8",),
    "--max_completion_length": ("4",),
    "--eval_size": ("8",),
    "--eval_steps": ("4",),
    "--logging_steps": ("1",),
    "--seed": ("0",),
}
#: Rollouts of 128 completions that count on for a thousand tokens. There is time for few, so the search for the rate
#: begins at the one that is good for `smollm2-sums`.
LONG: Fields = {
    "--use_peft": ("false",),
    "--bf16": ("false",),  # whose rounding would be more than the target
    "--task": ("examples/tasks/counting.py",),
    "--task_options": ("{}",),
    "--surrogate": ("troll",),
    "--kl_target": (f"{TARGET}",),
    "--learning_rate": ("1e-3",),
    "--max_completion_length": ("1152",),
    "--max_steps": ("80",),
    "--eval_strategy": ("no",),
    "--eval_on_start": ("false",),
    "--logging_steps": ("1",),
}
#: vLLM on the GPU of the training.
ENGINE: Fields = {
    "--use_vllm": ("true",),
    "--vllm_mode": ("colocate",),
    "--vllm_gpu_memory_utilization": ("0.3",),
    "--vllm_max_model_length": ("2048",),
}


class Part(NamedTuple):
    """One part of the run.

    Attributes:
        name: The name of the part.
        seconds: The seconds that it may take.
        run: Takes the device, the repeats, the part's folder and the seconds that are left, and yields the rows of its
            table, each as soon as it is there.
    """

    name: str
    seconds: float
    run: Callable[[str, int, Path, float], Rows]


def training(
    grid: Fields, rows_of: Callable[[Any], Rows] | None = None, plain: bool = False
) -> Callable[[str, int, Path, float], Rows]:
    """Makes a part of `troll compare smollm2-sums`.

    Args:
        grid: The fields of the grid and their values.
        rows_of: Takes a run, and yields its rows; by default one for each run, with its outcome.
        plain: Whether the model goes on with a text, instead of answering in a conversation.
    """

    def run(device: str, repeats: int, folder: Path, seconds: float) -> Rows:
        if missing := _missing(*TRAINING_NEEDS):
            raise measure.Skipped(missing)
        try:
            metadata.version("troll-rl")  # which a run notes
        except metadata.PackageNotFoundError:
            raise measure.Skipped("troll-rl is not installed: pip install --no-deps -e .") from None
        if not measure.small and not MODEL.is_dir():
            raise measure.Skipped(f"{MODEL} is missing: make smollm2")
        model = _random_model(folder / "model") if measure.small else MODEL
        model = _without_template(model, folder / "plain") if plain else model
        settings = settings_of(grid, device, model) | {"--output_dir": (str(folder / "runs"),)}
        yield from _compare(settings | {"--jobs": (str(_jobs(device)),)}, folder / "runs", seconds, rows_of or _outcome)

    return run


def settings_of(grid: Fields, device: str, model: Path) -> Fields:
    """The fields of a part's command, but for its folder and the runs at once."""
    settings: Fields = {
        "--model_name_or_path": (str(model),),
        "--bf16": (str(device == "cuda").lower(),),
        "--use_cpu": (str(device == "cpu").lower(),),
        "--per_device_eval_batch_size": ("256",),
        "--save_strategy": ("no",),
    }
    return settings | grid | (TRIAL if measure.small else {})


def _compare(settings: Fields, folder: Path, seconds: float, rows_of: Callable[[Any], Rows]) -> Rows:
    """Makes a grid, and yields the rows of each run that has finished, and of those that the clock has stopped."""
    from troll_lab.runs.recorded import is_comparison, read_runs, read_summary

    program = "import sys; from troll_lab.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [word for name, values in settings.items() for word in (name, *values)]
    command = [sys.executable, "-c", program, "compare", "smollm2-sums", *words]
    given: set[str] = set()
    used = 0.0
    why: Exception | None = None
    try:
        for _ in _running(command, seconds):
            used = max(used, _used_gib())
            for summary in folder.glob("*/summary.json"):
                name = summary.parent.name
                if name not in given and read_summary(summary.parent).get("status") == "finished":
                    given.add(name)
                    runs = [run for run in read_runs([folder]) if run.name == name]
                    yield from (row | {"gpu_gib": used} for run in runs for row in rows_of(run))
    except (subprocess.TimeoutExpired, RuntimeError) as error:
        why = error
    if is_comparison(folder):
        with suppress(FileNotFoundError):  # no run has started
            rest = [run for run in read_runs([folder]) if run.name not in given]
            yield from (row | {"gpu_gib": used} for run in rest for row in rows_of(run))
    if why is not None:
        raise why


def _outcome(run: Any) -> Rows:
    """The outcome of a run: held-out success, and the KL and the rates of its second half."""
    from troll_lab.runs.recorded import HELD_OUT, SUCCESS, TRUST, metric

    def late(name: str) -> float | None:
        values = metric(run.rows, name).tolist()
        return statistics.fmean(values[len(values) // 2 :]) if values else None

    held_out = metric(run.rows, HELD_OUT).tolist()
    yield {
        "surrogate": run.surrogate,
        "weights": "LoRA" if run.settings.get("use_peft") else "all",
        "kl_target": run.settings.get("kl_target"),
        "start": run.settings.get("learning_rate"),
        "seed": run.seed,
        "status": run.status,
        "step": max((int(row.get("step", 0)) for row in run.rows), default=0),
        "success_before": held_out[0] if held_out else None,
        "success": run.final("success"),
        "training_success": late(SUCCESS),
        "kl": late(f"{TRUST}kl_target/measured"),
        "wanted": late(f"{TRUST}kl_target/wanted"),
        "rate": late(f"{TRUST}kl_target/rate"),
        "entropy": late("entropy"),
        "run_seconds": run.summary.get("seconds"),
    }


def _rollouts(run: Any) -> Rows:
    """Each rollout of a run that logs every update: what was learned, and how long generating and an update took."""
    from troll_lab.runs.recorded import TRUST

    updates = [row for row in run.rows if "step_time" in row]
    size = int(run.settings["updates_per_rollout"])
    for rollout in range(0, len(updates), size):
        rows = updates[rollout : rollout + size]
        first, rest = rows[0], [row["step_time"] for row in rows[1:]]
        update = statistics.median(rest) if rest else None
        yield {
            "rollout": rollout // size,
            "reward": first.get("reward"),
            "tokens": first.get("completions/mean_length"),
            "cut": first.get("completions/clipped_ratio"),
            "generation_seconds": first["step_time"] - (update or 0.0),
            "update_seconds": update,
            "kl": rows[-1].get(f"{TRUST}kl_target/measured"),
            "wanted": rows[-1].get(f"{TRUST}kl_target/wanted"),
            "rate": rows[-1].get(f"{TRUST}kl_target/rate"),
            "projected": rows[-1].get(f"{TRUST}projected_fraction"),
            "entropy": first.get("entropy"),
        }


def long_completions(device: str, repeats: int, folder: Path, seconds: float) -> Rows:
    """Trains on completions of a thousand tokens, with vLLM where it is installed, else with transformers."""
    engine = ENGINE if device == "cuda" and not _missing("vllm") else {}
    yield from training(LONG | engine, _rollouts, plain=True)(device, repeats, folder, seconds)


def benchmark(name: str) -> Callable[[str, int, Path, float], Rows]:
    """Makes a part of another benchmark, which runs in a separate process."""

    def run(device: str, repeats: int, folder: Path, seconds: float) -> Rows:
        options = ["--device", device, "--repeats", str(repeats), "--output", str(folder)]
        options += ["--small"] if measure.small else []
        result = folder / f"{name}-{device}.json"
        result.unlink(missing_ok=True)  # of an earlier attempt
        _call([sys.executable, "-m", "benchmarks", name, *options], seconds)
        if not result.exists():
            raise measure.Skipped("its own output says why")
        yield from json.loads(result.read_text())["rows"]

    return run


def kernel_tests(device: str, repeats: int, folder: Path, seconds: float) -> Rows:
    """Tests the Triton kernels against the torch code and float64, on this GPU, or interpreted without one."""
    if missing := _missing("pytest", "triton", "hypothesis", "scipy"):
        raise measure.Skipped(missing)
    files = sorted(map(str, Path("tests/troll/trust_region").rglob("test_*_triton*.py")))
    files = files[:1] if measure.small else [*files, "tests/troll/trust_region/test_matrix.py", "-k", "triton"]
    report = folder / "tests.xml"
    # Compiling takes most of the time, and that is the CPU's work.
    workers = [] if _missing("xdist") else ["-n", str(min(os.cpu_count() or 1, 12)), "--dist", "worksteal"]
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *workers, *files]
    _call(command, seconds, accepted=(0, 1))
    suite = next(ElementTree.parse(report).iter("testsuite"))
    row = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    yield row
    if row["failures"] + row["errors"]:
        raise RuntimeError(f"{row['failures']} of {row['tests']} tests failed, {row['errors']} broke down")


#: The parts in their order; each may use the time that is left, up to its own. One that did not fit has a second turn.
PARTS = (
    Part("LoRA", 480, training(LORA)),
    Part("all weights", 180, training(ALL_WEIGHTS)),
    Part("long completions", 150, long_completions),
    Part("tests", 90, kernel_tests),
    Part("capture", 60, benchmark("capture")),
    Part("head", 120, benchmark("head")),
    Part("all weights", 480, training(ALL_WEIGHTS)),
    Part("LoRA, tuned", 150, training(LORA_TUNED)),
    Part("step", 180, benchmark("step")),
    Part("scaling", 180, benchmark("scaling")),
    Part("projection", 60, benchmark("projection")),
)

#: The seconds that a part has to stop, in which its runs end after their rollout, from where they can go on; and then
#: those to stop at once.
STOPPING, INSISTING = 15.0, 5.0


def main(device: str, repeats: int, output: Path, minutes: float) -> bool:
    """Makes the parts that are not done yet, writes every row at once, and returns whether no part failed."""
    end = time.monotonic() + 60 * minutes
    environment = measure.environment(device)
    name = "-".join("".join(x if x.isalnum() else " " for x in environment["device"]).lower().split())
    name += "-small" if measure.small else ""
    log, page_file = output / f"{name}.jsonl", output / f"{name}.md"
    lines = _read(log)
    done = _done(lines, environment)
    # Runs that are there go on, so those of other versions have a folder of their own.
    made_by = hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:8]
    with log.open("a", encoding="utf-8") as file:

        def write(line: dict[str, Any]) -> None:
            lines.append(line)
            file.write(json.dumps(line) + "\n")
            file.flush()
            write_atomically(page_file, page(lines))

        write({"environment": environment})
        for part in PARTS:
            if part.name in done:
                continue
            began = time.monotonic()
            limit = end - began if measure.small else min(part.seconds, end - began) - STOPPING
            write({"part": part.name, "outcome": "began"})
            folder = output / name / made_by / part.name.replace(",", "").replace(" ", "-")
            try:
                if limit <= 0:
                    raise subprocess.TimeoutExpired(part.name, limit)
                folder.mkdir(parents=True, exist_ok=True)
                for row in part.run(device, repeats, folder, limit):
                    write({"part": part.name, "row": row})
                outcome = "done"
                done.add(part.name)
            except measure.Skipped as reason:
                outcome = f"skipped: {reason}"
            except subprocess.TimeoutExpired:
                outcome = f"did not fit in {max(limit, 0):.0f} s"
            except Exception as error:  # the others go on
                outcome = f"failed: {type(error).__name__}: {error}"
            seconds = round(time.monotonic() - began, 1)
            write({"part": part.name, "outcome": outcome, "seconds": seconds})
            Console().print(f"[bold]{part.name}[/bold]: {outcome}, {seconds:.0f} s", highlight=False)
    Console().print(page_file.read_text(encoding="utf-8"), markup=False, highlight=False, soft_wrap=True)
    Console().print(log, page_file)
    return not any(part["outcome"].startswith("failed") for part in _latest(lines).values())


def _read(log: Path) -> list[dict[str, Any]]:
    """The lines of earlier calls; a line that a call was killed in is left out, and ended."""
    if not log.exists():
        return []
    text = log.read_text(encoding="utf-8")
    if text and not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        write_atomically(log, text)
    return [json.loads(line) for line in text.splitlines()]


def _done(lines: Sequence[dict[str, Any]], environment: dict[str, Any]) -> set[str]:
    """The parts that are done in this environment: figures of other versions are made again."""
    found, same = set(), False
    for line in lines:
        if "environment" in line:
            same = line["environment"] == environment
        elif same and line.get("outcome") == "done":
            found.add(line["part"])
    return found


def _latest(lines: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each part the last attempt: its outcome, seconds and rows."""
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        if line.get("outcome") == "began":
            found.pop(line["part"], None)
            found[line["part"]] = {"outcome": "began", "seconds": 0.0, "rows": []}
        elif "row" in line:
            found[line["part"]]["rows"].append(line["row"])
        elif "part" in line:
            found[line["part"]] |= {"outcome": line["outcome"], "seconds": line["seconds"]}
    return found


def page(lines: Sequence[dict[str, Any]]) -> str:
    """The means of the training parts, and then all rows, as Markdown tables."""
    environments = [line["environment"] for line in lines if "environment" in line]
    text = [f"# {environments[-1]['device']}", ""]
    text += [", ".join(f"{key} {value}" for key, value in environments[-1].items()), ""]
    parts = _latest(lines)
    runs = [row for part in parts.values() for row in part["rows"] if "success_before" in row]
    if runs:
        text += ["## Held-out success: mean of the seeds, and the rate found", "", *_table(_means(runs))]
    for name, part in parts.items():
        text += [f"## {name}: {part['outcome']}, {part['seconds']:.0f} s", ""]
        rows = [{key: value for key, value in row.items() if key != "names"} for row in part["rows"]]
        for _, same in groupby(rows, key=tuple):
            text += _table(list(same))
    return "\n".join(text)


def _means(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each method, target and start: the mean of the finished seeds, and the median of their rates."""
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs:
        if run["success"] is not None:
            cells.setdefault((run["weights"], run["surrogate"], run["kl_target"], run["start"]), []).append(run)
    found = []
    for (weights, surrogate, target, start), same in sorted(cells.items(), key=lambda cell: str(cell[0])):
        rates = [run["rate"] for run in same if run["rate"] is not None]
        row = {"weights": weights, "surrogate": surrogate, "kl_target": target, "start": start, "runs": len(same)}
        row |= {"success": statistics.fmean(run["success"] for run in same)}
        found.append(row | {"rate": statistics.median(rates) if rates else None})
    return found


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    lines = [f"| {' | '.join(rows[0])} |", "|" + "---|" * len(rows[0])]
    return [*lines, *(f"| {' | '.join(_cell(key, value) for key, value in row.items())} |" for row in rows), ""]


def _cell(key: str, value: Any) -> str:
    if value is None:
        return ""
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


def _random_model(folder: Path) -> Path:
    """The model of a trial."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from troll_lab.runs.toy_model import character_tokenizer

    tokenizer = character_tokenizer()
    config = Qwen3Config(
        **SMALL_MODEL,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _without_template(model: Path, folder: Path) -> Path:
    """The same model without its chat template: it writes long texts, where an answer soon ends."""
    from transformers import AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        if not (folder / path.name).exists() and path.suffix in (".json", ".safetensors"):
            (folder / path.name).symlink_to(path.resolve())
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = None
    for path in folder.glob("tokenizer*"):
        path.unlink()
    tokenizer.save_pretrained(folder)
    return folder


def _jobs(device: str) -> int:
    """The runs at once: as many as share the GPU's memory and the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if device == "cpu":
        return min(JOBS, cores)
    return max(1, min(JOBS, cores, torch.cuda.get_device_properties(0).total_memory // (8 << 30)))


def _used_gib() -> float:
    """The GPU's memory that all processes use now; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / (1 << 30)


def _missing(*modules: str) -> str:
    names = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"{', '.join(names)} not installed" if names else ""


def _call(command: list[str], seconds: float, accepted: tuple[int, ...] = (0,)) -> None:
    """Runs a command to its end; see `_running`."""
    for _ in _running(command, seconds, accepted):
        pass


def _running(command: list[str], seconds: float, accepted: tuple[int, ...] = (0,)) -> Iterator[None]:
    """Runs a command with its output on the terminal, and returns to the caller every second.

    Raises:
        subprocess.TimeoutExpired: If its time is up: it was stopped, with its children.
        RuntimeError: If its exit code is not one of those accepted.
    """
    offline = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    end = time.monotonic() + seconds
    process = subprocess.Popen(command, env=os.environ | offline, start_new_session=True)
    try:
        while process.poll() is None:
            if time.monotonic() >= end:
                raise subprocess.TimeoutExpired(command, seconds)
            yield
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, min(1.0, end - time.monotonic())))
    finally:
        _stop(process)
    if process.returncode not in accepted:
        raise RuntimeError(f"exit code {process.returncode}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that still runs: a comparison first stops its runs, at once if it is asked twice."""
    for number, patience in ((signal.SIGINT, STOPPING), (signal.SIGINT, INSISTING), (signal.SIGKILL, 60)):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience)
