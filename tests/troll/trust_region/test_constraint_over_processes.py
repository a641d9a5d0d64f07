"""One multiplier for the tokens of several processes: what one process would find, bit by bit the same in all."""

import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.troll.trust_region.cases import pairs, random_logits, tensor
from troll import Constraint, project

FIELDS = ("log_probs", "multiplier", "kl_before", "kl_after", "projected", "iterations")


@dataclass
class Shared:
    """Tokens (N, ...) of a constraint that spans two processes; the first takes those before `split`."""

    new: Tensor
    old: Tensor
    mask: Tensor
    split: int
    kl_bound: Tensor
    reduction: Any = "mean"
    groups: int = 1

    def part(self, rank: int) -> slice:
        return slice(None, self.split) if rank == 0 else slice(self.split, None)

    def run(self, part: slice, process_group: Any) -> dict[str, Tensor]:
        """The fields of the projection, and the gradient of this part's share of the mean loss over all tokens."""
        mask, count = self.mask[part], self.mask.sum()
        group = (torch.arange(len(self.mask)) % self.groups)[part]
        weight = mask.double() / (count if self.reduction == "mean" else 1)
        constraint = Constraint(group, weight, self.groups, process_group)
        logits = self.new[part].clone().requires_grad_()
        projection = project(logits, self.old[part], self.kl_bound[part], constraint)
        upstream = random_logits(*self.new.shape, seed=9)[part] * mask.unsqueeze(-1)
        loss = torch.where(upstream != 0, upstream * projection.log_probs, 0.0).sum() / count
        (gradient,) = torch.autograd.grad(loss, logits)
        fields = {name: getattr(projection, name).detach() for name in FIELDS}
        return fields | {"gradient": gradient}


def shared(**changes: Any) -> Shared:
    old = random_logits(9, 6)
    case = Shared(
        new=old + random_logits(9, 6, seed=1),
        old=old,
        mask=torch.tensor([1, 1, 1, 0, 1, 1, 1, 1, 0]),
        split=5,
        kl_bound=torch.linspace(0.02, 0.2, 9, dtype=torch.float64),
    )
    return dataclasses.replace(case, **changes)


def quiet_second_half() -> Tensor:
    """The second process alone would be far inside its bound."""
    old = random_logits(9, 6)
    return torch.cat([old[:5] + 2 * random_logits(5, 6, seed=1), old[5:] + 1e-3 * random_logits(4, 6, seed=2)])


def near_deterministic() -> Shared:
    old, new = (tensor(x) for x in pairs("near_deterministic", 9, 6, seed=3))
    return shared(old=old, new=new, kl_bound=torch.full((9,), 1e-3, dtype=torch.float64))


def with_nan() -> Tensor:
    new = random_logits(9, 6, seed=1)
    new[7, 2] = math.nan
    return new


CASES: dict[str, Shared] = {
    "mean": shared(),
    "sum": shared(reduction="sum"),
    "one process has no tokens": shared(split=9),
    "one process has masked tokens alone": shared(split=8),
    "one process is inside its own bound": shared(new=quiet_second_half()),
    "all inside": shared(kl_bound=torch.full((9,), 50.0, dtype=torch.float64)),
    "several groups": shared(groups=4, kl_bound=torch.full((9,), 0.03, dtype=torch.float64)),
    "near-deterministic": near_deterministic(),
    "nan": shared(new=with_nan()),
}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, dict[str, Tensor]]]:
    """What each rank finds of every case. Threads take the place of processes, of which the group adds up sums."""
    store = dist.HashStore()

    def found(rank: int) -> dict[str, dict[str, Tensor]]:
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(minutes=1))
        return {name: case.run(case.part(rank), group) for name, case in CASES.items()}

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(found, range(2)))


@pytest.mark.parametrize("name", CASES)
def test_two_processes_give_projection_of_one(two_ranks, name):
    """Values, multiplier and gradients of the mean loss, to 1e-9."""
    expected = CASES[name].run(slice(None), None)
    assert bool(expected["projected"].any()) == (name not in ("all inside", "nan"))
    for field, value in expected.items():
        ours = torch.cat([result[name][field] for result in two_ranks])
        torch.testing.assert_close(ours, value, rtol=1e-9, atol=1e-9, equal_nan=True, msg=f"{name}: {field}")


def test_processes_find_same_multiplier_bit_by_bit(two_ranks):
    for name in ("mean", "near-deterministic"):
        first, second = (result[name]["multiplier"] for result in two_ranks)
        assert (first == second[0]).all() and (second == second[0]).all()
