import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml
from rich.console import Console

from tests.pages import hide_package
from tests.troll_lab.runs.conftest import short
from tests.troll_sandbox.processes import wait_until
from troll_lab.recipes import RecipeError
from troll_lab.runs import compare as module
from troll_lab.runs import slots, worker
from troll_lab.runs.compare import compare
from troll_lab.runs.grid import PlannedRun, expand

#: A worker whose runs stand in for `troll train`: they leave the files of a run, fail, or wait for Ctrl-C.
WORKER = """
import json, os, pathlib, runpy, sys, time

def train(arguments):
    folder, settings, seed, how, checkpoint = pathlib.Path(arguments[0]), *arguments[1:]
    folder.mkdir(exist_ok=True)
    status = "finished"
    (folder / "config.yaml").write_text(settings + f"output_dir: {folder}\\n")
    (folder / "metrics.jsonl").write_text('{"step": 2, "reward": 0.5}\\n')
    with (folder / "starts").open("a") as file:
        file.write(checkpoint + os.environ["OMP_NUM_THREADS"] + "\\n")
    (folder / "gpu").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "none"))
    (folder / "worker").write_text(str(os.getppid()))
    if how == "fail":
        print("first line"), print("the reason")
        return 3
    try:
        if how in ("wait", "deaf"):
            (folder / "checkpoint-2").mkdir(exist_ok=True)
            (folder / "checkpoint-2" / "trainer_state.json").write_text("{}")
            (folder / "waiting").write_text(str(os.getpid()))
            time.sleep(60)
    except KeyboardInterrupt:
        status = "interrupted"
        if how == "deaf":
            (folder / "asked").write_text("yes")
            time.sleep(60)
    (folder / "summary.json").write_text(json.dumps(
        {"status": status, "recipe": "quickstart", "surrogate": "clip" if "clip" in folder.name else "troll",
         "success_after": float(how.partition("=")[2] or 0.5), "seed": int(seed), "eval_questions": 8}))
    return 0 if status == "finished" else 130

runpy.run_path(sys.argv[1])["serve"](train)
"""


@pytest.fixture
def how(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What a run of a name does instead of finishing: "fail", "wait" for Ctrl-C, be "deaf" to it, or "reach=0.7"."""
    behaviour: dict[str, str] = {}

    def arguments(run: PlannedRun, output: Path, checkpoint: Path | None) -> list[str]:
        settings, seed = yaml.safe_dump(run.settings), str(run.recipe.training.seed)
        return [str(output), settings, seed, behaviour.get(run.name, ""), f"{checkpoint.name} " if checkpoint else ""]

    monkeypatch.setattr(module, "_arguments", arguments)
    monkeypatch.setattr(module, "model_path", lambda recipe: "")
    # Without the package and its imports: the tests would wait for torch.
    monkeypatch.setattr(slots, "WORKER", [sys.executable, "-S", "-c", WORKER, worker.__file__])
    return behaviour


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def grid(**axes: Any) -> list[PlannedRun]:
    return expand(["quickstart"], {"seed": ["0", "1"]} | axes)


def starts(folder: Path, name: str) -> list[str]:
    return (folder / name / "starts").read_text().splitlines()


def test_every_run_is_made_and_compared(tmp_path: Path, how: dict[str, str], console: Console) -> None:
    folder = tmp_path / "a[b]c[/d]"  # no markup
    assert compare(grid(kl_bound=["0.1", "0.2"]), folder, console, jobs=3) == "finished"
    names = [f"quickstart-kl_bound={bound}-seed={seed}" for seed in (0, 1) for bound in ("0.1", "0.2")]
    threads = str(max(1, len(os.sched_getaffinity(0)) // 3))
    assert [starts(folder, name) for name in names] == [[threads]] * 4
    for name in ("comparison.html", "comparison.md"):
        assert "kl_bound=0.1" in (folder / name).read_text()
    assert f"output in {folder}" in text_of(console) and "50.0 ± 0.0 (2)" in text_of(console)
    assert text_of(console).count("started ") == text_of(console).count("finished  ") == 4


def test_the_same_grid_again_makes_what_is_missing(tmp_path: Path, how: dict[str, str], console: Console) -> None:
    how["quickstart-seed=0"] = "fail"
    assert compare(grid(), tmp_path / "all", console, jobs=1) == "failed"
    shown = text_of(console)
    assert "failed with exit code 3  quickstart-seed=0" in shown and "finished  quickstart-seed=1" in shown
    assert shown.endswith("ends with\n  first line\n  the reason\n")
    del how["quickstart-seed=0"]
    (tmp_path / "all" / "quickstart-seed=0" / "checkpoint-4").mkdir()  # killed while it was written
    assert "deleting" not in text_of(console)
    assert compare(grid(), tmp_path / "all", console, jobs=1) == "finished"
    assert "2 runs, 1 finished already" in text_of(console)
    reason = "it has no complete checkpoint; checkpoint-4: it has no trainer_state.json\n"
    assert f"deleting  the files of quickstart-seed=0: {reason}" in text_of(console)
    assert len(starts(tmp_path / "all", "quickstart-seed=1")) == 1, "it was finished"
    assert len(starts(tmp_path / "all", "quickstart-seed=0")) == 1, "without a checkpoint it starts anew"


def test_a_folder_with_anything_else_is_refused(tmp_path: Path, how: dict[str, str], console: Console) -> None:
    compare(grid(), tmp_path / "all", console, jobs=2)
    for other, difference in (
        (grid(seed=["0"]), "seed is 1 there and 0 here"),
        (grid(max_steps=["7"]), "max_steps is 2240"),
    ):
        match = rf"its run quickstart-seed=\d is not in this grid \({difference}.* another folder with --output_dir"
        with pytest.raises(RecipeError, match=match):
            compare(other, tmp_path / "all", console)
    assert set(json.loads((tmp_path / "all" / "compare.json").read_text())["runs"]) == {run.name for run in grid()}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").touch()
    with pytest.raises(RecipeError, match="is not empty and holds no comparison"):
        compare(grid(), tmp_path / "other", console)
    for text, message in (("{", "not JSON"), ('{"runs": 3}', "is not the manifest of a comparison")):
        (tmp_path / "other" / "compare.json").write_text(text)
        with pytest.raises(RecipeError, match=message):
            compare(grid(), tmp_path / "other", console)
    with pytest.raises(RecipeError, match="cannot be used: Not a directory"):
        compare(grid(), tmp_path / "other" / "precious" / "below", console)
    config = tmp_path / "all" / "quickstart-seed=0" / "config.yaml"
    config.write_text(config.read_text().replace("kl_bound: 0.05", "kl_bound: 5"))
    match = "quickstart-seed=0 holds a run with other settings: kl_bound is 5 there and 0.05 here"
    with pytest.raises(RecipeError, match=match):
        compare(grid(), tmp_path / "all", console)


def test_a_grid_with_more_runs_goes_on(tmp_path: Path, how: dict[str, str], console: Console) -> None:
    folder = tmp_path / "all"
    compare(grid(seed=["0"]), folder, console, jobs=1)
    larger = grid(seed=["0", "1"], kl_bound=["0.05", "0.1"])
    assert compare(larger, folder, console, jobs=1, command="troll compare it") == "finished"
    names = ["quickstart", *("quickstart-kl_bound=" + point for point in ("0.1-seed=0", "0.05-seed=1", "0.1-seed=1"))]
    manifest = json.loads((folder / "compare.json").read_text())
    assert (list(manifest["runs"]), manifest["command"]) == (names, "troll compare it")
    assert [len(starts(folder, name)) for name in names] == [1] * 4, "the first one stayed"
    assert "troll compare it" in (folder / "comparison.html").read_text()


def test_two_comparisons_do_not_work_in_one_folder(tmp_path: Path, how: dict[str, str], console: Console) -> None:
    message = "another troll compare, or a run that it left behind"
    with module._locked(tmp_path), pytest.raises(RecipeError, match=message):
        compare(grid(), tmp_path, console)
    assert not (tmp_path / "compare.json").exists()


def test_a_run_that_was_left_behind_keeps_the_lock(tmp_path: Path, how: dict[str, str]) -> None:
    (run,) = expand(["quickstart"], {})
    (tmp_path / "compare.json").write_text("{}")
    how[run.name] = "wait"
    with module._locked(tmp_path) as lock:
        slot = slots.Slot(os.environ | {"OMP_NUM_THREADS": "1"}, lock)
        slot.start(module._arguments(run, tmp_path / run.name, None), tmp_path / "log")
    wait_for(tmp_path / run.name / "waiting")
    pid = int((tmp_path / run.name / "waiting").read_text())
    os.kill(int((tmp_path / run.name / "worker").read_text()), signal.SIGKILL)
    try:
        with pytest.raises(RecipeError, match="at work"), module._locked(tmp_path):
            pass
        assert slot.exit_code() == -signal.SIGKILL
        wait_until(lambda: has_ended(pid))
    finally:
        slot.kill()
    with module._locked(tmp_path):
        pass


def test_runs_share_a_worker_and_one_death_stops_no_other(tmp_path, how, console):
    how["quickstart-seed=1"] = how["quickstart-seed=2"] = "wait"
    folder = tmp_path / "all"

    def kill() -> None:
        for seed, victim in ((1, "waiting"), (2, "worker")):
            wait_for(folder / f"quickstart-seed={seed}" / "waiting")
            os.kill(int((folder / f"quickstart-seed={seed}" / victim).read_text()), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    assert compare(grid(seed=["0", "1", "2", "3"]), folder, console, jobs=1) == "failed"
    thread.join()
    for seed, end in enumerate(["finished", "failed with exit code -9", "failed with exit code -9", "finished"]):
        assert f"{end}  quickstart-seed={seed}" in text_of(console)
    workers = [(folder / f"quickstart-seed={seed}" / "worker").read_text() for seed in range(4)]
    assert workers[0] == workers[1] == workers[2] != workers[3]
    wait_until(lambda: has_ended(int((folder / "quickstart-seed=2" / "waiting").read_text())))


def test_each_run_has_a_gpu_of_its_own(tmp_path, how, console, monkeypatch):
    points = grid(seed=["0", "1", "2"])  # before there seem to be GPUs, which transformers would use
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7,9")
    how["quickstart-seed=0"] = how["quickstart-seed=1"] = "wait"
    thread = interrupt_when([tmp_path / "all" / f"quickstart-seed={seed}" / "waiting" for seed in (0, 1)])
    assert compare(points, tmp_path / "all", console) == "interrupted"
    thread.join()
    assert "3 runs, 0 finished already, 2 at once" in text_of(console), "as many as GPUs"
    gpus = [(tmp_path / "all" / f"quickstart-seed={seed}" / "gpu").read_text() for seed in (0, 1)]
    assert gpus == ["5", "GPU-7"]


def test_gpus_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert slots.gpus() == ["0", "1", "2"]
    seen = [environment["CUDA_VISIBLE_DEVICES"] for environment in slots.environments(4, 8, slots.gpus())]
    assert seen == ["0", "1", "2", "0"]
    assert [environment["OMP_NUM_THREADS"] for environment in slots.environments(3, 8, [])] == ["2"] * 3
    assert "CUDA_VISIBLE_DEVICES" not in slots.environments(1, 8, [])[0]
    for limit, threads in [("1", "1"), ("4", "2"), ("", "2")]:
        monkeypatch.setenv("OMP_NUM_THREADS", limit)
        assert slots.environments(3, 8, [])[0]["OMP_NUM_THREADS"] == threads


def test_ctrl_c_while_a_process_starts_does_not_lose_it(tmp_path, how, console, monkeypatch):
    real, started = subprocess.Popen, []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        started.append(real(*arguments, **options))
        os.kill(os.getpid(), signal.SIGINT)
        return started[-1]

    how["quickstart-seed=0"] = "wait"
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    assert compare(grid(), tmp_path / "all", console, jobs=1) == "interrupted"
    assert len(started) == 1
    left = started[0].poll() is None
    started[0].kill()
    assert not left


def test_without_matplotlib_only_the_page_is_missing(tmp_path, how, console, monkeypatch):
    hide_package(monkeypatch, "matplotlib")
    assert compare(grid(), tmp_path / "all", console, jobs=2) == "finished"
    assert "50.0 ± 0.0 (2)" in text_of(console)
    assert 'no comparison page: the report needs matplotlib: pip install "troll-rl[report]"' in text_of(console)


def wait_for(path: Path) -> None:
    wait_until(lambda: path.exists() and path.read_text(), 60)


def has_ended(pid: int) -> bool:
    try:
        # A zombie is killed; whoever adopted it has not looked yet.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def interrupt_when(*moments: list[Path]) -> threading.Thread:
    """Ctrl-C at each of some moments: when there are all of its files."""

    def wait() -> None:
        for files in moments:
            for path in files:
                wait_for(path)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("before", "stops"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)], ids=["default", "nohup"]
)
def test_a_closed_terminal_ends_the_runs_except_under_nohup(tmp_path, how, console, monkeypatch, before, stops):
    real, during = subprocess.Popen, []

    def started(*arguments: Any, **options: Any) -> Any:
        during.append((signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGINT)))
        return real(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", started)
    earlier = signal.signal(signal.SIGHUP, before)
    try:
        assert compare(grid(), tmp_path / "all", console, jobs=1) == "finished"
        assert signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, earlier)
    assert during and all((closed is ctrl_c) == stops for closed, ctrl_c in during)


def test_ctrl_c_ends_the_runs_in_order_and_they_resume(tmp_path: Path, how: dict[str, str], console: Console) -> None:
    how["quickstart-seed=0"] = "wait"
    folder = tmp_path / "all"
    handler = signal.getsignal(signal.SIGINT)
    thread = interrupt_when([folder / "quickstart-seed=0" / "waiting"])
    assert compare(grid(), folder, console, jobs=1) == "interrupted"
    thread.join()
    assert signal.getsignal(signal.SIGINT) == handler
    assert json.loads((folder / "quickstart-seed=0" / "summary.json").read_text())["status"] == "interrupted"
    assert not (folder / "quickstart-seed=1").exists()
    assert "interrupted; the same command resumes" in text_of(console)

    del how["quickstart-seed=0"]
    (folder / "quickstart-seed=0" / "checkpoint-4").mkdir()  # killed while it was written
    assert compare(grid(), folder, console, jobs=1) == "finished"
    assert [line.split()[0] for line in starts(folder, "quickstart-seed=0")][1:] == ["checkpoint-2"]


def test_the_second_ctrl_c_kills(tmp_path: Path, how: dict[str, str], console: Console) -> None:
    how["quickstart-seed=0"] = "deaf"
    run = tmp_path / "all" / "quickstart-seed=0"
    thread = interrupt_when([run / "waiting"], [run / "asked"])
    assert compare(grid(), tmp_path / "all", console, jobs=1) == "interrupted"
    thread.join()
    wait_until(lambda: has_ended(int((run / "waiting").read_text())))
    assert not (run / "summary.json").exists()
    assert "stopping 1 runs; Ctrl-C again kills them" in text_of(console)


def test_a_model_that_cannot_be_made_is_told_before_any_run(tmp_path, how, console, monkeypatch):
    monkeypatch.setattr(module, "model_path", Mock(side_effect=RecipeError("no model")))
    with pytest.raises(RecipeError, match="no model"):
        compare(grid(), tmp_path / "all", console)
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["compare.json", "compare.lock"]


def test_on_a_terminal_bars_show_the_steps(tmp_path: Path, how: dict[str, str]) -> None:
    terminal = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    points = grid(seed=["0"], task_options=["{}", '{"prompt": "[/x]"}'])
    assert compare(points, tmp_path / "all", terminal, jobs=2) == "finished"
    assert points[1].name in text_of(terminal) and "[/x]" in text_of(terminal)
    assert "started" not in text_of(terminal)


@pytest.mark.slow
def test_real_runs_stop_on_ctrl_c_and_go_on(tiny_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "troll_lab.cli", "compare", "quickstart", "--surrogate", "troll", "clip"]
    command += ["--seeds", "2", *short(tiny_model, tmp_path / "all", max_steps=40)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    first = tmp_path / "all" / "quickstart-troll-seed=0"
    wait_until(lambda: list(first.glob("checkpoint-*/trainer_state.json")), 300)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 130, output
    assert "interrupted; the same command resumes" in output
    assert json.loads((first / "summary.json").read_text())["status"] == "interrupted"

    again = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert again.returncode == 0, again.stdout + again.stderr
    comparison = json.loads((tmp_path / "all" / "comparison.json").read_text())
    assert [group["surrogate"] for group in comparison["groups"]] == ["troll", "clip"]
    assert [len(group["success_by_seed"]) for group in comparison["groups"]] == [2, 2]
    steps = [json.loads(line)["step"] for line in (first / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert steps[-1] == 40
