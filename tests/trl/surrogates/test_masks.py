"""Each surrogate that drops tokens, on closed forms; DPPO's masks in a trainer: test_surrogates.py."""

from __future__ import annotations

import torch

from tests.trl.surrogates.scored import pair, scored_tokens, settings
from troll.trl.surrogates.masks import IPOSettings, ipo


def test_ipo_drops_what_has_moved_in_either_direction():
    p, new = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.01, 0.01]), torch.tensor([0.85, 0.15, 0.75, 0.25, 0.25, 0.4])
    logits, old = (torch.stack([values, 1 - values], -1).double().log() for values in (new, p))
    for advantage in (1.0, -1.0):
        tokens = scored_tokens(
            logits.requires_grad_(), old, torch.zeros(6, dtype=torch.long), advantages=torch.full((6,), advantage)
        )
        terms = ipo(tokens, settings(), IPOSettings(threshold=0.3, kl_weight=0.0))
        assert terms.keep is not None
        assert terms.keep.tolist() == [False, False, True, True, True, False]
        assert terms.log_ratio is None and terms.penalty is None


def test_ipo_penalises_squared_log_ratios_of_all_tokens():
    new, old, sampled = pair()
    tokens = scored_tokens(new, old, sampled)
    terms = ipo(tokens, settings(), IPOSettings(threshold=0.01, kl_weight=0.5))
    assert terms.keep is not None and terms.penalty is not None
    assert not terms.keep.all()
    log_ratio = (tokens.new_log_probs - tokens.old_log_probs).detach()
    torch.testing.assert_close(terms.penalty, 0.5 * log_ratio.square(), rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(terms.penalty.sum(), tokens.new_log_probs)
    torch.testing.assert_close(gradient, log_ratio, rtol=1e-12, atol=0)
