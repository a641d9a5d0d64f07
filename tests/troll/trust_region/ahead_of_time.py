"""Compiles every kernel for a GPU that is not there, with the arguments that its own launcher passes.

The interpreter runs Python that the compiler refuses, and knows nothing of registers. Triton brings all it needs to get
from a kernel to a binary. `python -m tests.troll.trust_region.ahead_of_time cuda all` prints one line of JSON a launch.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: Backend, architecture and threads of a warp.
TARGETS = {"cuda": ("cuda", 90, 32), "hip": ("hip", "gfx942", 64)}

#: What Triton calls their back ends.
BACKENDS = {"cuda": "nvidia", "hip": "amd"}


@dataclass(frozen=True)
class Compiled:
    """What became of one launch. Registers and spills, in bytes, of a thread are known for CUDA only."""

    kernel: str
    variant: str
    warps: int
    shared: int
    """Bytes of shared memory that a program takes."""
    binary: int
    """Bytes; 0 if there is none."""
    registers: int | None = None
    spilled: int | None = None
    widest_load: int | None = None
    """Bytes that a thread loads at once."""


def has_target(target: str) -> bool:
    """Whether this Triton can compile for it."""
    from triton.backends import backends

    return BACKENDS[target] in backends


def compiled(target: str, cache: os.PathLike[str] | None = None, *, variants: str = "all") -> list[Compiled]:
    """What a function of `LAUNCHES` launches, compiled in a process where Triton does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if cache is not None:
        environment["TRITON_CACHE_DIR"] = os.fspath(cache)
    done = subprocess.run(
        [sys.executable, "-m", __name__, target, variants], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [Compiled(**json.loads(line)) for line in done.stdout.splitlines()]


def launch_once() -> Iterator[str]:
    """Launches every kernel once, with the table's sizes for Qwen's vocabulary in rows that lie apart."""
    yield from _launch_tile(torch.bfloat16, 151936, entropies=(True,), apart=True)
    yield from _launch_rest(torch.bfloat16)
    yield from _launch_policy(64)
    yield from _launch_step((64, True, torch.full((2,), 0.05)))


def launch_all() -> Iterator[str]:
    """Launches every kernel in every variant, and says which these were, after each launch or two of one variant."""
    for dtype in (torch.bfloat16, torch.float32):
        # Besides Qwen's vocabulary, a head's tile, and an odd one with a softcap.
        yield from _launch_tile(dtype, 151936, apart=True)
        yield from _launch_tile(dtype, 32768)
        yield from _launch_tile(dtype, 1001, 1, (0.7, 0.5, 30.0))
        yield from _launch_select(dtype, 4000, 64)
        yield from _launch_select(dtype, 2**20, 256)
        yield from _launch_rest(dtype)
    yield from _launch_policy(1, 64, 256)
    yield from _launch_step((64, False, 0.05), (128, True, torch.full((2,), 0.05)))


def _tile_of(values: Tensor, width: int, offsets: Tensor | None = None, transform: Sequence[float] = ()) -> Any:
    from troll.trust_region.reading.memory_triton import Memory
    from troll.trust_region.reading.tiles import Transform
    from troll.trust_region.reading.tiles_triton import TritonTile

    return TritonTile(Memory(values, width, offsets), Transform(*transform), 0, slice(0, 2), slice(0, width))


def _select(tile: Any, k: int, entropy: bool) -> None:
    from troll.trust_region.reading.tiles import TailSums

    logits = torch.zeros(2, k + 1)
    tile.select(torch.zeros(2, dtype=torch.int64), k, logits, TailSums.empty(logits, entropy))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _launch_tile(
    dtype: torch.dtype,
    width: int,
    slots: int = 64,
    transform: Sequence[float] = (),
    *,
    entropies: Sequence[bool] = (False, True),
    apart: bool = False,
) -> Iterator[str]:
    from troll.trust_region.reading.tiles import Support, TailSums, Upstream

    values = torch.zeros(2, 2 if apart else 1, width, dtype=dtype)
    offsets = torch.tensor([0, 2 * width]) if apart else None
    tile = _tile_of(values if apart else values[:, 0], width, offsets, transform)
    support = Support.from_ids(torch.zeros(2, slots, dtype=torch.int64))
    logits, row = torch.zeros(2, slots), torch.zeros(2)
    variant = f"{_name(dtype)}, W {width}, K {slots}" + (", rows apart" if apart else "")
    for entropy in entropies:
        tile.read(support, logits, TailSums.empty(logits, entropy))
        _select(tile, slots, entropy)
        tile.gradient(support, Upstream(row, row, logits, *((row, row) if entropy else (None, None))))
        yield variant + (", entropy" if entropy else "")


def _launch_select(dtype: torch.dtype, width: int, slots: int) -> Iterator[str]:
    _select(_tile_of(torch.zeros(2, width, dtype=dtype), width), slots, entropy=False)
    yield f"{_name(dtype)}, W {width}, K {slots}"


def _launch_rest(dtype: torch.dtype) -> Iterator[str]:
    """The kernels that do not depend on the vocabulary's size."""
    from troll.trust_region.reading.tiles_triton import TritonTile

    TritonTile.clear(torch.zeros(2, 32768, dtype=dtype), torch.zeros(2, dtype=torch.bool))
    yield f"{_name(dtype)}, W 32768"
    hidden, weight = torch.zeros(2, 4096, dtype=dtype), torch.zeros(8, 4096, dtype=dtype)
    ids = torch.zeros(2, 64, dtype=torch.int64)
    TritonTile.gathered_products(hidden, weight, None, ids, 0)
    yield f"{_name(dtype)}, H 4096"
    TritonTile.gathered_products(hidden, weight.float(), weight[:, 0].float(), ids[:, :1], 0)
    yield f"{_name(dtype)}, H 4096, bias and weight float32"


def _launch_policy(*sizes: int) -> Iterator[str]:
    from troll.trust_region.policy.top import Top
    from troll.trust_region.policy.top_triton import slots

    for k in sizes:
        logits, row = torch.zeros(2, k), torch.zeros(2)
        ids = torch.zeros(2, k, dtype=torch.int64)
        slots(Top(ids, logits, logits, row, row), ids[:, 0], 100, 1e-5)
        yield f"K {k}"


def _launch_step(*variants: tuple[int, bool, float | Tensor]) -> Iterator[str]:
    from troll.trust_region import step_triton
    from troll.trust_region.policy.on_support import PolicyOnSupport
    from troll.trust_region.policy.sparse import SparsePolicy

    for k, entropy, bound in variants:
        ids, row = torch.zeros(2, k, dtype=torch.int64), torch.zeros(2, requires_grad=True)
        logits = torch.zeros(2, k, requires_grad=True)
        new = PolicyOnSupport(ids, logits, row, 1000, row if entropy else None)
        old = SparsePolicy(ids, logits.detach(), row.detach(), ids[:, 0], 1000, 1e-5)
        variant = f"K {k}" + (", entropy" if entropy else "")
        with torch.no_grad():
            step_triton.step(new, old, bound, proximal=False)
        yield f"{variant}, without gradient"
        log_ratio, regression, log_prob, *_, of_entropy = step_triton.step(new, old, bound, proximal=False)
        outputs = (log_ratio, regression, log_prob, of_entropy)
        sum(x.sum() for x in outputs if x is not None).backward()  # type: ignore[union-attr]
        yield variant


#: By what the second argument of the program says.
LAUNCHES = {"once": launch_once, "all": launch_all}


@contextmanager
def launches_compile_only(target: str) -> Iterator[list[Any]]:
    """Every launch compiles its kernel for the target and adds it to the list; nothing runs. One target a process."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget(*TARGETS[target])

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    kernels: list[Any] = []

    def launch(self: Any, grid: Any) -> Any:
        return lambda *args, **kwargs: kernels.append(self.run(*args, grid=grid, warmup=True, **kwargs))

    driver.set_active(Driver())
    before = JITFunction.__dict__.get("__getitem__")
    JITFunction.__getitem__ = launch
    try:
        yield kernels
    finally:
        if before is None:
            del JITFunction.__getitem__
        else:
            JITFunction.__getitem__ = before


def _examined(kernel: Any, variant: str) -> Compiled:
    binary = next((len(kernel.asm[name]) for name in ("cubin", "hsaco") if name in kernel.asm), 0)
    metadata = kernel.metadata
    known = Compiled(metadata.name, variant, metadata.num_warps, metadata.shared, binary)
    if "ptx" not in kernel.asm:
        return known
    registers, spilled = _resources(kernel.asm["cubin"])
    loads = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.[bu](\d+)", kernel.asm["ptx"])
    widest = max((int(count or 1) * int(bits) // 8 for count, bits in loads), default=0)
    return dataclasses.replace(known, registers=registers, spilled=spilled, widest_load=widest)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, which holds what they do not."""
    import triton

    reader = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        arguments = [str(reader), "--dump-resource-usage", file.name]
        said = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    with launches_compile_only(sys.argv[1]) as kernels:
        done = 0
        for variant in LAUNCHES[sys.argv[2]]():
            for kernel in kernels[done:]:
                print(json.dumps(dataclasses.asdict(_examined(kernel, variant))))
            done = len(kernels)
