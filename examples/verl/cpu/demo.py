"""Trains the toy task with verl's unmodified `main_ppo` on a CPU: its own clip, then TROLL, by the same settings.

It ends with a table, and a page of curves, `comparison.html`. One run of each compares nothing: it shows that both
learn, and what each does to the tokens that move too far.

    make verl-demo
    python examples/verl/cpu/demo.py --output_dir runs/verl [--methods clip troll] [--steps 24] [verl settings ...]

An interrupted demo continues from its last checkpoint if it is started again with the same folder.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from demo_page import HELD_OUT, Metrics, metric, page, results
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from troll.files import write_atomically
from troll_lab.terminal import say, silence_libraries
from troll_lab.values import read_yaml

HERE = Path(__file__).resolve().parent
METHODS = {"clip": (), "troll": ("+troll=fsdp",)}
#: How long a method takes with the settings of `toy.yaml`, on two cores: docs/verl.md has the run.
MINUTES = 3
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Run:
    """One method's run of verl, and its folder.

    Attributes:
        method: Key of `METHODS`.
        folder: Holds verl's log, metrics (one file for each time it was started) and checkpoints.
        steps: Rollouts to train on.
    """

    method: str
    folder: Path
    steps: int

    def command(self, data: Path, ray_folder: Path, settings: list[str]) -> list[str]:
        """Returns the command line, for `data` as `toy_data.py` writes it."""
        return [
            *(sys.executable, "-m", "verl.trainer.main_ppo", "--config-dir", str(HERE), "--config-name", "toy"),
            f"data.train_files={data / 'train.parquet'}",
            f"data.val_files={data / 'test.parquet'}",
            f"actor_rollout_ref.model.path={data / 'model'}",
            f"trainer.total_training_steps={self.steps}",
            f"trainer.default_local_dir={self.folder / 'checkpoints'}",
            f"hydra.run.dir={self.folder / 'hydra'}",
            f"+ray_kwargs.ray_init._temp_dir={ray_folder}",
            *METHODS[self.method],
            *settings,
        ]

    def environment(self) -> dict[str, str]:
        """Returns the environment of the run, see `verl_cpu`."""
        attempt = len(list(self.folder.glob("metrics-*.jsonl"))) + 1
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        return {
            **inherited,
            "VERL_PLATFORM": "cpu",
            "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
            "VERL_FILE_LOGGER_PATH": str(self.folder / f"metrics-{attempt:03}.jsonl"),
            "PYTHONPATH": path,
            "PYTHONWARNINGS": "ignore",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TQ_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            # They are not read here, and every process of Ray's would send them from a thread of its own.
            "RAY_enable_metrics_collection": "0",
            # With Ray's default, 15, its workers get next to nothing while anything else computes.
            "RAY_worker_niceness": "0",
        }

    def metrics(self) -> dict[int, dict[str, float]]:
        """Returns what verl logged, by step; where a resumed run repeated a step, the later one."""
        lines = [line for path in sorted(self.folder.glob("metrics-*.jsonl")) for line in path.read_text().splitlines()]
        entries = [json.loads(line) for line in lines if line.endswith("}")]
        return {entry["step"]: entry["data"] for entry in sorted(entries, key=lambda entry: entry["step"])}

    def held_out(self) -> dict[int, float]:
        """Returns the held-out success by step."""
        return metric(self.metrics(), HELD_OUT).to_dict()

    def limit(self) -> str:
        """Returns how far the method lets the policy move, from the settings that verl was started with."""
        actor = read_yaml(self.folder / "hydra" / ".hydra" / "config.yaml")["actor_rollout_ref"]["actor"]
        if self.method == "troll":
            return f"KL up to ε = {actor['policy_loss']['kl_bound']:g}"
        return f"ratio {1 - actor['clip_ratio_low']:g} to {1 + actor['clip_ratio_high']:g}"


def train(run: Run, data: Path, settings: list[str], console: Console) -> None:
    """Runs verl to the end, and shows its progress.

    Raises:
        SystemExit: If verl fails.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    log = run.folder / "log.txt"
    columns = (TextColumn(f"{run.method:5}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with (
        # Ray's sockets lie in it, and their names may have 107 characters at most.
        tempfile.TemporaryDirectory(prefix="troll-ray-", ignore_cleanup_errors=True) as ray_folder,
        log.open("a") as file,
        Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress,
    ):
        bar = progress.add_task("starting", total=run.steps)
        command = run.command(data, Path(ray_folder), settings)
        verl = subprocess.Popen(command, env=run.environment(), stdout=file, stderr=subprocess.STDOUT)
        try:
            while verl.poll() is None:
                time.sleep(_POLL_SECONDS)
                done, held_out = run.metrics(), run.held_out()
                if held_out:
                    last = max(held_out)
                    progress.update(bar, completed=max(done), description=f"success {held_out[last]:.1%} @ {last}")
        finally:
            verl.terminate()
            verl.wait()
    if verl.returncode or run.steps not in run.held_out():
        tail = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-20:])
        sys.exit(f"{tail}\nverl ended with status {verl.returncode} before its last step: all of its log is in {log}")


def start_of(folder: Path) -> float | None:
    """Returns the held-out success of the model that all methods start from; None before it was evaluated."""
    found = (Run(method, folder / method, 0).held_out().get(0) for method in METHODS)
    return next((success for success in found if success is not None), None)


def summary(metrics: Mapping[str, Metrics], limits: Mapping[str, str]) -> Table:
    """Returns the table of the page, for a terminal."""
    frame = results(metrics, limits)
    table = Table(*frame.columns, title="held-out success, one run each")
    for row in frame.itertuples(index=False):
        table.add_row(*map(str, row))
    return table


def main() -> None:
    """Prepares the data, trains each method that is not finished, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", type=int, default=24, help="rollouts, of 8 updates each")
    arguments, settings = parser.parse_known_args()
    if find_spec("verl") is None:
        sys.exit("verl is not installed here: `make verl-demo` sets up an environment of its own for it")
    # As Ctrl-C, so that verl is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    from toy_data import prepare

    silence_libraries()
    folder = arguments.output_dir.resolve()
    console = Console()
    data = folder / "data"
    runs = [Run(method, folder / method, arguments.steps) for method in arguments.methods]
    if left := [run for run in runs if run.steps not in run.held_out()]:
        first = "" if data.exists() else "a minute for the model, then "
        console.print(f"{first}{len(left)} x {MINUTES} minutes on two cores; in {folder}", soft_wrap=True)
    prepare(data)
    for run in left:
        # All methods start from one model, so it is evaluated once: two samples of its answers would differ.
        once = ["trainer.val_before_train=false"] if start_of(folder) is not None else []
        train(run, data, [*settings, *once], console)
    start = start_of(folder)
    metrics = {run.method: ({} if start is None else {0: {HELD_OUT: start}}) | run.metrics() for run in runs}
    limits = {run.method: run.limit() for run in runs}
    console.print(summary(metrics, limits))
    comparison = folder / "comparison.html"
    write_atomically(comparison, page(metrics, limits))
    say(console, f"comparison  {comparison}")


if __name__ == "__main__":
    main()
