"""Where the host's part of an update goes: the operators and kernels that are launched, by the file that asks for them.

With few tokens or a narrow model a GPU waits for the host, which takes some microseconds for each launch, however small
it is. One rollout with four updates of `TrollTrainer` and of `GRPOTrainer` is counted, as in `step`, with Triton's
kernels and TRL's in the interpreter. Launches within the model are the same on both sides, and left out; so are views.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest import mock

from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from benchmarks import measure
from benchmarks.counting import FREE

#: As in `step`, but small, since kernels are interpreted: the launches outside the model are the same for all sizes, as
#: long as one tile holds the logits.
CASE: dict[str, Any] = {"width": 128, "layers": 1, "sequences": 2, "length": 4}
VOCABULARY = 256
#: Parts of the paths of files: those that ask, and those in which the model computes.
ASKING, MODEL = ("/troll/", "/trl/", "/accelerate/", "/transformers/"), ("/transformers/models/", "/torch/optim/")


class Launches(TorchDispatchMode):
    """Counts operators that are no views, and Triton's kernels, by the file that asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.by_file: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in FREE and not func.is_view:
            self.add()
        return func(*args, **(kwargs or {}))

    def add(self) -> None:
        """Counts one launch for the innermost file that asks."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if any(part in file for part in MODEL):
                return
            if any(part in file for part in ASKING):
                found = next(part for part in ASKING if part in file)
                self.by_file[found[1:] + file.rsplit(found, 1)[1]] += 1
                return
            frame = frame.f_back


def launches(trainer: str) -> dict[str, int]:
    """The launches of a rollout's scoring and updates, by file."""
    import trl.kernels.chunked_logprob
    import trl.trainer.utils
    from triton.runtime.interpreter import GridExecutor

    from benchmarks import step

    counted, run = Launches(), GridExecutor.__call__

    def counting_run(self: Any, *args: Any, **kwargs: Any) -> None:
        counted.add()
        with _disable_current_modes():
            run(self, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(step, "VOCABULARY", VOCABULARY))
        for module in (trl.kernels.chunked_logprob, trl.trainer.utils):  # on a CPU, TRL's head has no kernels
            stack.enter_context(mock.patch.object(module, "_use_triton", lambda device: True))
        made = step._trainer(trainer, "cpu", **CASE)
        stack.enter_context(mock.patch.object(GridExecutor, "__call__", counting_run))
        stack.enter_context(counted)
        made.train()
    return dict(counted.by_file)


def main(device: str, repeats: int) -> list[dict[str, Any]]:
    """Counts both trainers, each in its own process, and prints the files. Device and repeats are not used."""
    if importlib.util.find_spec("triton") is None:
        Console().print("skipped: Triton is not installed")
        return []
    from benchmarks import step

    environment = os.environ | {"TRITON_INTERPRET": "1", "TROLL_KERNELS": "triton", "CUDA_VISIBLE_DEVICES": ""}
    found = {}
    for name in step.TRAINERS:
        command = [sys.executable, "-m", "benchmarks.host", name]
        output = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if output.returncode:
            raise RuntimeError(f"counting failed:\n{output.stderr}")
        found[name] = json.loads(output.stdout.splitlines()[-1])
    table = measure.numbers("file", *found, names=1, title=f"launches outside the model, {step.UPDATES} updates")
    files = sorted({file for counts in found.values() for file in counts})
    rows = [{"file": file} | {name: counts.get(file, 0) for name, counts in found.items()} for file in files]
    rows.append({"file": "all"} | {name: sum(counts.values()) for name, counts in found.items()})
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=130).print(table)
    return rows


if __name__ == "__main__":
    print(json.dumps(launches(sys.argv[1])))
