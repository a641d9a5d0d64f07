import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.troll_lab.runs.conftest import logged
from troll_lab.runs.slots import Slot


@pytest.mark.slow
def test_forked_runs_are_those_of_fresh_processes(short_run: list[str], tmp_path: Path) -> None:
    # Two threads: torch's pool would not survive a fork, so that nothing may start it before.
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    arguments = ["quickstart", *short_run]
    fresh, first, second = (tmp_path / name for name in ("fresh", "first", "second"))
    command = [sys.executable, "-m", "troll_lab.cli", "train", *arguments, "--output_dir", str(fresh)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with (tmp_path / "lock").open("a") as lock:
        slot = Slot(environment, lock.fileno())
        try:
            for folder in (first, second):
                log = tmp_path / f"{folder.name}.log"
                slot.start([*arguments, "--output_dir", str(folder)], log)
                assert slot.exit_code() == 0, log.read_text()
        finally:
            slot.close()
            slot.wait()
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert len(logged(fresh)) > 4
    assert logged(first) == logged(second) == logged(fresh)
    weights = "model/model.safetensors"
    assert (first / weights).read_bytes() == (second / weights).read_bytes() == (fresh / weights).read_bytes()
    assert "held-out success" in (tmp_path / "second.log").read_text()


@pytest.mark.slow
def test_nothing_that_a_fork_breaks_starts_with_the_imports() -> None:
    code = """
import sys, threading, torch
asked = []
torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = lambda: asked.append("CUDA")
from troll_lab.runs import worker
worker.serve = lambda run: None
state = torch.get_rng_state()
worker.main()
assert "troll_lab.runs.train" in sys.modules
assert torch.equal(torch.get_rng_state(), state)
print(asked, threading.active_count())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] 1\n"


def test_log_ends_with_what_the_run_said(tmp_path: Path) -> None:
    code = """
from troll_lab.runs import worker
worker._IMPORTS = ("triton",)
worker._train = lambda arguments: (print("the reason"), 1)[1]
worker.main()
"""
    log = tmp_path / "log"
    job = json.dumps({"arguments": [], "log": str(log)})
    done = subprocess.run([sys.executable, "-c", code], input=job, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
    assert log.read_text() == "the reason\n"
