"""The sampling engine's policy as the centre of the trust region, from the log-probabilities that it reports."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from troll.huggingface.policies import spread
from troll.trl.config import TrollConfig
from troll.trl.old_policy import OLD_POLICY, OldPolicyCapture
from troll.trl.sampling import NO_TRUNCATION
from troll.trl.seam import Scores, add_metrics, allow_log_probs, logprobs_mode, loss_mask, restricted
from troll.trust_region.policy.packed import PackedPolicy
from troll.trust_region.policy.top import capture_top

#: The keys that a rollout function returns next to TRL's, in the format of `VLLMGeneration.generate`.
TOP_LOG_PROBS, TOP_TOKEN_IDS = "top_logprobs", "top_logprob_token_ids"

#: The number that vLLM's server writes for minus infinity, which JSON lacks.
IMPOSSIBLE = -9999.0

#: The largest row number: TRL may keep them in float32, which holds integers exactly up to here.
MOST_ROWS = 2**24

#: [completion][token][entry], as engines return log-probabilities and token ids; None where there are none.
Entries = Sequence[Sequence[Sequence[Any] | None]]


class EngineTopLogprobs:
    """The log-probabilities that an engine reports in one rollout: a row for each sampled token.

    TRL carries one number for each token, meant for its log-prob, through dialogues with tools, and cuts and joins
    these numbers like the tokens. During a rollout this number is the token's row in this table, counted from 1. Row 0
    is for tokens of tools, tokens with missing entries, and tokens that the engine reports as impossible.

    Plainer ways fail: TRL has no room for K entries of a token, drops what else an engine returns, and makes a
    tensor of the numbers before any method that we override gets them. Which of an engine's tokens TRL kept, and where
    it put them, cannot be told from the tokens: they repeat.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drops the reports of the last rollout."""
        # By row: the entries of each token, and its own log-probability.
        self._log_probs: list[Sequence[float]] = [()]
        self._token_ids: list[Sequence[int]] = [()]
        self._sampled = [0.0]

    def add(
        self, completion_ids: Sequence[Sequence[int]], top_log_probs: Entries, top_token_ids: Entries
    ) -> list[list[int]]:
        """Adds sampled tokens, and returns the row of each, 0 for an unreported token: [completion][token].

        Args:
            completion_ids: [completion][token], the sampled tokens.
            top_log_probs: [completion][token][entry], in any order; None or NaN where unknown.
            top_token_ids: [completion][token][entry], the token of each log-probability.

        Raises:
            ValueError: If the lists do not fit each other, or a sampled token is not among its entries.
        """
        sizes = [[len(tokens) for tokens in each] for each in (completion_ids, top_log_probs, top_token_ids)]
        if sizes[1] != sizes[0] or sizes[2] != sizes[0]:
            raise ValueError(
                f"{TOP_LOG_PROBS} and {TOP_TOKEN_IDS} must have one list for each of the {sizes[0]} tokens of the "
                f"completions, got {sizes[1]} and {sizes[2]}"
            )
        completions = zip(completion_ids, top_log_probs, top_token_ids, strict=True)
        return [[self._row(*token) for token in zip(*each, strict=True)] for each in completions]

    def _row(self, sampled: int, log_probs: Sequence[float] | None, token_ids: Sequence[int] | None) -> int:
        """Adds a sampled token, and returns its row; 0 if an entry is unknown, or the token is impossible."""
        log_probs, token_ids = log_probs or (), token_ids or ()
        if not log_probs or None in log_probs or any(map(math.isnan, log_probs)):
            return 0
        if len(token_ids) != len(log_probs) or sampled not in token_ids:
            raise ValueError(
                f"{TOP_TOKEN_IDS} must name the token of each of {len(log_probs)} entries, the sampled token {sampled} "
                f"among them, got {list(token_ids) or None}"
            )
        own = log_probs[token_ids.index(sampled)]
        if own <= IMPOSSIBLE:  # nothing samples the impossible, and no ratio has it as a denominator
            return 0
        if len(self._sampled) > MOST_ROWS:
            raise ValueError(f'anchor="rollout" takes at most {MOST_ROWS} tokens a rollout and process')
        self._log_probs.append(log_probs)
        self._token_ids.append(token_ids)
        self._sampled.append(own)
        return len(self._sampled) - 1

    def log_probs(self, rows: Tensor) -> Tensor:
        """Log-probs in nats of the sampled tokens in `rows`, of any shape; 0 for row 0, as TRL has it for tools."""
        return torch.tensor(self._sampled)[rows.cpu()].to(rows.device)

    def policies(
        self,
        rows: Tensor,
        completion_ids: Tensor,
        mask: Tensor,
        *,
        vocab_size: int,
        top_k: int,
        mass_threshold: float,
        truncated: bool = False,
    ) -> list[PackedPolicy]:
        """One policy for each completion; positions outside of the mask keep no slot.

        A token in row 0 gets all the mass, and `tool_mask` has to leave it out.

        Args:
            rows: (B, T), the tokens' rows.
            completion_ids: (B, T), the tokens.
            mask: (B, T), 1 for the tokens of the completions.
            vocab_size: V of the model.
            top_k: K of `capture_top`.
            mass_threshold: δ of `capture_top`.
            truncated: Whether the engine reports all tokens that it could sample, as `capture_top` takes them.
        """
        sizes = torch.tensor([len(entries) for entries in self._log_probs])
        used = torch.arange(max(1, int(sizes.max()))) < sizes.unsqueeze(-1)
        table_ids, table = torch.full(used.shape, -1), torch.full(used.shape, -math.inf)
        # numpy reads long lists many times faster than torch.
        table_ids[used] = torch.from_numpy(np.fromiter(chain.from_iterable(self._token_ids), np.int64))
        table[used] = torch.from_numpy(np.fromiter(chain.from_iterable(self._log_probs), np.float32))
        table[table <= IMPOSSIBLE] = -math.inf
        device = rows.device
        rows, completion_ids, mask = rows.cpu(), completion_ids.cpu(), mask.cpu()
        log_probs = self.log_probs(rows)  # 0 without a report: all the mass, on a token that the loss leaves out
        packed: list[PackedPolicy] = []
        for row, ids, sampled, scored in zip(rows, completion_ids, log_probs, mask.bool(), strict=True):
            policy = capture_top(
                table_ids[row[scored]],
                table[row[scored]],
                ids[scored],
                sampled[scored],
                vocab_size,
                top_k=top_k,
                mass_threshold=mass_threshold,
                truncated=truncated,
            )
            packed.append(spread(PackedPolicy.of(policy), scored.unsqueeze(0)))
        return PackedPolicy.cat(packed).to(device).unbind()


def report_top_log_probs(generation: Any, number: int, reports: EngineTopLogprobs) -> None:
    """Makes TRL's `VLLMGeneration` request the log-probs of the `number` most likely tokens, and record them.

    `generate` still returns one entry for each token, which is now the token's row. TRL treats the first entry as the
    sampled token's, although vLLM's first entry is that of the most likely token.
    """
    generation.logprobs = number
    generate = generation.generate

    @functools.wraps(generate)
    def generate_and_report(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        prompt_ids, completion_ids, log_probs, token_ids = generate(*args, **kwargs)
        got = {
            len(entries)
            # `[[[]]]` counts as 0 entries.
            for completion in ([[[]]] if log_probs is None else log_probs)
            for entries in completion
            if entries is not None
        }
        if min(got, default=number) < max(number, 1):
            raise ValueError(
                f'anchor="rollout" asked vLLM for {number} log-probabilities a token, and it returned {min(got)}: '
                "check its max_logprobs, or set a smaller support_top_k"
            )
        rows = reports.add(completion_ids, log_probs, token_ids)
        of_each = [[[[x] for x in completion] for completion in values] for values in (rows, completion_ids)]
        return prompt_ids, completion_ids, *of_each

    generation.generate = generate_and_report


def reporting_rollout_func(
    rollout_func: Callable[..., dict[str, Any]], reports: EngineTopLogprobs
) -> Callable[..., dict[str, Any]]:
    """Wraps a TRL rollout function that returns top log-probs: its `logprobs` become rows (see EngineTopLogprobs).

    The function returns `top_logprobs` and `top_logprob_token_ids`, which the reward functions do not get, and need not
    return `logprobs`. If it passes on the `logprobs` of `trainer.vllm_generation.generate`, which are rows of a table
    here, with 0 for tokens of an environment, it needs neither of these.
    """

    @functools.wraps(rollout_func)
    def reporting(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        output = dict(rollout_func(prompts, trainer))
        top_log_probs, top_token_ids = output.pop(TOP_LOG_PROBS, None), output.pop(TOP_TOKEN_IDS, None)
        if top_log_probs is not None and top_token_ids is not None:
            return output | {"logprobs": reports.add(output["completion_ids"], top_log_probs, top_token_ids)}
        numbers = chain.from_iterable(output.get("logprobs") or [])
        rows = [x for x in numbers if x]  # 0 and None mean unreported, as for the tokens of an environment
        if not rows or not all(isinstance(x, int) for x in rows):  # log-probs are floats, rows are not
            raise ValueError(
                f'with anchor="rollout", rollout_func must return {TOP_LOG_PROBS} and {TOP_TOKEN_IDS} next to '
                f"completion_ids, each [completion][token][entry], got {', '.join(sorted(output))}"
            )
        return output

    return reporting


class RolloutAnchor(OldPolicyCapture):
    """The engine's policy as the old one, for `anchor="rollout"`; every method runs on every process.

    It wraps the trainer's rollout function, and vLLM's `generate`.

    Raises:
        ValueError: If the configuration cannot report log-probs, on every process; names the settings that can.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        args = trainer.args
        self._vocab_size = trainer.model.config.get_text_config().vocab_size
        self.reports, self._rows = EngineTopLogprobs(), torch.empty(0, dtype=torch.int64)
        check_rollout_source(args, has_rollout_func=trainer.rollout_func is not None, has_tools=bool(trainer.tools))
        check_sampling(args)
        if args.use_vllm:
            # A surrogate that does not read policies needs only the sampled token, which vLLM always returns.
            reads = args.reads_policies or args.diagnostics_steps
            number = min(args.support_top_k, self._vocab_size) if reads else 0
            allow_log_probs(trainer.vllm_generation, number)
            check_engine(logprobs_mode(trainer.vllm_generation))
            report_top_log_probs(trainer.vllm_generation, number, self.reports)
        if trainer.rollout_func is not None:
            trainer.rollout_func = reporting_rollout_func(trainer.rollout_func, self.reports)

    def start(self) -> None:
        """Overrides the parent: TRL's scoring is replaced even if only the sampled tokens' log-probs are needed."""
        super().start()
        self.expects_scoring = self._trainer.model.training and self._args.scores_rollouts
        self.reports.clear()

    def score(self, score: Any, model: Any, ids: Tensor, mask: Tensor, length: int, *rest: Any, **named: Any) -> Scores:
        """Overrides the parent: no pass, since the engine has scored the completions."""
        self.expects_scoring = False
        placeholder = ids.new_zeros((len(ids), length), dtype=torch.float32)  # `added_to` replaces it
        return Scores(placeholder, None, None)

    def read(self, rolled_out: dict[str, Any]) -> dict[str, Any]:
        """Overrides the parent: replaces the tokens' rows in a rollout by their log-probs."""
        if "sampling_per_token_logps" not in rolled_out:
            return rolled_out
        self._rows = rolled_out["sampling_per_token_logps"].nan_to_num(0.0).long()
        return rolled_out | {"sampling_per_token_logps": self.reports.log_probs(self._rows)}

    def added_to(self, rolled_out: dict[str, Any]) -> dict[str, Any]:
        """Overrides the parent: the engine's log-probs are the old policy's; tokens without a report are masked.

        The share of such tokens over all processes is logged as `sampling/unreported_fraction`.
        """
        known, mask = (self._rows > 0).to(rolled_out["completion_mask"]), loss_mask(rolled_out)
        accelerator = self._trainer.accelerator
        trained, sampled = accelerator.reduce(torch.stack([(mask * known).sum(), mask.sum()]), reduction="sum").tolist()
        add_metrics(self._trainer, {"sampling/unreported_fraction": (sampled - trained) / max(sampled, 1)})
        if trained < sampled:
            rolled_out = restricted(accelerator, rolled_out, known)
        rolled_out = rolled_out | {"old_per_token_logps": rolled_out["sampling_per_token_logps"]}
        if self._wanted:
            policies = self.reports.policies(
                self._rows,
                rolled_out["completion_ids"],
                rolled_out["completion_mask"],
                vocab_size=self._vocab_size,
                top_k=self._args.support_top_k,
                mass_threshold=self._args.mass_threshold,
                truncated=self._args.truncation is not None,
            )
            rolled_out = rolled_out | {OLD_POLICY: policies}
        self.reports.clear()
        return rolled_out


def check_rollout_source(args: TrollConfig, *, has_rollout_func: bool, has_tools: bool) -> None:
    """Raises ValueError unless all tokens are generated by something that reports log-probs."""
    if not args.use_vllm and not has_rollout_func:
        raise ValueError(
            'anchor="rollout" needs an engine that returns its log-probabilities: set use_vllm=True, or pass a '
            f'rollout_func that returns {TOP_LOG_PROBS} and {TOP_TOKEN_IDS}; or leave anchor at "old"'
        )
    if not args.use_vllm and has_tools:
        raise ValueError(
            'anchor="rollout" with tools needs use_vllm=True: without it, the turns after a tool call are generated by '
            "transformers, which returns no log-probabilities"
        )


def check_sampling(args: TrollConfig) -> None:
    """Raises ValueError unless the engine's log-probs are those of the policy at its temperature, or of its kept set.

    They are those of the distribution from which it samples, so the trust region would be around a truncated one, which
    is supported on a kept set only: see `truncated_ratio`.
    """
    for name, neutral in NO_TRUNCATION.items():
        value = getattr(args, name)
        if args.truncation is None and value not in (*neutral, None):
            raise ValueError(
                f'anchor="rollout" needs tokens sampled from the policy itself, and {name}={value!r} changes the '
                f"distribution: set {name}={neutral[-1]!r}"
            )


def check_engine(mode: str) -> None:
    """Raises ValueError unless an engine's log-probs are those of the distribution that it samples from.

    vLLM itself refuses a request for more log-probs than its `max_logprobs`.

    Args:
        mode: The engine's `logprobs_mode`.
    """
    if mode != "processed_logprobs":
        raise ValueError(
            f'anchor="rollout" needs log-probabilities at the sampling temperature, and the engine returns {mode}: '
            "start the vLLM server with --logprobs-mode processed_logprobs"
        )
