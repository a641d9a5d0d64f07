"""Everything private of TRL that we touch: what it is for, and that it has the shape we rely on.

TRL's hooks are methods whose names begin with an underscore, and they change between versions. So what counts is not a
version number but the shape of each: at import, this looks at every method's parameters and at the names that its code
uses, and says what is missing. Nothing else in `troll.trl` names anything of TRL that is not public.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

import torch
import trl
from accelerate.utils import broadcast_object_list
from torch import Tensor
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import utils


@dataclass(frozen=True)
class Needed:
    """A method of TRL's trainer that we override, call or rely on.

    Attributes:
        name: Of the method.
        purpose: What we need it for.
        parameters: That it has to take, by name.
        uses: Names, attributes and dictionary keys that its code has to contain.
    """

    name: str
    purpose: str
    parameters: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()


#: What a micro-batch holds besides token ids and masks that the model's forward takes, for a batch as a whole.
MODEL_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "pixel_attention_mask",
    "spatial_shapes",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)

#: All parameters of ``_get_per_token_logps_and_entropies``.
SCORING = (
    "self",
    "model",
    "input_ids",
    "attention_mask",
    "logits_to_keep",
    "batch_size",
    "compute_entropy",
    "compute_aux_loss",
    "num_images",
    "num_tiles",
    *MODEL_INPUTS,
)

OVERRIDDEN = (
    Needed(
        "_generate_and_score_completions",
        "a rollout, to which the old policy and other advantages are added",
        parameters=("inputs",),
        uses=(
            "_generate",
            "_get_per_token_logps_and_entropies",
            "_calculate_rewards",
            "old_per_token_logps",
            "sampling_per_token_logps",
            "ref_per_token_logps",
            "completion_mask",
            "advantages",
            "num_items_in_batch",
            "_logs",
        ),
    ),
    Needed(
        "_calculate_rewards",
        "the rewards of all processes, for advantage estimators and evaluations",
        parameters=("inputs", "prompts", "completions", "completion_ids_list"),
    ),
    Needed(
        "_get_per_token_logps_and_entropies",
        "scoring completions, where the old policy is captured and the new one's scores are handed in",
        parameters=("model", "input_ids", "attention_mask", "logits_to_keep", "compute_entropy", "compute_aux_loss"),
        uses=("labels", "fused_lm_head", "log_probs", "entropy", "aux_loss"),
    ),
    Needed(
        "_compute_loss",
        "the loss, of a micro-batch in which the old log-probabilities are shifted",
        parameters=("model", "inputs"),
        uses=(
            "_get_per_token_logps_and_entropies",
            "old_per_token_logps",
            "sampling_per_token_logps",
            "advantages",
            "epsilon_low",
            "epsilon_high",
            "beta",
            "use_bias_correction_kl",
            "importance_sampling_level",
            "current_gradient_accumulation_steps",
            "num_items_in_batch",
            "aux_loss_enabled",
        ),
    ),
    Needed("_save_checkpoint", "checkpoints that say whether they are complete", parameters=("model", "trial")),
)

RELIED_ON = (
    Needed(
        "__init__",
        "what the trainer keeps",
        parameters=("model", "reward_funcs", "args"),
        uses=("_metrics", "_logs", "reward_func_names", "reward_weights", "reward_processing_classes", "rollout_func"),
    ),
    Needed("_prepare_inputs", "when a rollout is made", uses=("_step", "_buffered_inputs", "num_iterations")),
    Needed("log", "that our metrics are averaged and logged with TRL's", uses=("_metrics", "_logs")),
    Needed("_generate", "further rounds of generation", parameters=("prompts",), uses=("completion_ids", "num_tokens")),
    Needed("_log_completion_extra", "what reward functions log of completions", uses=("_pending_extra_logs",)),
    Needed("_log_metric", "what reward functions log of rollouts", uses=("_pending_metrics",)),
)

#: Of TRL's `VLLMGeneration`.
ENGINE = (
    Needed("__init__", "log-probabilities of the likeliest tokens", uses=("logprobs", "mode")),
    Needed("_init_vllm", "the settings of the engine", uses=("llm", "vllm_client")),
    Needed("generate", "what the engine reports", parameters=("prompts", "images", "num_generations")),
)

#: Of `trl.trainer.utils`, which is not part of TRL's documented interface. TRL 1.14 has no fused head.
FUNCTIONS = (
    "add_fused_lm_head",
    "FusedCausalLMOutput",
    "disable_dropout_in_model",
    "get_callable_name",
    "get_config_model_id",
    "nanstd",
)


def differences(trainer: type = GRPOTrainer, engine: type = VLLMGeneration, functions: Any = utils) -> Iterator[str]:
    """What is different in TRL from what the seam needs, a sentence for each; nothing if it fits.

    Args:
        trainer: `GRPOTrainer`, or another class in its place.
        engine: `VLLMGeneration`, or another class in its place.
        functions: `trl.trainer.utils`, or another module in its place.
    """
    of_trainer = ((trainer, needed) for needed in (*OVERRIDDEN, *RELIED_ON))
    for owner, needed in (*of_trainer, *((engine, needed) for needed in ENGINE)):
        place = f"{owner.__name__}.{needed.name} ({needed.purpose})"
        method = getattr(owner, needed.name, None)
        if method is None:
            yield f"{place} is missing"
            continue
        method = inspect.unwrap(method)
        parameters, names = inspect.signature(method).parameters, set(_names(method.__code__))
        yield from (f"{place} has no parameter {name}" for name in needed.parameters if name not in parameters)
        yield from (f"{place} does not use {name}" for name in needed.uses if name not in names)
        if (
            needed.name == "_get_per_token_logps_and_entropies"
        ):  # what we do not know, the new policy would not be given
            yield from (f"{place} has a new parameter {name}" for name in parameters if name not in SCORING)
    for name in FUNCTIONS:
        if not callable(getattr(functions, name, None)):
            yield f"trl.trainer.utils.{name} is missing"
    if getattr(functions, "_ChunkedLogProbFunction", True) is None:
        yield "its fused head could not be imported, which takes Triton in TRL 1.15 (pip install triton)"


def _names(code: CodeType) -> Iterator[str]:
    """Names, attributes and strings of a function, and of those inside it."""
    yield from code.co_names
    yield from code.co_varnames
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        for text in constant if isinstance(constant, (tuple, frozenset)) else (constant,):
            if isinstance(text, str):
                yield text


def check() -> None:
    """Raises ImportError unless the installed TRL fits."""
    missing = list(differences())
    if missing:
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ImportError(
            f"troll.trl builds on TRL 1.15 and 1.16, and TRL {trl.__version__} is another: {missing[0]}{more}. "
            'Install one of these: pip install "trl>=1.15,<1.17"'
        )


class Scores(NamedTuple):
    """What ``_get_per_token_logps_and_entropies`` returns of a micro-batch.

    Attributes:
        log_probs: Of the completions' tokens, (B, T), raw; 0 where none was scored.
        entropies: (B, T); None if they were not asked for.
        aux_loss: The router's loss of a mixture of experts; None without.
    """

    log_probs: Tensor
    entropies: Tensor | None
    aux_loss: Tensor | None


def score(trainer: Any, model: Any, inputs: dict[str, Any], batch_size: int | None = None) -> Scores:
    """TRL's scoring of a micro-batch, as its own loss asks for it; of a rollout, `batch_size` sequences at a time."""
    ids, mask = sequences(inputs)
    images = {name: inputs.get(name) for name in (*MODEL_INPUTS, "num_images", "num_tiles") if name in inputs}
    scores = GRPOTrainer._get_per_token_logps_and_entropies(
        trainer,
        model,
        ids,
        mask,
        inputs["completion_ids"].shape[1],
        batch_size,
        compute_entropy=True,
        compute_aux_loss=trainer.aux_loss_enabled,
        **images,
    )
    return Scores(*scores)


def sequences(batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask of prompts and completions, (B, P + T)."""
    ids, mask = (torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], 1) for name in ("ids", "mask"))
    return ids, mask


def model_inputs(trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """What the model's forward takes of a whole micro-batch, and the request for its router's loss."""
    ids, mask = sequences(batch)
    images = {name: batch[name] for name in MODEL_INPUTS if batch.get(name) is not None}
    router = {"output_router_logits": True} if trainer.aux_loss_enabled else {}
    return {"input_ids": ids, "attention_mask": mask, **images, **router}


def loss_mask(batch: dict[str, Any]) -> Tensor:
    """The tokens that the policy chose, (B, T)."""
    mask: Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


def scoring_function(log_probs_of: Callable[..., Tensor]) -> Callable[..., Any]:
    """What TRL may call in place of the model to score some sequences of a rollout.

    Args:
        log_probs_of: Takes `labels` (B, L) and what the model's forward takes; returns log-probabilities of the labels
            from the second on, (B, L − 1).
    """

    def score(*, fused_lm_head: bool, **inputs: Any) -> utils.FusedCausalLMOutput:
        return utils.FusedCausalLMOutput(log_probs=log_probs_of(**inputs))

    return score


def add_metrics(trainer: Any, metrics: dict[str, float]) -> None:
    """Has TRL log some numbers of training with its own, the next time that it logs."""
    for name, value in metrics.items():
        trainer._metrics["train"][name].append(value)


def replace_metrics(trainer: Any, metrics: dict[str, float]) -> None:
    """Puts other numbers where TRL has just put its own of the last rollout."""
    for name, value in metrics.items():
        trainer._metrics["train"][name][-1] = value


@dataclass
class Completions:
    """Completions that one process has sampled, and the rewards of those of all processes.

    Attributes:
        examples: The data set's row of each, (n).
        output: What TRL's `_generate` returned: lists with an entry for each completion, and values about all of them.
        extras: What reward functions have logged of each, by column, (n).
        rewards: (N, F) of all processes and reward functions.
    """

    examples: list[dict[str, Any]]
    output: list[Any]
    extras: list[dict[str, Any]]
    rewards: Tensor

    def _columns(self) -> list[list[Any]]:
        size = len(self.examples)
        own = [entry for entry in self.output if isinstance(entry, list) and len(entry) == size]
        return [self.examples, *own, self.extras]

    def __getitem__(self, place: int) -> list[Any]:
        """All that belongs to one completion, but its rewards."""
        return [column[place] for column in self._columns()]

    def __setitem__(self, place: int, completion: list[Any]) -> None:
        for column, value in zip(self._columns(), completion, strict=True):
            column[place] = value


def sample(trainer: Any, examples: list[dict[str, Any]]) -> Completions:
    """Has TRL generate completions, one for each example of this process, and compute their rewards."""
    prompts = [example["prompt"] for example in examples]
    output = list(trainer._generate(prompts))
    completion_ids, completions = output[1], output[3]
    rewards = trainer._calculate_rewards(examples, prompts, completions, completion_ids)
    pending = {name: values for name, values in trainer._pending_extra_logs.items() if len(values) == len(examples)}
    extras = [{name: values[i] for name, values in pending.items()} for i in range(len(examples))]
    trainer._pending_extra_logs.clear()
    return Completions(list(examples), output, extras, rewards)


@contextmanager
def unlogged(trainer: Any) -> Iterator[None]:
    """Keeps what is generated meanwhile out of TRL's metrics, except for the number of tokens."""
    kept = trainer._metrics["train"], trainer._pending_metrics
    before = [{name: list(values) for name, values in metrics.items()} for metrics in kept]
    try:
        yield
    finally:
        tokens = kept[0]["num_tokens"]
        for metrics, values in zip(kept, before, strict=True):
            metrics.clear()
            metrics.update(values)
        kept[0]["num_tokens"] = tokens


@contextmanager
def sampled(trainer: Any, completions: Completions) -> Iterator[None]:
    """Lets TRL take these completions and their rewards where it would generate and compute some."""
    for extra in completions.extras:
        for name, value in extra.items():
            trainer._pending_extra_logs[name].append(value)
    output, rewards = tuple(completions.output), completions.rewards
    with _replaced(trainer, _generate=lambda *_: output, _calculate_rewards=lambda *_: rewards):
        yield


@contextmanager
def generating_within(trainer: Any, context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Has TRL generate completions within a context of its own; what it does with them is outside."""
    generate = trainer._generate

    def within(*args: Any) -> Any:
        with context():
            return generate(*args)

    with _replaced(trainer, _generate=within):
        yield


@contextmanager
def _replaced(trainer: Any, **methods: Callable[..., Any]) -> Iterator[None]:
    before = {name: vars(trainer)[name] for name in methods if name in vars(trainer)}
    vars(trainer).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(trainer)[name]
        vars(trainer).update(before)


def replace_logged_advantages(trainer: Any, advantages: Tensor) -> None:
    """Puts the advantages of a whole rollout, (N,), where TRL has just put its own for the table of completions."""
    logged = trainer._logs["advantages"]
    for _ in range(min(len(advantages), len(logged))):
        logged.pop()
    logged.extend(advantages.tolist())


def drop_clip_metrics(trainer: Any) -> None:
    """Removes what TRL says of a clip, which is constant without one."""
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    for name in [name for name in metrics if name.startswith("clip_ratio/")]:
        del metrics[name]


def evaluation_metrics(trainer: Any) -> dict[str, list[float]]:
    """What TRL has collected of the evaluation under way: a list of its batches' values by name."""
    metrics: dict[str, list[float]] = trainer._metrics["eval"]
    return metrics


def micro_batches_done(trainer: Any) -> int:
    """Forward-backward passes since training began."""
    return int(trainer._step)


def empty_logs() -> dict[str, Any]:
    """The attribute in which TRL collects its table of completions, without any."""
    logs: dict[str, Any] = {name: [] for name in ("images", "prompt", "completion", "advantages")}
    return {"_logs": logs | {"rewards": defaultdict(list), "extra": defaultdict(list)}}


def sampling_config(trainer: Any) -> tuple[Any, str]:
    """The object that holds the sampling temperature, and the attribute of it that has to be changed for another."""
    return (trainer.vllm_generation, "temperature") if trainer.use_vllm else (trainer, "generation_config")


def engine_settings(generation: Any) -> dict[str, Any]:
    """`logprobs_mode` and `max_logprobs` of the vLLM engine behind a `VLLMGeneration`, on every process."""
    names = ("logprobs_mode", "max_logprobs")
    if generation.mode == "colocate":
        config = generation.llm.llm_engine.model_config
        return {name: getattr(config, name) for name in names}
    answers: list[Any] = [None]
    if generation.accelerator.is_main_process:  # the only one with a client; the others wait for its answer
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


def change_generation(
    generation: VLLMGeneration, number: int, change: Callable[[Any, Any, Any, Any], tuple[Any, ...]]
) -> None:
    """Has vLLM return the log-probabilities of the N likeliest tokens too, and changes what TRL gets of them.

    Args:
        generation: Changed in place.
        number: N.
        change: Of prompt ids, completion ids, log-probabilities and their token ids, [completion][token][entry].
    """
    generation.logprobs = number
    generate = generation.generate

    @functools.wraps(generate)
    def changed(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return change(*generate(*args, **kwargs))

    generation.generate = changed  # type: ignore[method-assign]


get_callable_name = utils.get_callable_name
get_config_model_id = utils.get_config_model_id
disable_dropout_in_model = utils.disable_dropout_in_model
nanstd = utils.nanstd

check()
