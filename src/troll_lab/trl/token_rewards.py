"""Rewards of single tokens: reward functions with a method `of_tokens`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from troll.trl.estimators import combine_rewards
from troll_lab.trl.seam import get_callable_name


class Judged(NamedTuple):
    """The n completions of one process that reward functions have scored.

    Attributes:
        examples: Rows of the data set.
        completions: The completions in the form that reward functions get: texts, or messages.
        completion_ids: The token ids of each completion, without padding.
    """

    examples: Sequence[Mapping[str, Any]]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]

    def columns(self) -> dict[str, Sequence[Any]]:
        """The arguments of a reward function by name, n values each."""
        names = [name for name in self.examples[0] if name not in ("prompt", "completion", "completion_ids")]
        columns: dict[str, Sequence[Any]] = {name: [row[name] for row in self.examples] for name in names}
        columns["prompts"] = [row.get("prompt") for row in self.examples]
        return columns | {"completions": self.completions, "completion_ids": self.completion_ids}


#: The worth of each token of a completion, by the index of the reward function and the index of the completion.
Worths = dict[tuple[int, int], Tensor]


def places_of_token_rewards(reward_funcs: Sequence[Any], weights: Tensor) -> list[int]:
    """The indices of the reward functions with a method `of_tokens`, without those of weight 0."""
    return [
        place
        for place, (reward, weight) in enumerate(zip(reward_funcs, weights.tolist(), strict=True))
        if weight and hasattr(reward, "of_tokens")
    ]


def token_worths(
    reward_funcs: Sequence[Any], places: Sequence[int], rewards: Tensor, judged: Judged, tokenizer: Any
) -> Worths:
    """Calls the method `of_tokens` of reward functions for the completions that they have scored.

    Args:
        reward_funcs: All F functions.
        places: The indices of the functions to call.
        rewards: (n, F), NaN where a completion was not scored.
        judged: The n completions.
        tokenizer: Passed on to the functions.

    Raises:
        ValueError: If a function returns another number of completions or tokens than it was given.
    """
    given: Worths = {}
    for place in places:
        rows = (~rewards[:, place].isnan()).nonzero().flatten().tolist()
        if not rows:
            continue
        columns = {name: [values[row] for row in rows] for name, values in judged.columns().items()}
        found = reward_funcs[place].of_tokens(rewards=rewards[rows, place].tolist(), tokenizer=tokenizer, **columns)
        pairs = list(zip(columns["completion_ids"], found, strict=False))
        wrong = [
            f", {len(own)} for {len(ids)} tokens" for ids, own in pairs if own is not None and len(own) != len(ids)
        ]
        if len(found) != len(rows) or wrong:
            raise ValueError(
                f"of_tokens of reward {get_callable_name(reward_funcs[place])!r} must return None or a number for each "
                f"token of each completion, got {len(found)} for {len(rows)} completions{''.join(wrong[:1])}"
            )
        given |= {
            (place, row): torch.as_tensor(worths)
            for row, worths in zip(rows, found, strict=True)
            if worths is not None and len(worths)
        }
    return given


def all_worths(rewards: Tensor, weights: Tensor, given: Worths, width: int) -> Tensor:
    """The worth of each token, (n, `width`): w_it = Σ_f w_f r_fit over the functions that scored the completion.

    r_fit is the value of function f for token t. If f has no values for the tokens of a completion, and after the
    completion's end, r_fit is r_fi, the reward of the whole completion. Worths are NaN if no function scored it.

    Args:
        rewards: (n, F), NaN where a function returned None.
        weights: (F,), the weights of the functions.
        given: The worths from `token_worths`.
        width: T, at least the length of the longest completion.
    """
    spread = rewards.unsqueeze(1).repeat(1, width, 1)
    for (place, row), worths in given.items():
        spread[row, : len(worths), place] = worths.to(spread)
    return combine_rewards(spread.flatten(0, 1), weights).view(-1, width)
