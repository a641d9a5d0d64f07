"""What the sampler of a rollout draws from: the one place that resolves it, whoever has set it; and a call of it.

The ratio is right only if the old policy is the distribution that the tokens were drawn from. So temperature, top-k,
top-p and min-p become part of the old policy, wherever they come from: the fields of `TrollConfig`,
`generation_kwargs`, or the model's `generation_config.json`. Everything else that changes a distribution is refused if
the user asked for it, and switched off for rollouts if only the model's file sets it. Unknown settings count as
changing it.
"""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from accelerate.utils import gather_object
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

from troll.settings import VLLM_LEAST_TEMPERATURE
from troll.trl import seam

FILE = "the model's generation_config.json"

#: The settings that become part of the old policy.
POLICY = ("temperature", "top_k", "top_p", "min_p")

_INERT = """
    max_length max_new_tokens max_tokens max_time stop stop_token_ids ignore_eos repetition_detection
    include_stop_str_in_output early_stopping length_penalty
    pad_token_id bos_token_id eos_token_id decoder_start_token_id
    use_cache cache_config max_cache_len prefill_chunk_size low_memory skip_reading_prefix_cache
    compile_config disable_compile continuous_batching_config
    output_attentions output_hidden_states output_scores output_logits
    logprobs prompt_logprobs flat_logprobs output_kind stream_interval
    detokenize skip_special_tokens spaces_between_special_tokens
    num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold max_matching_ngram_size
    assistant_lookbehind target_lookbehind is_assistant
    renormalize_logits remove_invalid_values seed transformers_version
"""
#: Settings of transformers' generation and of vLLM's sampling that do not change the distribution of the next token.
#: Those of beams and of assistants have no effect without any. `stop_strings` and `return_dict_in_generate` are not
#: among them, since TRL's call of `generate` fails with either.
INERT = frozenset(_INERT.split())

#: The values of other settings, apart from None, that do not change it; the first one is named in errors.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "do_sample": (True,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "min_tokens": (0,),
    "guidance_scale": (1.0,),
    "penalty_alpha": (0.0,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "num_return_sequences": (1,),
    "n": (1,),
    "use_mtp": (False,),
    "token_healing": (False,),
    "return_dict_in_generate": (False,),
    # A quantized cache rounds the keys and values that the next tokens are computed from.
    "cache_implementation": ("dynamic", "paged", *(x for x in ALL_CACHE_IMPLEMENTATIONS if x != "quantized")),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
    "vllm_structured_outputs_regex": (None,),
    "bad_words": (None, []),
    "logits_processors": (None, []),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
}

#: The values that vLLM takes for settings that are None: all tokens are kept.
VLLM_DEFAULTS: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": None}
#: Every value with which a sampler keeps all tokens.
NO_TRUNCATION: dict[str, tuple[Any, ...]] = {"top_k": (-1, 0), "top_p": (1.0,), "min_p": (None, 0.0)}
#: The values that transformers takes for settings that are None in the model's file too.
TRANSFORMERS_DEFAULTS = VLLM_DEFAULTS | {"top_k": 50}

#: The classes of transformers with which the old policy agrees, or that leave a distribution as it is.
KNOWN_PROCESSORS = {
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
}


class RolloutConfig(GenerationConfig):
    """The settings with which transformers generates rollouts: the model's file adds only inert ones."""

    def update(
        self, defaults_only: bool = False, allow_custom_entries: bool = False, **settings: Any
    ) -> dict[str, Any]:
        """Overrides the parent: `generate` fills in what is None from the model's file, then from its defaults."""
        if allow_custom_entries:  # of the file
            settings = {
                name: value
                for name, value in settings.items()
                if value != [] and name not in POLICY and not changes_distribution(name, value)
            }
        return super().update(defaults_only, allow_custom_entries, **settings)


def changes_distribution(name: str, value: Any) -> bool:
    """Whether a setting makes a sampler draw from a distribution that cannot be the old policy."""
    return value is not None and name not in INERT and name not in POLICY and value not in NEUTRAL.get(name, ())


def refuse_other_distributions(asked: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the setting, if one of those that the user asked for changes the distribution."""
    for name, value in asked.items():
        if changes_distribution(name, value):
            remedy = f"set {name}={NEUTRAL[name][0]!r}" if name in NEUTRAL else f"leave {name} out"
            raise ValueError(
                f"{name}={value!r} changes what the sampler draws from, or is not known to leave it as it is, and the "
                f"old policy has to be what it draws from: it can follow temperature, top_k, top_p and min_p only. "
                f"Use these, or {remedy}"
            )


def settle_config(args: Any) -> None:
    """Moves what becomes part of the old policy from `generation_kwargs` to the fields of a `TrollConfig`.

    Raises:
        ValueError: If the rest, or another field, changes what the sampler draws from.
    """
    more: dict[str, Any] = dict(args.generation_kwargs or {})
    for name in POLICY:
        setattr(args, name, more.pop(name, getattr(args, name)))
    args.generation_kwargs = more or None
    fields = ("repetition_penalty", "cache_implementation", "vllm_structured_outputs_regex")
    asked = {name: getattr(args, name) for name in fields} | more
    asked.pop("suppress_tokens", None)  # a vision-language model may have to: `settle_trainer` knows
    refuse_other_distributions(asked)
    if args.temperature is None:
        raise ValueError("temperature must be a number, since the old policy is the one at this temperature")
    if args.use_vllm and args.temperature < VLLM_LEAST_TEMPERATURE:
        raise ValueError(
            f"temperature must be at least {VLLM_LEAST_TEMPERATURE} with vLLM, which samples at no lower one, got "
            f"{args.temperature}"
        )


def settle_trainer(trainer: Any) -> Any:
    """Makes the sampler of a trainer's rollouts draw from what the old policy will be.

    Returns:
        The trainer's configuration, or a copy with the settings that it leaves to the model's file or to the sampler.

    Raises:
        ValueError: If the old policy cannot contain something that the user asked for, or that transformers does; or if
            the model's file sets something that does not go with the configuration.
    """
    args = trainer.args
    if args.samples_as_trl:
        return args
    placeholders = set() if args.use_vllm else placeholder_ids(trainer.model)
    suppressed = (args.generation_kwargs or {}).get("suppress_tokens")
    if not are_among(suppressed, placeholders):
        refuse_other_distributions({"suppress_tokens": suppressed})
    if not args.use_vllm and (ends := trainer.generation_config.eos_token_id):  # of generation_kwargs, or TRL's own
        # TRL keeps a completion up to the first of these, and what `generate` writes after an end was not sampled.
        trainer.eos_token_ids = list(ends) if isinstance(ends, Collection) else [ends]
    # vLLM gets every setting with the request, continuous batching reads no file, and a function of the user's samples
    # as the configuration says.
    without_file = args.use_vllm or args.use_transformers_continuous_batching or trainer.rollout_func is not None
    file = {} if without_file else trainer.model.generation_config.to_dict()
    file = {name: value for name, value in file.items() if value is not None}
    left = [name for name in VLLM_DEFAULTS if getattr(args, name) is None]
    taken = {name: file[name] for name in left if name in file}
    try:
        args = args.with_sampling((VLLM_DEFAULTS if without_file else TRANSFORMERS_DEFAULTS) | taken)
    except ValueError as error:
        if not taken:
            raise
        raise ValueError(f"rollouts are sampled with {_listed(taken)}, from {FILE}, and {error}") from error
    sampler = _sampler(args)
    if args.use_vllm:
        for name, value in (sampler | {"repetition_penalty": 1.0}).items():
            setattr(trainer.vllm_generation, name, value)
        return args
    if are_among(file.get("suppress_tokens"), placeholders):
        sampler["suppress_tokens"] = file["suppress_tokens"]
    _set_generation_config(
        trainer, sampler, KNOWN_PROCESSORS | ({"SuppressTokensLogitsProcessor"} if placeholders else set())
    )
    if trainer.accelerator.is_main_process:
        taken = {name: value for name, value in taken.items() if _sampler(args)[name] not in NO_TRUNCATION[name]}
        off = {k: v for k, v in file.items() if changes_distribution(k, v) and k not in sampler and k[0] != "_"}
        off.pop("do_sample", None)  # rollouts always sample
        _tell(taken, off)
    return args


def _sampler(args: Any) -> dict[str, Any]:
    """What the sampler gets of a settled configuration; transformers takes no integer for a temperature."""
    temperature = float(args.temperature)
    return {"temperature": temperature, "top_k": max(args.top_k, 0), "top_p": args.top_p, "min_p": args.min_p}


def complete(trainer: Any, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]] | None]:
    """Samples a completion of each of N prompts with the trainer's sampling settings; for rollout functions.

    Every process must call it equally often, since the processes share an engine or sharded weights; the numbers of
    prompts may differ, and be 0.

    Args:
        trainer: The second argument of the rollout function.
        prompts: The token ids of this process's prompts.

    Returns:
        The token ids of N completions, each up to its end or of `max_completion_length` tokens; and the engine's
        log-probabilities of these tokens, None without an engine. With `anchor="rollout"` they are numbers to pass on
        unchanged as `logprobs`, not log-probabilities.
    """
    # All processes ask about equally many prompts, since TRL finds its own among a server's answers by their number.
    number = max(1, *gather_object([len(prompts)]))
    filler = [seam.tokenizer_of(trainer).pad_token_id]
    completions, log_probs = seam.completions(trainer, [*prompts, *[filler] * (number - len(prompts))])
    return completions[: len(prompts)], None if log_probs is None else log_probs[: len(prompts)]


def refuse_changes(trainer: Any) -> None:
    """Raises ValueError if a script has changed the sampler since `settle_trainer`: the old policy would not follow."""
    args = trainer.args
    if args.samples_as_trl:
        return
    place = "vllm_generation" if args.use_vllm else "generation_config"
    expected = _sampler(args)
    found = {f"{place}.{name}": getattr(getattr(trainer, place), name) for name in expected}
    found["temperature"] = trainer.temperature  # of the old policy
    for where, value in found.items():
        name = where.rpartition(".")[-1]
        if value != expected[name]:
            raise ValueError(
                f"trainer.{where} was changed to {name}={value!r}, and TrollConfig has {name}={expected[name]!r}: set "
                "it there, before the trainer is made, so that sampler and old policy agree"
            )
    if not args.use_vllm:
        now = {name: value for name, value in vars(trainer.generation_config).items() if not name.startswith("_")}
        if are_among(now.get("suppress_tokens"), placeholder_ids(trainer.model)):
            del now["suppress_tokens"]
        refuse_other_distributions(now)


def _set_generation_config(trainer: Any, sampler: dict[str, Any], known: set[str]) -> None:
    """Makes transformers generate rollouts with these settings of the sampler, and checks what they come to.

    Args:
        trainer: Its `generation_config` is replaced.
        sampler: Some settings. The others are those of TRL and of the user.
        known: The classes of processors that do not need to be refused.
    """
    config = {name: value for name, value in vars(trainer.generation_config).items() if not name.startswith("_")}
    config = {name: value for name, value in config.items() if value != []}  # for which transformers has processors
    trainer.generation_config = RolloutConfig(**config | {"do_sample": True} | sampler)
    if unknown := seam.score_processors(trainer.model, trainer.generation_config) - known:
        raise ValueError(
            f"transformers changes the distribution of this model's tokens by {', '.join(sorted(unknown))}, which the "
            "old policy cannot follow: set use_vllm=True"
        )


def placeholder_ids(model: Any) -> set[int]:
    """The tokens that stand for an image, a video or a sound, and that a model may not write without one."""
    names = (f"{kind}_token_{form}" for kind in ("image", "video", "audio") for form in ("id", "index"))
    ids = (getattr(model.config, name, None) for name in names)
    return {number for number in ids if isinstance(number, int)}


def are_among(tokens: Any, placeholders: set[int]) -> bool:
    """Whether there are tokens, and all are placeholders: the policy gives them next to no probability."""
    return bool(tokens) and isinstance(tokens, Collection) and set(tokens) <= placeholders


def _tell(taken: dict[str, Any], off: dict[str, Any]) -> None:
    told = []
    if taken:
        told.append(f"rollouts are sampled with {_listed(taken)}, which the old policy follows")
    if off:
        told.append(
            f"{_listed(off)} {'is' if len(off) == 1 else 'are'} switched off for rollouts, since the old policy cannot "
            "follow (what is saved with the model stays the same)"
        )
    if told:
        warnings.warn(f"from {FILE}: {'; '.join(told)}", stacklevel=4)


def _listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={reprlib.repr(value)}" for name, value in settings.items())
