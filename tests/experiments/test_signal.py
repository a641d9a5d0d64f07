"""Where the pull acts in `experiments.signal`."""

import pytest
import torch

from experiments import signal
from tests.troll.trl.surrogates.scored import pair, scored_tokens, settings
from troll.trl.surrogates import NoSettings, formulas

ADVANTAGES = torch.tensor([1.5, 0.0, -0.5, 0.0, 2.0, 0.0], dtype=torch.float64)


@pytest.mark.parametrize(("place", "without_signal"), [("without signal", True), ("with signal", False)])
def test_pull_acts_on_tokens_of_its_place_only_and_the_ratio_on_all(place, without_signal):
    new, old, sampled = pair()
    tokens = scored_tokens(new, old, sampled, advantages=ADVANTAGES)
    args = settings(pull="proximal")
    whole, part = (terms(tokens, args, NoSettings()) for terms in (formulas.troll, signal.PLACES[place]))
    assert part.log_ratio is not None and whole.log_ratio is not None
    assert part.penalty is not None and whole.penalty is not None
    assert torch.equal(part.log_ratio, whole.log_ratio)
    there = (ADVANTAGES == 0) == without_signal
    assert torch.equal(part.penalty[there], whole.penalty[there]) and (part.penalty[there] > 0).all()
    assert not part.penalty[~there].any()
