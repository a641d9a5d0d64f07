"""The kernel that makes slots of the largest entries, against the torch code next to it."""

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from troll.trust_region.policy import top as top_module
from troll.trust_region.policy import top_triton
from troll.trust_region.policy.top import Top
from troll.trust_region.policy.top_triton import slots

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 500
ROWS = 9

#: A log-probability is the difference of two numbers up to 30 in size, each off by some roundings of 2⁻²⁴ of that.
TOLERANCE = 3 * 4 * 30 * 2.0**-24


@pytest.fixture(autouse=True)
def fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes as long for many numbers as for few."""
    monkeypatch.setattr(top_triton, "COMPARED", 64)


def random_top(k: int, seed: int = 0) -> tuple[Top, Tensor]:
    """Entries with ties and without mass, unused ones, and sampled tokens among them and elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(VOCABULARY, generator=generator)[:k].sort().values for _ in range(ROWS)])
    z = 3 * torch.randn(ROWS, k, generator=generator)
    z[0] = z[0].round()
    z[1] = -5.0
    z[2, k // 2 :] = -math.inf
    ids[3, k // 2 + 1 :], z[3, k // 2 + 1 :] = -1, -math.inf
    sampled = torch.where(torch.arange(ROWS) % 2 == 0, ids[:, 0], ids[:, k // 2])
    sampled[5:8] = VOCABULARY + torch.arange(3)
    sampled[3] = VOCABULARY
    among = ids == sampled.unsqueeze(-1)
    sampled_logit = torch.where(among, z, -math.inf).amax(-1)
    sampled_logit = torch.where(among.any(-1), sampled_logit, torch.randn(ROWS, generator=generator))
    sampled_logit[7] = -math.inf
    rest = torch.randn(ROWS, generator=generator)
    rest[8] = -math.inf
    in_tail = z + 1e-2 * torch.randn(ROWS, k, generator=generator)
    return Top(*(x.to(DEVICE) for x in (ids, z, in_tail, sampled_logit, rest))), sampled.to(DEVICE)


def assert_agree(top: Top, sampled: Tensor, mass_threshold: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    actual = slots(top, sampled, VOCABULARY + 3, mass_threshold)
    expected = top_module._slots(top, sampled, VOCABULARY + 3, mass_threshold)
    for got, want in zip(actual, expected, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE, equal_nan=True)
    return actual


@pytest.mark.parametrize(("token", "mass_threshold"), [(-1, 1e-5), (VOCABULARY + 3, 0.0)])
def test_slots_of_token_outside_vocabulary_are_nan(token, mass_threshold):
    top, sampled = random_top(8)
    sampled[4] = token
    ids, log_probs, tail, slot = assert_agree(top, sampled, mass_threshold)
    assert log_probs[4, slot[4]].isnan() and tail[4].isnan()
    assert ids[4].min() >= -1 and ids[4].max() < VOCABULARY + 3
    assert not log_probs[:4].isnan().any()


# No threshold that a sum of probabilities could meet up to rounding.
@pytest.mark.parametrize(("k", "mass_threshold"), [(1, 0.31), (7, 0.0), (64, 1.1e-2), (100, 0.31)])
def test_slots_agree_with_torch(k, mass_threshold):
    ids, log_probs, tail, slot = assert_agree(*random_top(k), mass_threshold)
    total = torch.logsumexp(torch.cat([log_probs, tail.unsqueeze(-1)], -1), -1)
    torch.testing.assert_close(total, torch.zeros_like(total), rtol=0, atol=TOLERANCE)
    assert (ids.gather(-1, slot.unsqueeze(-1)) >= 0).all()


def test_slots_of_256_agree_with_torch(monkeypatch):
    monkeypatch.setattr(top_triton, "COMPARED", 16)
    assert_agree(*random_top(256, seed=1), 1e-3)
