"""Rollouts with several conversations per sample, which are all trained on with the last one's advantage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from troll.trl.anchor import RolloutAnchor
from troll.trl.seam import add_metrics, tokenizer_of
from troll_lab.trl import seam

#: The key under which a rollout function returns, for each prompt, the conversations before the last one.
EARLIER = "earlier"


@dataclass(frozen=True)
class Conversation:
    """A prompt of P tokens and its completion of T, which a rollout function returns as a dictionary of these fields.

    Attributes:
        prompt_ids: The token ids of the prompt, (P,).
        completion_ids: The token ids of the completion, (T,), at least one.
        env_mask: 1 for the tokens that the policy chose, (T,); None if it chose all.
        logprobs: The engine's log-probabilities of the completion's tokens, (T,); None without an engine.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    env_mask: list[int] | None = None
    logprobs: list[Any] | None = None

    @property
    def mask(self) -> list[int]:
        """1 for the tokens that the policy chose, (T,)."""
        return [1] * len(self.completion_ids) if self.env_mask is None else self.env_mask


class Conversations:
    """Makes all conversations rows of a rollout; every method runs on every process.

    The n samples of a process become M rows: n last conversations, the only ones that are rewarded; the earlier ones,
    sample by sample; and fillers, which have no token in the loss, so that M is a multiple of `steps_per_generation`
    and the same on all processes.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        # The sample of each row, (M,); None where every sample is one row.
        self._samples: Tensor | None = None

    @contextmanager
    def rollout(self, trainer: Any, example: Mapping[str, Any]) -> Iterator[None]:
        """A context in which TRL uses all conversations of the trainer's rollout function.

        TRL scores all rows, and gives the samples rewards and advantages. Its `num_tokens` and `completions/*` count
        all conversations. If there are earlier conversations, two metrics are added: `conversations/per_sample`, the
        mean number of conversations, and `conversations/filled`, the share of the rows that are fillers. An evaluation
        counts earlier conversations but drops their rows, since nothing is trained on them.

        Args:
            trainer: The `LabTrainer` that makes the rollout, or a copy of it.
            example: A row of its data set.

        Raises:
            ValueError: Within the context, if `earlier` has another form, or is used with images, PPO's critic or an
                engine's policy as the old one.
        """
        self._samples = None
        images = bool({"image", "images"} & example.keys())
        with seam.generated(trainer, lambda output: self._with_earlier(trainer, images, output)):
            yield

    def _with_earlier(self, trainer: Any, images: bool, output: tuple[Any, ...]) -> tuple[Any, ...]:
        """The output of TRL's generation for n prompts, extended to M rows of token ids and their values.

        The texts remain those of the n last conversations, for the reward functions.
        """
        prompts, completions, mask, texts, log_probs, extra, *rest = output
        if EARLIER in extra:
            _refuse(trainer, images)
        size, pad = len(prompts), tokenizer_of(trainer).pad_token_id
        earlier = read(extra.pop(EARLIER, None), size, log_probs is not None)
        nothing = [None] * size
        last = map(Conversation, prompts, completions, mask or nothing, log_probs or nothing)
        rows = [*last, *(each for several in earlier for each in several)]
        ends = {*trainer.eos_token_ids, pad}
        counts = [(len(row.prompt_ids), sum(row.mask), row.completion_ids[-1] in ends) for row in rows]
        processes: list[list[tuple[int, int, bool]]] = gather_object([counts])
        total = [count for each in processes for count in each]
        if len(total) == size * len(processes):
            return output
        training = trainer.model.training
        if training:
            trainer.state.num_input_tokens_seen += sum(n + t for each in processes for n, t, _ in each[size:])
        tokens = {"num_tokens": trainer.state.num_input_tokens_seen}
        seam.replace_metrics(trainer, tokens | completion_metrics([(t, ended) for _, t, ended in total]))
        if not training:
            return output
        multiple = trainer.args.steps_per_generation
        length = -(-max(map(len, processes)) // multiple) * multiple  # rounded up
        fillers = length - len(rows)
        rows += [Conversation([pad], [pad], [0], [0.0])] * fillers
        samples = [*range(size), *(i for i, several in enumerate(earlier) for _ in several), *[0] * fillers]
        self._samples = torch.tensor(samples, device=self._accelerator.device)
        number = len(total) / (size * len(processes))
        filled = 1 - len(total) / (length * len(processes))
        add_metrics(trainer, {"conversations/per_sample": number, "conversations/filled": filled})
        ids = [row.prompt_ids for row in rows], [row.completion_ids for row in rows]
        log_probs = None if log_probs is None else [row.logprobs for row in rows]
        return *ids, [row.mask for row in rows], texts, log_probs, extra, *rest

    def with_sample_advantages(self, rolled_out: dict[str, Any]) -> dict[str, Any]:
        """A rollout of M rows with the (n,) advantages of their samples, (M,)."""
        if self._samples is None:
            return rolled_out
        return rolled_out | {"advantages": rolled_out["advantages"][self._samples]}

    def of_rows(self, values: Tensor) -> Tensor:
        """The value of the sample of each row, (M, ...), from those of the samples, (n, ...)."""
        return values if self._samples is None else values[self._samples]

    def of_samples(self, values: Tensor) -> Tensor:
        """Sums over the conversations of each sample, (n,), from values of the rows, (M,).

        Fillers count as rows of the first sample, and must be 0.
        """
        if self._samples is None:
            return values
        samples = torch.arange(int(self._samples.max()) + 1, device=values.device).unsqueeze(1)
        return torch.where(self._samples == samples, values, 0).sum(1)  # in a fixed order


def read(earlier: Any, size: int, log_probs: bool) -> list[list[Conversation]]:
    """Parses the earlier conversations of each sample that a rollout function has returned.

    Args:
        earlier: A list of dictionaries for each sample; None for no earlier conversations.
        size: n, the number of samples.
        log_probs: Whether the last conversations have an engine's log-probabilities.

    Raises:
        ValueError: If `earlier` has another form; names the sample and the conversation.
    """
    if earlier is None:
        return [[] for _ in range(size)]
    if not isinstance(earlier, Sequence) or len(earlier) != size:
        got = len(earlier) if isinstance(earlier, Sequence) else type(earlier).__name__
        raise ValueError(
            f"rollout_func must return {EARLIER} as a list with an entry for each of {size} prompts, got {got}"
        )
    return [
        [_conversation(each, f"{EARLIER}[{i}][{j}] of rollout_func", log_probs) for j, each in enumerate(several)]
        for i, several in enumerate(earlier)
    ]


def _conversation(given: Any, place: str, log_probs: bool) -> Conversation:
    try:
        # An array or a tensor becomes Python's numbers, which a checkpoint's JSON takes.
        fields: dict[str, Any] = {
            name: None if value is None else list(getattr(value, "tolist", lambda value=value: value)())
            for name, value in given.items()
        }
        found = Conversation(**fields)
    except (AttributeError, TypeError) as error:
        takes = "prompt_ids and completion_ids, and may have env_mask and logprobs"
        raise ValueError(f"{place} must be a dictionary with {takes}, got {given!r}") from error
    if not found.prompt_ids or not found.completion_ids:
        raise ValueError(f"{place} must have at least one token in its prompt and in its completion")
    if log_probs and found.logprobs is None:
        raise ValueError(f"{place} needs logprobs, as the last conversations have them: return them for all, or None")
    for name in ("env_mask", "logprobs"):
        values = getattr(found, name)
        if values is not None and len(values) != len(found.completion_ids):
            raise ValueError(f"{name} of {place} has {len(values)} entries for {len(found.completion_ids)} tokens")
    return found


def completion_metrics(counts: Sequence[tuple[int, bool]]) -> dict[str, float]:
    """TRL's `completions/*` metrics, from the length in tokens of each completion and whether it has ended."""
    metrics = {"completions/clipped_ratio": 1 - fmean(ended for _, ended in counts)}
    for infix, lengths in (("", [t for t, _ in counts]), ("terminated_", [t for t, ended in counts if ended] or [0])):
        for name, of in (("mean", fmean), ("min", min), ("max", max)):
            metrics[f"completions/{name}_{infix}length"] = float(of(lengths))
    return metrics


def _refuse(trainer: Any, images: bool) -> None:
    """Raises ValueError with features that do not support more rows than samples."""
    if images:
        raise ValueError(f"rollout_func cannot return {EARLIER} where the data have images: leave one of them out")
    if trainer.critic is not None:
        raise ValueError(
            f'advantage_estimator="gae" takes no {EARLIER} of rollout_func: its critic has no values between '
            "conversations; choose group, rloo, reinforce_plus_plus or reinforce_plus_plus_baseline"
        )
    estimator = trainer.args.own_estimator
    if estimator is not None and estimator.of_tokens is not None:
        raise ValueError(
            f'advantage_estimator="{trainer.args.advantage_estimator}" takes no {EARLIER} of rollout_func: its rewards '
            "are those of one completion's tokens; choose group, rloo, reinforce_plus_plus or "
            "reinforce_plus_plus_baseline"
        )
    if isinstance(trainer.old_policy, RolloutAnchor):
        raise ValueError(
            f'anchor="rollout" takes no {EARLIER} of rollout_func: an engine reports its policy for the last '
            'conversations only; choose anchor="old"'
        )
