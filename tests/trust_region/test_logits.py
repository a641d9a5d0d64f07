"""Reading a support from logits in tiles of rows; what is read is tested in test_policy.py."""

from __future__ import annotations

import pytest
import torch

import troll
from troll.trust_region import logits as reading
from troll.trust_region.policy import SparsePolicy

L, V = 23, 40


@pytest.fixture
def logits() -> torch.Tensor:
    return 3 * torch.randn(L, V, generator=torch.Generator().manual_seed(0))


def ids(number: int) -> torch.Tensor:
    return torch.randint(V, (number,), generator=torch.Generator().manual_seed(1))


def update(logits: torch.Tensor, token_ids: torch.Tensor, rows: torch.Tensor | None, tail: str) -> list[torch.Tensor]:
    """A capture, an update with other logits, and the gradient of something of all its outputs."""
    old = SparsePolicy.from_logits(logits, token_ids, top_k=6, mass_threshold=1e-3, tail=tail, rows=rows)  # type: ignore[arg-type]
    moved = (logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))).requires_grad_()
    new = old.new_policy(moved, token_ids, rows=rows)
    step = troll.project(new, old.on_outcomes_of(new), kl_bound=0.01)
    weight = torch.linspace(-1, 1, step.log_probs.shape[-1])
    (torch.where(new.used, step.log_probs[..., :-1] * weight[:-1], 0.0).sum() + new.tail_log_prob.sum()).backward()
    assert moved.grad is not None
    return [old.token_ids, old.log_probs, old.tail_log_prob, new.log_probs, new.tail_log_prob, moved.grad]


@pytest.mark.parametrize("tail", ["bucket", "floor"])
def test_tiles_change_nothing(logits: torch.Tensor, tail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = update(logits, ids(L), None, tail)
    for tile in (1, 5 * V, 23 * V):
        monkeypatch.setattr(reading, "ROW_TILE", tile)
        assert all(torch.equal(a, b) for a, b in zip(update(logits, ids(L), None, tail), whole, strict=True))


@pytest.mark.parametrize("tail", ["bucket", "floor"])
@pytest.mark.parametrize("tile", [3 * V, 2**26])
def test_rows_are_what_indexing_gives(
    logits: torch.Tensor, tail: str, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "ROW_TILE", tile)
    rows = torch.tensor([20, 3, 4, 5, 22, 0, 11])
    *values, gradient = update(logits, ids(len(rows)), rows, tail)
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    old = SparsePolicy.from_logits(logits[rows], ids(len(rows)), top_k=6, mass_threshold=1e-3, tail=tail)  # type: ignore[arg-type]
    moved = (logits + noise).requires_grad_()
    new = old.new_policy(moved[rows], ids(len(rows)))
    expected = [old.token_ids, old.log_probs, old.tail_log_prob, new.log_probs, new.tail_log_prob]
    assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))
    others = torch.ones(L, dtype=torch.bool).index_fill(0, rows, False)
    assert torch.equal(gradient[others], torch.zeros(int(others.sum()), V))
    assert gradient[rows].abs().sum(-1).min() > 0


def test_no_rows(logits: torch.Tensor) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    old_ids, *_, gradient = update(logits, none, none, "bucket")
    assert old_ids.shape == (0, 6)
    assert torch.equal(gradient, torch.zeros(L, V))


@pytest.mark.parametrize("wrong", [torch.tensor([0.5]), torch.tensor([[1]])])
def test_wrong_rows_are_refused(logits: torch.Tensor, wrong: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="rows"):
        SparsePolicy.from_logits(logits, ids(1), rows=wrong)


def test_no_float32_copy_of_all_bfloat16_logits(logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pass ever holds more than a tile in float32."""
    monkeypatch.setattr(reading, "ROW_TILE", 2 * V)
    sizes, as_float = [], reading.as_float

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return as_float(tensor)

    monkeypatch.setattr(reading, "as_float", counted)
    update(logits.bfloat16(), ids(L), None, "floor")
    assert max(sizes) == 2 * V
