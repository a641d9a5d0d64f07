"""Every path on the cases that it takes: values, gradients and dtypes are the reference's.

A path is one entry of `matrix_paths`, a case one of `matrix_cases`.
"""

import importlib.util

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tolerance import within
from tests.troll.trust_region import reference
from tests.troll.trust_region.cases import Array, array
from tests.troll.trust_region.matrix_cases import CASES, Case, expected, old_rows, spread
from tests.troll.trust_region.matrix_paths import PATHS, TRITON, Found, Path, run, tensor

EVERY = PATHS | (TRITON if importlib.util.find_spec("triton") else {})
PAIRS = [(path, case) for path in EVERY for case in CASES if EVERY[path].takes(CASES[case])]


@pytest.mark.parametrize(("path", "case"), PAIRS)
def test_path_gives_reference(path, case, tiles_of_three):
    assert_is_reference(EVERY[path], CASES[case], run(EVERY[path], CASES[case]))


def assert_is_reference(path: Path, case: Case, found: Found) -> None:
    """The old policy, the fields of the step and the leaves' gradients, and their dtypes."""
    assert_captured(path, case, found)
    wanted, off = expected(case, path.paper), spread(case, path.unit, path.paper)
    for name, value in found.values.items():
        if name == "projected":
            assert value.tolist() == wanted.values[name].tolist()
            continue
        assert value.dtype == path.computed, name
        assert_close(array(value), wanted.values[name], allowed(path, wanted.values[name], off.values[name]), name)
    if case.is_equal:
        assert_ratio_one(case, found.values["log_ratio"])
    made = path.make(tensor(case.new, path.dtype), None)
    for name, gradients in found.gradients.items():
        outputs = sorted(found.values.keys() & wanted.gradients.keys()) if name == "all" else [name]
        want = np.sum([wanted.gradients[each] for each in outputs], axis=0)
        error = np.sum([allowed(path, wanted.gradients[each], off.gradients[each]) for each in outputs], axis=0)
        # A gradient is rounded to the leaves' dtype before a product, and after it, by a quarter of this.
        eps = 2 * torch.finfo(path.dtype).eps
        most = made.pulled_back(error + eps * np.abs(want), np.abs)
        for gradient, exact, tolerance in zip(gradients, made.pulled_back(want), most, strict=True):
            assert gradient.dtype == path.dtype, name
            assert_close(array(gradient), exact, tolerance + eps * np.abs(exact), f"gradient of {name}")


def assert_captured(path: Path, case: Case, found: Found) -> None:
    """Slots exactly, log-probabilities to some roundings of the largest logit and of a sum over the vocabulary."""
    old, rows = found.old, old_rows(case)
    fine = np.array([not np.isnan(row.log_probs).any() for row in rows], dtype=bool)
    kept = [row for row, is_fine in zip(rows, fine, strict=True) if is_fine]
    assert array(old.token_ids)[fine].tolist() == [row.padded_ids() for row in kept]
    assert array(old.slot)[fine].tolist() == [row.slot for row in kept]
    largest = np.abs(case.old[np.isfinite(case.old)]).max(initial=0)
    tolerance = path.unit * (16 * (1 + largest) + 2 * case.old.shape[-1])
    for name, value, want in (
        ("log_probs", old.log_probs, [row.padded_log_probs() for row in kept]),
        ("tail_log_prob", old.tail_log_prob, [row.tail_log_prob for row in kept]),
        ("log_prob", old.log_prob, [row.log_prob for row in kept]),
    ):
        assert value.dtype == path.computed, name
        got = array(value)[fine]
        assert_close(got, np.reshape(want, got.shape), np.full(got.shape, tolerance), name)
    assert array(old.log_prob.isnan() & old.tail_log_prob.isnan()).tolist() == (~fine).tolist()


def assert_ratio_one(case: Case, log_ratio: Tensor) -> None:
    """Up to 4 · 2⁻²³ · max(1, |logsumexp|, |log p(o)|) in float32, and 2⁻⁵² in float64: what the design promises."""
    rows = zip(case.old, old_rows(case), strict=True)
    totals = [max(1.0, abs(reference.log_sum_exp(logits)), abs(row.log_prob)) for logits, row in rows]
    assert (np.abs(array(log_ratio)) <= 4 * torch.finfo(log_ratio.dtype).eps * np.array(totals)).all()


def allowed(path: Path, want: Array, error: Array) -> Array:
    """Three times what the reference makes of inputs that are as far off, and some roundings of the number itself."""
    return 3 * (error + 8 * path.unit * (1 + np.abs(np.where(np.isfinite(want), want, 0.0))))


def assert_close(got: Array, want: Array, tolerance: Array, name: str) -> None:
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite], err_msg=name)
    close = np.abs(got[finite] - want[finite]) <= within(1) * tolerance[finite]
    assert close.all(), f"{name}: {got[finite][~close]} is not {want[finite][~close]}"
