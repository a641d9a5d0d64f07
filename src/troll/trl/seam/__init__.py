"""All private names of TRL and transformers that we use; `needed` checks at import that they fit.

`TrollTrainer` also overrides some private methods, which `needed` checks too, and two modules read a private attribute
of a configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import GenerationConfig
from transformers.generation import GenerationMode
from transformers.trainer_utils import has_length
from trl import GRPOTrainer
from trl.trainer import utils

from troll.trl.seam.needed import MODEL_INPUTS, differences, refuse
from troll.trust_region.optimizer import set_rates

refuse(differences())

FusedCausalLMOutput = utils.FusedCausalLMOutput
get_config_model_id = utils.get_config_model_id


class Scores(NamedTuple):
    """The result of `_get_per_token_logps_and_entropies` for a micro-batch.

    Attributes:
        log_probs: Raw log-probabilities of the completions' tokens, (B, T); 0 where a token was not scored.
        entropies: The entropy of each token's distribution in nats, (B, T); None if it was not requested.
        aux_loss: The router's load-balancing loss of a mixture of experts, a scalar; None for other models.
    """

    log_probs: Tensor
    entropies: Tensor | None
    aux_loss: Tensor | None


def score(trainer: Any, model: Any, inputs: dict[str, Any]) -> Scores:
    """Scores a micro-batch with TRL's scoring, as TRL's loss does."""
    return _scored(trainer, model, inputs, compute_entropy=True, compute_aux_loss=trainer.aux_loss_enabled)


def _scored(trainer: Any, model: Any, inputs: dict[str, Any], **asked: Any) -> Scores:
    ids, mask = sequences(inputs)
    images = {name: inputs.get(name) for name in (*MODEL_INPUTS, "num_images", "num_tiles") if name in inputs}
    length = inputs["completion_ids"].shape[1]
    # Not the trainer's own method, which captures the old policy.
    return Scores(*GRPOTrainer._get_per_token_logps_and_entropies(trainer, model, ids, mask, length, **asked, **images))


def tokenizer_of(trainer: Any) -> Any:
    """The trainer's tokenizer; that of its processor, where it has images."""
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)


def prompt_ids(trainer: Any, prompts: list[Any]) -> list[list[int]]:
    """Token ids of text prompts, as TRL passes them to generation."""
    return trainer._tokenize_prompts(prompts)[0]


def sequences(batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask of prompts and completions, (B, P + T)."""
    ids, mask = (torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], 1) for name in ("ids", "mask"))
    return ids, mask


def model_inputs(trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the model's forward for a whole micro-batch, including the request for the router's loss."""
    ids, mask = sequences(batch)
    images = {name: batch[name] for name in MODEL_INPUTS if batch.get(name) is not None}
    router = {"output_router_logits": True} if trainer.aux_loss_enabled else {}
    return {"input_ids": ids, "attention_mask": mask, **images, **router}


def name_experts(trainer: Any) -> None:
    """Gives a mixture's configuration the name `num_experts`, which TRL's fused head reads for the routers' loss.

    A mixture of no experts, such as Granite's dense models, has no such loss, with which TRL would fail.
    """
    config: Any = trainer.model.config.get_text_config()
    if not trainer.aux_loss_enabled:
        return
    if not hasattr(config, "num_experts") and hasattr(config, "num_local_experts"):
        # A second name for it, as other configurations have. It is not saved, as another attribute would be.
        type(config).attribute_map = {**type(config).attribute_map, "num_experts": "num_local_experts"}
    trainer.aux_loss_enabled = getattr(config, "num_experts", None) != 0


def loss_mask(batch: dict[str, Any]) -> Tensor:
    """The tokens that the policy chose, (B, T)."""
    mask: Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


def restricted(accelerator: Accelerator, rolled_out: dict[str, Any], kept: Tensor) -> dict[str, Any]:
    """A rollout whose loss leaves out the tokens with a 0 in `kept`, which broadcasts to (B, T)."""
    mask = rolled_out.get("tool_mask", torch.ones_like(rolled_out["completion_mask"]))
    rolled_out = rolled_out | {"tool_mask": mask * kept}
    tokens = accelerator.reduce(loss_mask(rolled_out).sum(), reduction="sum")
    return rolled_out | {"num_items_in_batch": tokens.to(rolled_out["num_items_in_batch"])}


@torch.no_grad()
def reference_log_probs(trainer: Any, rolled_out: dict[str, Any]) -> Tensor:
    """The reference model's log-probabilities of a rollout's completions, (B, T), as TRL computes them."""
    model: Any = trainer.ref_model
    adapted: AbstractContextManager[Any] = nullcontext()
    if model is None:  # with PEFT, the model itself without its adapter, or with the one that it began with
        model, policy = trainer.model, trainer.accelerator.unwrap_model(trainer.model)
        adapted = utils.use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None)
    with adapted:
        return _scored(trainer, model, rolled_out, batch_size=trainer.args.per_device_train_batch_size).log_probs


def add_metrics(trainer: Any, metrics: dict[str, float]) -> None:
    """Adds these training metrics to those that TRL logs next."""
    for name, value in metrics.items():
        trainer._metrics["train"][name].append(value)


def completions(trainer: Any, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]] | None]:
    """Calls TRL to generate a completion of each prompt, as token ids; with `logprobs` if there is an engine."""
    return trainer._generate_single_turn(prompts, None, {}, 1)


def replace_logged_advantages(trainer: Any, advantages: Tensor) -> None:
    """Replaces the advantages that TRL has just put into its table of completions, by those of a rollout, (N,)."""
    logged = trainer._logs["advantages"]
    for _ in range(min(len(advantages), len(logged))):
        logged.pop()
    logged.extend(advantages.tolist())


def drop_clip_metrics(trainer: Any) -> None:
    """Removes TRL's metrics of its clip, which are constant without a clip."""
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    for name in [name for name in metrics if name.startswith("clip_ratio/")]:
        del metrics[name]


def rows_of_an_epoch(trainer: Any) -> int | None:
    """The rows that the sampler of the training set draws in an epoch, repetitions included; None if it has no length.

    It leaves out what does not fill a rollout.
    """
    sampler = trainer._get_train_sampler() if has_length(trainer.train_dataset) else None
    return len(sampler) if has_length(sampler) else None


def micro_batches_done(trainer: Any) -> int:
    """Forward-backward passes since training began."""
    return int(trainer._step)


def write_rates(scheduler: LambdaLR) -> None:
    """Writes the learning rates of a scheduler's current step into the optimiser, as `scheduler.step()` would."""
    functions = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    rates = [base * function(scheduler.last_epoch) for base, function in functions]
    set_rates(scheduler.optimizer, rates)
    scheduler._last_lr = rates


def begin_anew(trainer: Any) -> None:
    """Makes TRL begin with a rollout by the current weights, and without what an interrupted training has measured."""
    trainer._step, trainer._buffered_inputs, trainer._last_loaded_step = 0, None, -1
    trainer._current_train_step_time, trainer._entropy_window_stats = 0.0, None
    for left in (*trainer._metrics.values(), trainer._pending_metrics, trainer._pending_extra_logs):
        left.clear()


def skip_epochs(loader: Any, epochs: int) -> None:
    """Makes a training data loader continue after some epochs, in the order of a run that was not interrupted.

    TRL's sampler draws a new order for every epoch, and a resumed run would begin with the first one again.
    """
    while hasattr(loader, "batch_sampler"):  # accelerate's wrappers, down to torch's
        loader = loader.batch_sampler
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, utils.RepeatSampler):  # a stream knows its epoch
        for _ in range(epochs):
            next(iter(sampler), None)


def score_processors(model: Any, config: GenerationConfig) -> set[str]:
    """The names of the classes with which a model's `generate` would change the scores of tokens.

    Args:
        model: A model of transformers or PEFT.
        config: The argument `generation_config` of `generate`; the model's own settings complete it.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    prepared, _ = model._prepare_generation_config(config)
    ids = torch.ones(1, 1, dtype=torch.long)
    processors = model._get_logits_processor(prepared, input_ids_seq_length=1, encoder_input_ids=ids, device="cpu")
    mode = prepared.get_generation_mode()
    return {type(each).__name__ for each in processors} | ({str(mode.value)} - {GenerationMode.SAMPLE.value})


def logprobs_mode(generation: Any) -> str:
    """`logprobs_mode` of the vLLM engine behind a `VLLMGeneration`, on every process."""
    if generation.mode == "colocate":
        return str(generation.llm.llm_engine.model_config.logprobs_mode)
    answers: list[Any] = [None, None]  # the mode, and why there is none
    if generation.accelerator.is_main_process:  # the only one with a client; the others wait for its answer
        try:
            answers[0] = generation.vllm_client.get_server_info()["model_config"]["logprobs_mode"]
        except Exception as error:
            answers[1] = f"{type(error).__name__}: {error}"
    broadcast_object_list(answers, from_process=0)
    mode, failure = answers
    if failure is not None:
        raise ValueError(
            'anchor="rollout" needs a vLLM server that reports its logprobs_mode (VLLM_SERVER_DEV_MODE=1), and asking '
            f"for it failed: {failure}"
        )
    return str(mode)


def engine_vocabulary(generation: Any) -> int | None:
    """The size of the vocabulary of the model in a colocated vLLM; None for a server."""
    if generation.mode != "colocate":
        return None
    return generation.llm.llm_engine.model_config.hf_text_config.vocab_size


def allow_log_probs(generation: Any, number: int) -> None:
    """Raises a colocated vLLM's limit of log-probabilities per token, for which TRL has no setting, to N."""
    if generation.mode == "colocate":
        config = generation.llm.llm_engine.model_config  # read anew for each request; a cap of -1 is none
        config.max_logprobs = max(config.max_logprobs, number) if config.max_logprobs >= 0 else -1


def load_whole_weights(generation: Any) -> None:
    """Makes a colocated vLLM on a CPU load the trained weights as it loads a checkpoint.

    TRL writes into the parameters of vLLM's layers. On a CPU these are empty, since vLLM computes with packed copies.

    Args:
        generation: Its `sync_weights` is replaced, unless the engine is on another device or a server.
    """
    if generation.mode != "colocate" or generation.llm.llm_engine.vllm_config.device_config.device_type != "cpu":
        return

    def sync_weights() -> None:
        # Copies, since PEFT takes its adapters out of the weights before vLLM has read the last of them.
        weights = ((name, weight.detach().clone()) for name, weight in generation._iter_named_params())
        generation.llm.collective_rpc(_load_and_pack, args=(weights,))
        generation.llm.reset_prefix_cache()

    generation.sync_weights = sync_weights


def _load_and_pack(worker: Any, weights: Iterator[tuple[str, Tensor]]) -> None:
    worker.reload_weights(weights_iterator=weights)
    for layer in worker.get_model().modules():
        # A head that shares the embedding's weights has no weights to load, so its packed copy would keep the old ones.
        if hasattr(layer, "cpu_linear") and layer.weight.numel():
            layer.quant_method.process_weights_after_loading(layer)
