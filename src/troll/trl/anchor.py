"""The rollout's own policy as the centre of the trust region: what the engine that sampled the tokens says of them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from torch.nn.functional import pad

from troll.trl.config import TrollConfig
from troll.trust_region.policy.packed import PackedPolicy
from troll.trust_region.policy.top import capture_top

#: What a rollout function returns besides TRL's keys, in the format of `VLLMGeneration.generate`.
TOP_LOG_PROBS, TOP_TOKEN_IDS = "top_logprobs", "top_logprob_token_ids"

#: Settings of vLLM's sampling that change the distribution, and the values with which they do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0, None),
    "top_k": (0, -1, None),
    "min_p": (0.0, None),
    "repetition_penalty": (1.0, None),
    "presence_penalty": (0.0, None),
    "frequency_penalty": (0.0, None),
    "min_tokens": (0, None),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "logits_processors": (None, []),
    "structured_outputs": (None,),
    "vllm_structured_outputs_regex": (None,),
}

#: The log-prob of a sampled token of which the engine said nothing: it is masked, so any finite policy serves.
PLACEHOLDER = math.log(0.5)


class ReportedLogProb(float):
    """The log-prob of a sampled token, and with it the top of the distribution that it was sampled from.

    TRL keeps the log-probs of sampled tokens in lists of floats, which it cuts, and joins over the turns of a dialogue
    with tools. As a float, this goes along and stays with its token.

    Attributes:
        token_ids: Up to N + 1 tokens: the N likeliest, and the sampled one.
        log_probs: Theirs, in nats.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]

    def __new__(cls, log_prob: float, token_ids: Sequence[int], log_probs: Sequence[float]) -> ReportedLogProb:
        """See the class."""
        reported = super().__new__(cls, log_prob)
        reported.token_ids, reported.log_probs = token_ids, log_probs
        return reported

    def __getnewargs__(self) -> tuple[float, Sequence[int], Sequence[float]]:  # type: ignore[override]
        return float(self), self.token_ids, self.log_probs


def reported_log_probs(
    completion_ids: Sequence[Sequence[int]],
    top_log_probs: Sequence[Sequence[Sequence[float | None] | None]],
    top_token_ids: Sequence[Sequence[Sequence[int] | None]],
) -> list[list[float]]:
    """The sampled tokens' log-probs, found by their ids among those that an engine returned.

    Args:
        completion_ids: [completion][token].
        top_log_probs: [completion][token][entry], in any order; None or NaN for what the engine does not know.
        top_token_ids: [completion][token][entry].

    Returns:
        [completion][token]: a `ReportedLogProb`; or NaN where the engine does not know all entries, has none, or says
        that the token was impossible.

    Raises:
        ValueError: If the lists do not fit each other, or a sampled token is not among its entries.
    """
    sizes = [
        [len(completion) for completion in completions]
        for completions in (completion_ids, top_log_probs, top_token_ids)
    ]
    if sizes[1] != sizes[0] or sizes[2] != sizes[0]:
        raise ValueError(
            f"{TOP_LOG_PROBS} and {TOP_TOKEN_IDS} must have one list for each of the {sizes[0]} tokens of the "
            f"completions, got {sizes[1]} and {sizes[2]}"
        )
    return [
        [_reported(*token) for token in zip(*completion, strict=True)]
        for completion in zip(completion_ids, top_log_probs, top_token_ids, strict=True)
    ]


def _reported(token_id: int, log_probs: Sequence[float | None] | None, token_ids: Sequence[int] | None) -> float:
    if not log_probs or None in log_probs or math.isnan(sum(log_probs)):  # type: ignore[arg-type]
        return math.nan
    if token_ids is None or len(token_ids) != len(log_probs) or token_id not in token_ids:
        raise ValueError(
            f"{TOP_TOKEN_IDS} must name the token of each of {len(log_probs)} entries, the sampled token {token_id} "
            f"among them, got {token_ids}"
        )
    log_prob: Any = log_probs[token_ids.index(token_id)]
    # Nothing samples the impossible, and no ratio has it as a denominator.
    return math.nan if log_prob == -math.inf else ReportedLogProb(log_prob, token_ids, log_probs)  # type: ignore[arg-type]


def report_top_log_probs(generation: Any, number: int) -> None:
    """Lets a `trl.generation.vllm_generation.VLLMGeneration` ask for more log-probs than TRL wants, and carry them.

    `generate` still returns one entry for each token, and now it is a `ReportedLogProb`, or NaN. TRL takes the first
    entry for the sampled token's; of vLLM's own, it is the likeliest token's.

    Args:
        generation: Changed in place.
        number: N, of the likeliest tokens.
    """
    generation.logprobs = number
    generate = generation.generate

    @functools.wraps(generate)
    def reporting_generate(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        prompt_ids, completion_ids, log_probs, token_ids = generate(*args, **kwargs)
        reported = reported_log_probs(completion_ids, log_probs, token_ids)
        return (
            prompt_ids,
            completion_ids,
            [[[log_prob] for log_prob in completion] for completion in reported],
            [[[token_id] for token_id in completion] for completion in completion_ids],
        )

    generation.generate = reporting_generate


def reporting_rollout_func(rollout_func: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """A TRL rollout function whose `logprobs` are `ReportedLogProb`, of one that returns the top log-probs beside.

    They are in `top_logprobs` and `top_logprob_token_ids`, which do not go on to the reward functions, and `logprobs`
    itself is not needed. A function that hands on the `logprobs` of ``trainer.vllm_generation.generate`` needs neither.
    """

    @functools.wraps(rollout_func)
    def reporting(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        output = dict(rollout_func(prompts, trainer))
        top_log_probs, top_token_ids = output.pop(TOP_LOG_PROBS, None), output.pop(TOP_TOKEN_IDS, None)
        if top_log_probs is not None and top_token_ids is not None:
            completion_ids = output["completion_ids"]
            return output | {"logprobs": reported_log_probs(completion_ids, top_log_probs, top_token_ids)}
        log_probs = output.get("logprobs") or []
        if not any(isinstance(log_prob, ReportedLogProb) for completion in log_probs for log_prob in completion):
            raise ValueError(
                f'with anchor="rollout", rollout_func must return {TOP_LOG_PROBS} and {TOP_TOKEN_IDS} beside '
                f"completion_ids, each [completion][token][entry], got {', '.join(sorted(output))}"
            )
        return output

    return reporting


@dataclass(frozen=True)
class ReportedRollout:
    """What an engine reported of the completions of one rollout on one process.

    Attributes:
        completion_ids: [completion][token].
        reported: [completion][token]: a `ReportedLogProb`, or another float where the engine reported nothing.
        tool_mask: [completion][token]: 1 for what is trained on; None for everything. Tokens without a report are not.
        sampled: How many tokens were sampled from the model, rather than written by a tool.
        unreported: How many of these have no report.
    """

    completion_ids: list[list[int]]
    reported: list[list[float]]
    tool_mask: list[list[int]] | None
    sampled: int
    unreported: int

    @classmethod
    def read(
        cls, completion_ids: list[list[int]], log_probs: list[list[float]], tool_mask: list[list[int]] | None
    ) -> ReportedRollout:
        """Of what ``GRPOTrainer._generate`` returns, with `ReportedLogProb` among the log-probs."""
        by_model = tool_mask if tool_mask is not None else [[1] * len(ids) for ids in completion_ids]
        trained = [
            [int(on and isinstance(log_prob, ReportedLogProb)) for on, log_prob in zip(*completion, strict=True)]
            for completion in zip(by_model, log_probs, strict=True)
        ]
        sampled = sum(map(sum, by_model))
        unreported = sampled - sum(map(sum, trained))
        return cls(completion_ids, log_probs, trained if unreported else tool_mask, sampled, unreported)

    @property
    def log_probs(self) -> list[list[float]]:
        """[completion][token], in nats; 0, as TRL has it for tools, where the engine reported nothing."""
        return [
            [float(log_prob) if isinstance(log_prob, ReportedLogProb) else 0.0 for log_prob in completion]
            for completion in self.reported
        ]

    def padded_log_probs(self, length: int, device: torch.device) -> Tensor:
        """`log_probs`, (B, T) with T = `length`; 0 beyond a completion."""
        rows = [completion + [0.0] * (length - len(completion)) for completion in self.log_probs]
        return torch.tensor(rows, device=device)

    def policies(
        self, length: int, device: torch.device, *, vocab_size: int, top_k: int, mass_threshold: float
    ) -> list[PackedPolicy]:
        """One policy for each completion, of T = `length` positions; those beyond the completion keep no slot.

        A token without a report has a policy that says nothing, for `tool_mask` to leave out.

        Args:
            length: T.
            device: Where to.
            vocab_size: V of the model.
            top_k: K.
            mass_threshold: δ.
        """
        packed = []
        for token_ids, reported in zip(self.completion_ids, self.reported, strict=True):
            token_log_probs = [x if isinstance(x, ReportedLogProb) else PLACEHOLDER for x in reported]
            policy = PackedPolicy.of(
                capture_top(
                    *_entries(reported),
                    torch.tensor(token_ids, dtype=torch.int64),
                    torch.tensor(token_log_probs, dtype=torch.float32),
                    vocab_size,
                    top_k=top_k,
                    mass_threshold=mass_threshold,
                )
            )
            beyond = (0, length - len(token_ids))
            per_position = {name: pad(getattr(policy, name), beyond) for name in ("counts", "tail_log_prob", "slot")}
            packed.append(dataclasses.replace(policy, **per_position))  # type: ignore[arg-type]
        return PackedPolicy.stack(packed).to(device).unbind()


def _entries(reported: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Ids and log-probs of one completion, (T, M) each; a token without a report has no entries."""
    entries: list[tuple[Sequence[int], Sequence[float]]] = [
        (log_prob.token_ids, log_prob.log_probs) if isinstance(log_prob, ReportedLogProb) else ((), ())
        for log_prob in reported
    ]
    width = max([1, *(len(ids) for ids, _ in entries)])
    ids = [[*ids, *[-1] * (width - len(ids))] for ids, _ in entries]
    log_probs = [[*values, *[-math.inf] * (width - len(values))] for _, values in entries]
    shape = (len(entries), width)
    return torch.tensor(ids, dtype=torch.int64).view(shape), torch.tensor(log_probs, dtype=torch.float32).view(shape)


def prepare_anchor(trainer: Any) -> None:
    """Makes the generation of a `GRPOTrainer` report what ``anchor="rollout"`` needs.

    Args:
        trainer: With a `TrollConfig`, and set up. Its rollout function and vLLM's `generate` are wrapped.

    Raises:
        ValueError: On a configuration that cannot report it, with what to set instead; on every process.
    """
    check_rollout_source(trainer.args, has_rollout_func=trainer.rollout_func is not None, has_tools=bool(trainer.tools))
    check_sampling(trainer.args)
    if trainer.args.use_vllm:
        # A surrogate that does not read policies makes do with the sampled token, of which 0 more are asked for.
        reads = trainer.surrogate.reads_policies(trainer.args) or trainer.args.diagnostics_steps
        number = min(trainer.args.support_top_k, vocabulary_size(trainer.model)) if reads else 0
        check_engine(engine_settings(trainer.vllm_generation), number, trainer.vllm_generation.mode)
        report_top_log_probs(trainer.vllm_generation, number)
    if trainer.rollout_func is not None:
        trainer.rollout_func = reporting_rollout_func(trainer.rollout_func)


def vocabulary_size(model: Any) -> int:
    """V of the language model in a model."""
    return int(model.config.get_text_config().vocab_size)


def check_rollout_source(args: TrollConfig, *, has_rollout_func: bool, has_tools: bool) -> None:
    """Raises ValueError unless something that reports log-probs generates all tokens."""
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
    """Raises ValueError on sampling from anything but the policy at its temperature.

    The engine's log-probs are those of what it samples from, after truncation and penalties, and the trust region would
    be around that.
    """
    options: dict[str, Any] = dict(args.generation_kwargs or {})  # type: ignore[arg-type]
    settings = {name: getattr(args, name) for name in NEUTRAL if hasattr(args, name)} | options
    for name, value in settings.items():
        if name in NEUTRAL and value not in NEUTRAL[name]:
            raise ValueError(
                f'anchor="rollout" needs tokens sampled from the policy itself, and {name}={value!r} makes it another '
                f"distribution: set {name}={NEUTRAL[name][0]!r}"
            )
    if options.get("temperature", args.temperature) != args.temperature:
        raise ValueError(
            f'anchor="rollout" needs one temperature, got {args.temperature} and {options["temperature"]} in '
            "generation_kwargs: set it as temperature alone"
        )
    if "logprobs" in options:
        raise ValueError('anchor="rollout" sets logprobs to support_top_k itself: leave it out of generation_kwargs')


def engine_settings(generation: Any) -> dict[str, Any]:
    """`logprobs_mode` and `max_logprobs` of the vLLM engine behind a `VLLMGeneration`, on every process."""
    names = ("logprobs_mode", "max_logprobs")
    if generation.mode == "colocate":
        config = generation.llm.llm_engine.model_config
        return {name: getattr(config, name) for name in names}
    answers: list[Any] = [None]
    if generation.accelerator.is_main_process:  # which alone has a client; the others wait for its answer
        try:
            config = generation.vllm_client.get_server_info()["model_config"]
            answers = [{name: config[name] for name in names}]
        except Exception as error:
            answers = [f"{type(error).__name__}: {error}"]
    broadcast_object_list(answers, from_process=0)
    if not isinstance(answers[0], dict):
        raise ValueError(
            'anchor="rollout" needs a vLLM server that tells logprobs_mode and max_logprobs (VLLM_SERVER_DEV_MODE=1), '
            f"and asking for them failed: {answers[0]}"
        )
    return answers[0]


def check_engine(settings: dict[str, Any], number: int, mode: str) -> None:
    """Raises ValueError unless an engine returns so many log-probs, of what it samples from.

    Args:
        settings: See `engine_settings`.
        number: N.
        mode: "server" or "colocate".
    """
    if settings["logprobs_mode"] != "processed_logprobs":
        raise ValueError(
            'anchor="rollout" needs log-probabilities at the sampling temperature, and the engine returns '
            f"{settings['logprobs_mode']}: start the vLLM server with --logprobs-mode processed_logprobs"
        )
    cap = settings["max_logprobs"]
    if cap == -1 or cap >= number:
        return
    remedy = f"start the vLLM server with --max-logprobs -1, or set support_top_k={cap}"
    if mode == "colocate":
        remedy = (
            f'TRL has no setting for a colocated engine, so set support_top_k={cap}, or vllm_mode="server" with a '
            "server started with --logprobs-mode processed_logprobs --max-logprobs -1"
        )
    raise ValueError(
        f'anchor="rollout" needs {number} log-probabilities a token, and the engine has at most {cap}: {remedy}'
    )
