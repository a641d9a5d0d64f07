"""Every kernel compiles for GPUs that are not there, and needs no more than they have."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.troll.trust_region.ahead_of_time import Compiled, compiled, has_target

KERNELS = {
    *("block_sums_kernel", "clear_kernel", "read_kernel", "gradient_kernel", "products_kernel"),
    *("select_kernel", "outside_kernel", "_slots_kernel", "_step_gradient_kernel", "_step_kernel"),
}


@pytest.mark.parametrize(
    ("target", "variants"),
    [
        ("cuda", "once"),
        pytest.param("cuda", "all", marks=pytest.mark.slow),
        pytest.param("hip", "all", marks=pytest.mark.slow),
    ],
)
def test_kernels_compile(target: str, variants: str, tmp_path: Path):
    if not has_target(target):
        pytest.skip(f"this Triton cannot compile for {target}")
    kernels = compiled(target, tmp_path, variants=variants)
    assert {kernel.kernel for kernel in kernels} == KERNELS
    assert all(kernel.binary > 1000 for kernel in kernels)
    if target == "cuda":
        assert_fits(kernels)


def assert_fits(kernels: list[Compiled]) -> None:
    # 16384 candidates, at K = 256, take every register that there is, and some Tritons a few more.
    assert not [kernel for kernel in kernels if kernel.spilled and not kernel.variant.endswith("K 256")]
    assert max(kernel.spilled or 0 for kernel in kernels) <= 256
    # Half of what a multiprocessor has: two programs at least.
    assert max(kernel.shared for kernel in kernels) <= 114 * 1024
    of_some_blocks = ("select_kernel", "outside_kernel")
    tiles = [k for k in kernels if ", W 151936" in k.variant and k.kernel not in of_some_blocks]
    # Rows whose place is known when they are launched only are read as widely as others.
    assert tiles and all(kernel.widest_load == 16 for kernel in tiles)
