"""Numbers that add up."""

from __future__ import annotations

import torch

from tests.trust_region.cases import assert_same_numbers, numbers
from troll.trust_region.tally import Tally


def random_tally(seed: int) -> Tally:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(4, generator=generator)
    return Tally({"a": x[:2], "b": x[2:]}, {"c": x[0], "d": x[1]}, {"e": x[2]})


def test_a_tally_adds_up():
    first, second = random_tally(0), random_tally(1) + Tally({"other": torch.tensor([6.0, 3.0])})
    found = (first + second).values()
    assert found["a"] == (first.totals["a"][0] + second.totals["a"][0]) / (first.totals["a"][1] + second.totals["a"][1])
    assert found["c"] == max(first.maxima["c"], second.maxima["c"])
    assert found["e"] == min(first.minima["e"], second.minima["e"])
    assert found["other"] == 2.0
    assert_same_numbers(numbers(Tally() + first), numbers(first))


def test_a_tally_reduced_over_processes_is_their_sum():
    tallies = [random_tally(seed) for seed in range(3)]
    sent: dict[str, list[torch.Tensor]] = {"total": [], "largest": []}

    def recorder(name):
        def send(vector):
            sent[name].append(vector)
            return vector

        return send

    for tally in tallies:
        assert_same_numbers(numbers(tally.reduced(recorder("total"), recorder("largest"))), numbers(tally))
    assert [len(vectors) for vectors in sent.values()] == [3, 3]  # one collective operation of each kind
    reduced = tallies[0].reduced(
        lambda _: torch.stack(sent["total"]).sum(0), lambda _: torch.stack(sent["largest"]).amax(0)
    )
    assert_same_numbers(numbers(reduced), numbers(tallies[0] + tallies[1] + tallies[2]))
    assert Tally().reduced(recorder("total"), recorder("largest")).values() == {}
