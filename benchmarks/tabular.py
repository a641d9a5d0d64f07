"""One softmax over 100 actions, of which a rare one is rewarded: rollouts until its probability passes ½.

The most that a rollout may change has a closed form: the clip lets a probability p grow to 1.2 p, and the KL bound to
the largest q with q log(q/p) + (1 − q) log((1 − q)/(1 − p)) ≤ ε. Neither holds for the logits themselves: the clip only
ends a token's gradient, and Adam's momentum continues. Everything is in float64, untimed, and takes two minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from scipy.optimize import brentq
from scipy.special import rel_entr
from torch import Tensor

import troll
from troll.trl.surrogates import SURROGATES, ScoredTokens

ACTIONS, COMPLETIONS, UPDATES, MOST = 100, 256, 8, 200
START = (0.003, 0.01, 0.03)
STEPS = (0.1, 0.03, 0.01)
SEEDS = 8
CLIP, KL_BOUND = 0.2, 0.05
METHODS = ("troll", "regression", "kl_penalty", "clip", "none")


class _Settings:
    """The defaults of `TrollConfig` that these surrogates read."""

    pull = "projection"
    regression_weight = 1.0


def main(device: str, repeats: int) -> list[dict[str, Any]]:
    """Prints the table, always on the CPU, and returns its rows: the rollouts of each seed."""
    table = Table("p at first", "step of a logit", *METHODS, "1.2 a rollout", "KL ≤ 0.05 a rollout")
    rows = []
    for start in START:
        least = [_rollouts(start, grown) for grown in (lambda p: (1 + CLIP) * p, _farthest)]
        for step in STEPS:
            found = {method: [_train(method, start, step, seed) for seed in range(SEEDS)] for method in METHODS}
            rows.append({"start": start, "step": step, **found, "least_clip": least[0], "least_kl": least[1]})
            cells = [f"{fmean(counts):.1f} ({min(counts)}–{max(counts)})" for counts in found.values()]
            table.add_row(f"{start:g}", f"{step:g}", *cells, *map(str, least))
    Console(width=140).print(table)
    Console().print(f"mean (least–most) over {SEEDS} seeds; {MOST} where the probability did not pass ½ before")
    return rows


def _farthest(p: float) -> float:
    def excess(q: float) -> float:
        return float(rel_entr(q, p) + rel_entr(1 - q, 1 - p)) - KL_BOUND

    return brentq(excess, p, 1.0) if excess(1.0) > 0 else 1.0


def _rollouts(p: float, grown: Callable[[float], float]) -> int:
    count = 0
    while p <= 0.5:
        p, count = grown(p), count + 1
    return count


def _train(method: str, start: float, step: float, seed: int) -> int:
    """Rollouts until the first action's probability passes ½."""
    generator = torch.Generator().manual_seed(seed)
    others = torch.full((ACTIONS - 1,), (1 - start) / (ACTIONS - 1), dtype=torch.float64)
    logits = torch.cat([torch.tensor([start], dtype=torch.float64), others]).log().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=step)
    for rollout in range(MOST):
        before = logits.detach().clone()
        if before.softmax(-1)[0] > 0.5:
            return rollout
        sampled = torch.multinomial(before.softmax(-1), COMPLETIONS, replacement=True, generator=generator)
        rewards = (sampled == 0).double()
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for part in torch.randperm(COMPLETIONS, generator=generator).chunk(UPDATES):
            optimizer.zero_grad()
            _loss(method, logits, before, sampled[part], advantages[part]).backward()
            optimizer.step()
    return MOST


def _loss(method: str, logits: Tensor, before: Tensor, sampled: Tensor, advantages: Tensor) -> Tensor:
    rows = torch.Size((len(sampled), ACTIONS))
    old = troll.capture(before.expand(rows), sampled, top_k=ACTIONS, mass_threshold=0.0)
    new = troll.log_probs_at(logits.expand(rows), old.token_ids)
    log_probs = logits.log_softmax(-1)[sampled]
    sequence, counts = torch.arange(len(sampled)), torch.ones(rows, dtype=torch.bool)  # of one action each
    tokens = ScoredTokens(log_probs, old.log_prob, advantages, KL_BOUND, None, old, new, sequence, counts)
    surrogate = SURROGATES[method]
    terms = surrogate.apply(tokens, _Settings(), surrogate.own())
    ratio = torch.exp(tokens.log_ratio if terms.log_ratio is None else terms.log_ratio)
    gain = ratio * advantages
    if surrogate.clips:
        gain = torch.minimum(gain, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return (-gain if terms.penalty is None else terms.penalty - gain).mean()
