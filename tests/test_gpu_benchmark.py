"""The script for a GPU: its grids are valid, its rows are there at once, and it goes on where it stopped."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, measure
from troll_lab import recipes
from troll_lab.runs.grid import expand
from troll_lab.runs.recorded import read_runs


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize(
    ("grid", "runs", "in_a_trial"),
    [(gpu.LORA, 27, 9), (gpu.ALL_WEIGHTS, 36, 12), (gpu.LORA_TUNED, 9, 3), (gpu.LONG, 1, 1)],
)
def test_grids_are_valid(
    grid: gpu.Fields, runs: int, in_a_trial: int, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "small", small)
    fields = gpu.settings_of(grid, "cpu", gpu.MODEL)
    planned = expand(["smollm2-sums"], {name.removeprefix("--"): values for name, values in fields.items()})
    assert len(planned) == (in_a_trial if small else runs)
    for run in planned:
        training = run.recipe.training
        assert training.kl_target is None or training.rollout_steps > 1
        assert training.max_steps % training.rollout_steps == 0


def test_engine_is_a_valid_setting_of_long_completions() -> None:
    fields = gpu.settings_of(gpu.LONG | gpu.ENGINE, "cpu", gpu.MODEL)
    words = [f"{name}={value}" for name, (value,) in fields.items()]
    training = recipes.load("smollm2-sums", words, vllm=True).training
    length, longest = training.max_completion_length or 0, training.vllm_max_model_length or 0
    assert training.use_vllm and length >= 1000
    assert longest > length + 4 * 40 + 40  # a prompt of 40 numbers


def write_run(folder: Path, finished: bool) -> None:
    """A run as `troll compare` leaves it, with a line for each update."""
    folder.mkdir(parents=True)
    config = {"surrogate": "troll", "seed": 0, "kl_target": 0.03, "learning_rate": 1e-5}
    (folder / "config.yaml").write_text(json.dumps(config | {"use_peft": True, "updates_per_rollout": 2}))
    lines = [{"step": 0, "eval_rewards/success/mean": 0.25}] if finished else []
    for step in range(1, 5):
        line = {"step": step, "step_time": 5.0 if step % 2 else 1.0, "reward": step / 10, "entropy": 0.5}
        line |= {"rewards/success/mean": 0.5, "completions/mean_length": 1000.0}
        line |= {"trust_region/kl_target/measured": step / 100, "trust_region/kl_target/wanted": 0.03}
        lines.append(line | {"trust_region/kl_target/rate": 1e-5 * step})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        summary = {"status": "finished", "surrogate": "troll", "success_after": 0.75, "seconds": 60.0}
        (folder / "summary.json").write_text(json.dumps(summary))


def test_rows_of_runs_are_there_as_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the clock stops come last."""

    def running(command: list[str], seconds: float) -> Iterator[None]:
        (tmp_path / "compare.json").write_text(json.dumps({"runs": {"first": {}, "second": {}}, "recipes": {}}))
        write_run(tmp_path / "first", finished=True)
        write_run(tmp_path / "second", finished=False)
        yield
        raise subprocess.TimeoutExpired(command, seconds)

    monkeypatch.setattr(gpu, "_running", running)
    rows = gpu._compare({}, tmp_path, 1, gpu._outcome)
    first = next(rows)
    assert (first["weights"], first["kl_target"], first["status"], first["step"]) == ("LoRA", 0.03, "finished", 4)
    assert (first["success_before"], first["success"]) == (0.25, 0.75)
    assert (first["kl"], first["rate"]) == pytest.approx((0.035, 3.5e-5))  # of the second half
    second = next(rows)
    assert (second["status"], second["success"]) == ("unfinished", None) and second.keys() == first.keys()
    with pytest.raises(subprocess.TimeoutExpired):
        next(rows)
    assert [row["runs"] for row in gpu._means([first, second])] == [1]
    # Of long completions, a step is told apart from their generation.
    rollouts = [*gpu._rollouts(read_runs([tmp_path])[0])]
    assert [(row["generation_seconds"], row["update_seconds"], row["kl"]) for row in rollouts] == [
        (4, 1, 0.02),
        (4, 1, 0.04),
    ]


def parts(monkeypatch: pytest.MonkeyPatch, *given: gpu.Part) -> None:
    monkeypatch.setattr(gpu, "PARTS", given)
    monkeypatch.setattr(measure, "small", True)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    (log,) = folder.glob("*.jsonl")
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_main_reports_parts_that_fail_or_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(*_: object) -> gpu.Rows:
        yield {"row": 1}
        gpu._call(["sleep", "60"], 0.1)

    def missing(*_: object) -> gpu.Rows:
        raise measure.Skipped("trl not installed")

    def broken(*_: object) -> gpu.Rows:
        gpu._call([sys.executable, "-c", "raise SystemExit(3)"], 60)
        yield {}

    parts(
        monkeypatch,
        gpu.Part("projection", 100, gpu.benchmark("projection")),
        gpu.Part("long", 1, sleep),
        gpu.Part("missing", 1, missing),
        gpu.Part("broken", 1, broken),
    )
    assert not gpu.main("cpu", 1, tmp_path, 20)
    ends = [line["outcome"] for line in lines_of(tmp_path) if line.get("outcome") not in (None, "began")]
    assert ends[0] == "done" and ends[1].startswith("did not fit")
    assert ends[2:] == ["skipped: trl not installed", "failed: RuntimeError: exit code 3"]
    (page,) = tmp_path.glob("*.md")
    assert "| 64 | 9 | newton |" in page.read_text() and "## missing: skipped: trl not installed" in page.read_text()


def test_main_goes_on_where_the_last_one_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def part(name: str) -> gpu.Part:
        def run(*_: object) -> gpu.Rows:
            made.append(name)
            yield {"number": len(made)}
            if made == ["first", "second"]:
                raise KeyboardInterrupt

        return gpu.Part(name, 60, run)

    parts(monkeypatch, part("first"), part("second"), part("first"))  # which has a second turn if it was not done
    with pytest.raises(KeyboardInterrupt):
        gpu.main("cpu", 1, tmp_path, 20)
    (log,) = tmp_path.glob("*.jsonl")
    with log.open("a") as file:
        file.write('{"part": "second", "ro')  # killed while it wrote
    assert gpu.main("cpu", 1, tmp_path, 20) and made == ["first", "second", "second"]
    rows = {name: part["rows"] for name, part in gpu._latest(lines_of(tmp_path)).items()}
    assert rows == {"first": [{"number": 1}], "second": [{"number": 3}]}  # of the last attempt
    assert gpu.main("cpu", 1, tmp_path, 20) and len(made) == 3
    monkeypatch.setattr(measure, "environment", lambda _: {**lines_of(tmp_path)[0]["environment"], "torch": "3.0"})
    assert gpu.main("cpu", 1, tmp_path, 20) and len(made) == 5  # with other versions, again


def test_parts_of_tiny_shapes_do_not_count_as_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []

    def run(*_: object) -> gpu.Rows:
        made.append(measure.small)
        yield {"row": 1}

    parts(monkeypatch, gpu.Part("first", 60, run))
    for small in (True, False):
        monkeypatch.setattr(measure, "small", small)
        assert gpu.main("cpu", 1, tmp_path, 20)
    assert made == [True, False]


def test_benchmark_that_leaves_no_rows_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step-cpu.json").write_text('{"rows": [{"of": "an earlier attempt"}]}')
    monkeypatch.setattr(gpu, "_call", lambda *_: None)
    with pytest.raises(measure.Skipped, match="its own output says why"):
        list(gpu.benchmark("step")("cpu", 1, tmp_path, 60))


@pytest.mark.slow
def test_every_part_runs_small_on_a_cpu(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--small", "--repeats", "1", "--minutes", "60", "--output", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "benchmarks", "gpu", *options], check=True)
    found = gpu._latest(lines_of(tmp_path))
    assert found.keys() == {part.name for part in gpu.PARTS}
    assert {name: part["outcome"] for name, part in found.items() if not part["outcome"].startswith("skipped")} == (
        dict.fromkeys((name for name, part in found.items() if not part["outcome"].startswith("skipped")), "done")
    )
    assert len(found["LoRA"]["rows"]) == 9 and len(found["long completions"]["rows"]) == 2
