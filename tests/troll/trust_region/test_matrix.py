"""Every path on every case: values, gradients and dtypes are the reference's.

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
from troll.trust_region.reading import head, logits

EVERY = PATHS | (TRITON if importlib.util.find_spec("triton") else {})
PAIRS = [(path, case) for path in EVERY for case in CASES if EVERY[path].takes(CASES[case])]


@pytest.fixture
def tiles_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles each way, and a remainder, for 6 tokens and 152 entries."""
    monkeypatch.setattr(head, "TOKEN_TILE", 4)
    monkeypatch.setattr(head, "VOCABULARY_TILE", 64)
    monkeypatch.setattr(head, "WHOLE_ROWS", {"cpu": 4 * 152, "gpu": 4 * 152})
    monkeypatch.setattr(logits, "TILE_LOGITS", 4 * 152)


@pytest.mark.parametrize(("path", "case"), PAIRS)
def test_path_gives_reference(path, case, tiles_of_four):
    assert_is_reference(EVERY[path], CASES[case], run(EVERY[path], CASES[case]))


def assert_is_reference(path: Path, case: Case, found: Found) -> None:
    computed = torch.float64 if path.dtype == torch.float64 else torch.float32
    assert_captured(path, case, found)
    wanted, off = expected(case), spread(case, path.unit)
    for name, value in found.values.items():
        if name == "projected":
            assert value.tolist() == wanted.values[name].tolist()
            continue
        assert value.dtype == computed, name
        assert_close(path, array(value), wanted.values[name], off.values[name], name)
    if case.is_equal:
        assert_ratio_one(path, case, found.values["log_ratio"])
    made = path.make(tensor(case.new, path.dtype), None)
    for name, gradients in found.gradients.items():
        outputs = found.values.keys() & wanted.gradients.keys() if name == "all" else [name]
        want, error = (sum(x.gradients[each] for each in outputs) for x in (wanted, off))
        # A gradient is rounded to the leaves' dtype before a product, and after it.
        eps = torch.finfo(path.dtype).eps
        tolerance = allowed(path, want, error) + eps * np.abs(want)
        pulled = zip(gradients, made.pulled_back(want), made.pulled_back(tolerance, np.abs), strict=True)
        for gradient, exact, most in pulled:
            assert gradient.dtype == path.dtype, name
            wrong = np.abs(array(gradient) - exact) > within(1) * (most + eps * np.abs(exact))
            assert not wrong.any(), f"gradient of {name}: {array(gradient)[wrong]} is not {exact[wrong]}"


def assert_captured(path: Path, case: Case, found: Found) -> None:
    rows, old = old_rows(case), found.old
    fine = [not np.isnan(row.log_probs).any() for row in rows]
    for row, ids, slot in zip(rows, old.token_ids.tolist(), old.slot.tolist(), strict=True):
        if not np.isnan(row.log_probs).any():
            assert ids == row.padded_ids() and slot == row.slot
    size = 1 + max((np.abs(x[np.isfinite(x)]).max(initial=0) for x in case.old), default=0)
    for name, want in (
        ("log_probs", [row.padded_log_probs() for row in rows]),
        ("tail_log_prob", [row.tail_log_prob for row in rows]),
        ("log_prob", [row.log_prob for row in rows]),
    ):
        got = array(getattr(old, name))
        assert getattr(old, name).dtype == (torch.float64 if path.dtype == torch.float64 else torch.float32)
        if name == "log_probs":
            got, want = got[fine], [x for x, kept in zip(want, fine, strict=True) if kept]
        np.testing.assert_allclose(
            got, np.array(want).reshape(got.shape), rtol=0, atol=within(16 * path.unit * size), err_msg=name
        )


def assert_ratio_one(path: Path, case: Case, log_ratio: Tensor) -> None:
    """Up to 4 · 2⁻²³ · max(1, |logsumexp|, |log p(o)|) in float32, and 2⁻⁵² in float64: what the design promises."""
    rows = zip(case.old, old_rows(case), strict=True)
    totals = [max(1.0, abs(reference.log_sum_exp(logits)), abs(row.log_prob)) for logits, row in rows]
    assert (np.abs(array(log_ratio)) <= 4 * torch.finfo(log_ratio.dtype).eps * np.array(totals)).all()


def allowed(path: Path, want: Array, error: Array) -> Array:
    """Three times what the reference makes of inputs that are as far off, and some roundings of the number itself."""
    return 3 * (error + 8 * path.unit * (1 + np.abs(np.where(np.isfinite(want), want, 0.0))))


def assert_close(path: Path, got: Array, want: Array, error: Array, name: str) -> None:
    infinite = ~np.isfinite(want)
    np.testing.assert_array_equal(got[infinite], want[infinite], err_msg=name)
    wrong = ~infinite & ~(
        np.abs(got - want, where=~infinite, out=np.zeros_like(got)) <= within(1) * allowed(path, want, error)
    )
    assert not wrong.any(), f"{name}: {got[wrong]} is not {want[wrong]}"
