import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tolerance import EPS, rounding

PROJECT = Path(__file__).resolve().parents[1]

#: In a process of its own, since all other tests use these functions too.
COMPARISONS = """
import pytest, torch
from tests.tolerance import tighten
assert_close = torch.testing.assert_close
tighten(3)

def equal(compared):
    try:
        compared()
    except AssertionError:
        return False
    return True

one = torch.ones(1, dtype=torch.float64)
for share, inside in ((0.3, True), (0.4, False)):
    for options in ({"rtol": 1e-3, "atol": 0.0}, {"rtol": 0.0, "atol": 1e-3}):
        assert equal(lambda: assert_close(one + share * 1e-3, one, **options)) == inside
        assert equal(lambda: assert_close([1.0, 1.0 + share * 1e-3], [1.0, 1.0], **options)) == inside
    # Defaults: 1e-7 in float64, 1.3e-6 in float32, at 100 with next to nothing absolute.
    assert equal(lambda: assert_close(100 * (one + share * 1e-7), 100 * one)) == inside
    near, exact = (100 * (one + share * 1.3e-6)).float(), (100 * one).float()
    assert equal(lambda: assert_close({"a": near}, {"a": exact})) == inside
    assert (1 + share * 1e-6 == pytest.approx(1)) == inside
    assert (1 + share * 1e-3 == pytest.approx(1, rel=1e-3)) == inside
    assert (1 + share * 1e-3 == pytest.approx(1, abs=1e-3)) == inside
    assert (share * 1e-12 == pytest.approx(0)) == inside
    assert ([1 + share * 1e-3] == pytest.approx([1], 1e-3)) == inside
    assert ({"a": 1 + share * 1e-3} == pytest.approx({"a": 1}, rel=0, abs=1e-3)) == inside
# An absolute tolerance leaves no relative one.
assert 1e6 != pytest.approx(1e6 + 0.1, abs=0.01)
# What is exact stays exact, and equal.
assert equal(lambda: assert_close(one, one, rtol=0, atol=0))
assert not equal(lambda: assert_close(one + 1e-15, one, rtol=0, atol=0))
assert equal(lambda: assert_close(torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)))
assert float("nan") == pytest.approx(float("nan"), nan_ok=True)
"""


@pytest.mark.slow
def test_tolerances_are_divided_in_every_comparison() -> None:
    subprocess.run([sys.executable, "-c", COMPARISONS], check=True, cwd=PROJECT)


@pytest.mark.slow
def test_a_variable_divides_the_tolerances_of_tests(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_near.py").write_text(
        "import pytest, torch\nfrom tests.tolerance import within\ndef test_all():\n"
        "    assert 1.0005 != pytest.approx(1, rel=1e-3) and 5e-4 > within(1e-3)\n"
        "    with pytest.raises(AssertionError):\n"
        "        torch.testing.assert_close(torch.tensor(1.0005), torch.tensor(1.0), rtol=1e-3, atol=0)\n"
    )
    environment = os.environ | {"TROLL_TEST_MARGIN": "3", "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)


def test_rounding_bounds_a_sum_in_float32() -> None:
    import torch

    values = torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 1
    total = torch.zeros(())
    for value in values:
        total = total + value
    exact = math.fsum(values.tolist())
    assert EPS < abs(total.item() - exact) < rounding(len(values), exact)
