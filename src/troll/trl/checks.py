"""Refusals and warnings before training starts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from datasets import Dataset
from transformers.trainer_utils import has_length

from troll.grading import clash
from troll.huggingface.adapters import refuse_merging
from troll.huggingface.dropout import dropout_rates
from troll.huggingface.precision import local_weights, unresolved_share
from troll.huggingface.token_ids import REMEDY, embedding_rows, without_embedding
from troll.trl import seam
from troll.trl.config import TrollConfig
from troll.trl.estimators import ESTIMATORS

#: Every model has a few weights that are too large for a step to change them, such as those of norms. A larger share
#: than this deserves a warning.
MAX_UNRESOLVED = 0.1


def refuse_another_config(args: Any, config: type[TrollConfig]) -> None:
    """Raises TypeError unless a trainer whose configurations are of class `config` reads all settings of `args`."""
    if not isinstance(args, config):
        raise TypeError(f"args must be a {config.__name__}, got {type(args).__name__}: change the name of the class")
    if args.laboratory and not config.laboratory:
        raise TypeError(
            f"args must be a {config.__name__}, got {type(args).__name__}, which has settings that only "
            "troll_lab.trl.LabTrainer reads: use that trainer"
        )


def refuse_misfits(trainer: Any) -> None:
    """Raises ValueError if a trainer's model, engine, data, rewards or reference do not go together."""
    args = trainer.args
    refuse_columns(trainer)
    if args.max_steps <= 0:  # `begin` would be too late: transformers would ask for max_steps first
        refuse_few_prompts(trainer)
    if not ESTIMATORS[args.advantage_estimator].laboratory:
        refuse_rewards_of_tokens(trainer)
    if args.use_vllm:
        refuse_merging(trainer.model, "use_vllm")
        refuse_another_vocabulary(trainer)
    refuse_token_ids(trainer)
    refuse_fewer_tokens("reference model", trainer.ref_model, trainer)
    refuse_an_empty_reference(trainer.accelerator, trainer.ref_model)


def refuse_rewards_of_tokens(trainer: Any) -> None:
    """Raises ValueError if a reward has a method `of_tokens`, which an estimator of whole completions would ignore."""
    named = zip(trainer.reward_funcs, trainer.reward_func_names, trainer.reward_weights.tolist(), strict=True)
    for reward, name, weight in named:
        if weight and hasattr(reward, "of_tokens"):
            raise ValueError(
                f"reward {name!r} has of_tokens, which advantage_estimator {trainer.args.advantage_estimator!r} cannot "
                "use: set its weight in reward_weights to 0, or advantage_estimator to rloo_tokens, "
                "which needs LabConfig and LabTrainer of troll_lab.trl"
            )


def refuse_model_parallelism(trainer: Any) -> None:
    """Raises ValueError unless every process holds whole sequences and whole matrices whenever it computes.

    Processes may share a matrix (accelerate's `tp_size`) or a sequence (its `cp_size`, and DeepSpeed's `sp_size`). TRL
    refuses only the latter, and only where accelerate's `ParallelismConfig` sets it.
    """
    for setting in ("tp_size", "cp_size", "sp_size"):
        size = getattr(trainer, f"get_{setting}")()
        if size > 1:
            raise ValueError(
                f"TrollTrainer cannot be used with {setting}={size}: the trust region reads whole sequences and a "
                f"whole LM head. Set {setting} to 1, and share the model out with FSDP2 or DeepSpeed ZeRO-3"
            )


def refuse_columns(trainer: Any, row: Mapping[str, Any] | None = None) -> None:
    """Raises ValueError if a column of the data has the name of an argument that TRL passes to reward functions.

    `row` is the first of a batch; None stands for the trainer's data sets, if their columns are known before they are
    read.
    """
    if all(isinstance(reward, torch.nn.Module) for reward in trainer.reward_funcs):  # which get no columns
        return
    columns = list(row or ())
    if row is None and not trainer.args.remove_unused_columns:
        columns = [name for data in _data_sets(trainer) for name in getattr(data, "column_names", None) or ()]
    more = ["environments"] if trainer.environment_factories is not None else []
    more += ["rewards", "tokenizer"] if any(hasattr(reward, "of_tokens") for reward in trainer.reward_funcs) else []
    if problem := clash(columns, more):
        raise ValueError(problem)


def refuse_few_prompts(trainer: Any) -> None:
    """Raises ValueError if the training set does not fill a rollout."""
    if seam.rows_of_an_epoch(trainer) == 0:
        raise ValueError(_few_prompts(trainer, f"the training set has {len(trainer.train_dataset)}"))


def refuse_few_rows(trainer: Any) -> None:
    """Raises ValueError if a training, or the evaluations within it, would end without a single batch."""
    refuse_few_prompts(trainer)
    args = trainer.args
    if args.eval_strategy != "no" or args.eval_on_start:
        evaluated = trainer.eval_dataset
        for name, data in evaluated.items() if isinstance(evaluated, dict) else [(None, evaluated)]:
            refuse_no_batch(trainer, data, "eval_dataset" if name is None else f"eval_dataset[{name!r}]")


def refuse_no_step(trainer: Any) -> None:
    """Raises ValueError if a training has ended before its first step, since its stream ended within a rollout."""
    state, streams = trainer.state, seam.rows_of_an_epoch(trainer) is None
    if streams and state.global_step < state.max_steps and not seam.micro_batches_done(trainer):
        raise ValueError(f"training ended without a step: {_few_prompts(trainer, 'the training set has fewer')}")


def refuse_no_batch(trainer: Any, dataset: Any, subject: str = "the evaluation set") -> None:
    """Raises ValueError if an evaluation on a data set would have no batch; `subject` names it in the error."""
    if not has_length(dataset):
        return
    args, rows = trainer.args, len(dataset)
    batch = args.eval_batch_size * args.world_size if args.dataloader_drop_last else 1
    if rows * trainer.num_generations_eval < batch:
        more = f", fewer than a batch of {batch} completions, which dataloader_drop_last drops" if rows else ""
        raise ValueError(f"{subject} has {rows} rows to evaluate{more}: leave it out, or add rows")


def _few_prompts(trainer: Any, number: str) -> str:
    args = trainer.args
    reused = "updates_per_rollout" if args.updates_per_rollout else "steps_per_generation"
    lower = [name for name in (reused, "per_device_train_batch_size") if getattr(args, name) > 1]
    remedies = [*(f"lower {name} (now {getattr(args, name)})" for name in lower), "add prompts"]
    return (
        f"a rollout takes {args.generation_batch_size // trainer.num_generations} prompts (generation_batch_size / "
        f"num_generations), and {number} to train on: {', or '.join(remedies)}"
    )


def refuse_token_ids(trainer: Any, examples: list[dict[str, Any]] | None = None) -> None:
    """Raises ValueError if the end token, the padding token, or a token of the prompts has no row in the embedding.

    Some tokenizers have tokens that the model lacks (Gemma 3's has one for images), which is harmless as long as they
    do not occur. Text prompts are tokenized here only with such a tokenizer.

    `examples` are the rows of a rollout; None stands for the rows of the data sets that have a length.
    """
    missing: dict[int, str] = trainer.missing_tokens
    if not missing:
        return
    tokenizer, rows = seam.tokenizer_of(trainer), embedding_rows(trainer.model)
    used = dict.fromkeys(
        [tokenizer.pad_token_id, tokenizer.eos_token_id], "which ends completions, or fills up their rows"
    )
    # A processor's prompts have images, and an environment's tools that are known only in a rollout.
    if tokenizer is trainer.processing_class and trainer.environment_factories is None:
        data_sets = [data for data in _data_sets(trainer) if isinstance(data, Dataset)]
        batches = (batch["prompt"] for data in data_sets for batch in data.select_columns("prompt").iter(1000))
        for batch in batches if examples is None else [[example["prompt"] for example in examples]]:
            used |= {number: "which is in the prompts" for ids in seam.prompt_ids(trainer, batch) for number in ids}
    for number in sorted(missing.keys() & used.keys()):
        raise ValueError(
            f"the tokenizer has ids up to {max(missing)}, and the model's embedding has {rows} rows: it lacks "
            f"{missing[number]!r} (id {number}), {used[number]}. To train, {REMEDY}"
        )


def refuse_fewer_tokens(name: str, other: Any, trainer: Any) -> None:
    """Raises ValueError if another model lacks a token of the tokenizer that the trained model reads.

    `name` is the other model in words, for the error; the model may be None.
    """
    if other is None:
        return
    other = trainer.accelerator.unwrap_model(other)
    rows, lacked = embedding_rows(trainer.model), without_embedding(other, seam.tokenizer_of(trainer))
    for number in sorted(lacked.keys() - trainer.missing_tokens.keys()):
        raise ValueError(
            f"the embedding of the {name} has {embedding_rows(other)} rows, and that of the trained model {rows}: it "
            f"lacks {lacked[number]!r} (id {number}) of the tokenizer. Save it with as many, by "
            "resize_token_embeddings, and have it loaded from there"
        )


def refuse_another_vocabulary(trainer: Any) -> None:
    """Raises ValueError if vLLM has read a model with another number of tokens than the trained one."""
    ours = trainer.model.config.get_text_config().vocab_size
    theirs = seam.engine_vocabulary(trainer.vllm_generation)
    if theirs not in (ours, None):
        raise ValueError(
            f"vLLM has read a model of {theirs} tokens from {trainer.vllm_generation.model.name_or_path}, and the "
            f"trained one has {ours}: save it, and have both load it from there"
        )


def _data_sets(trainer: Any) -> list[Any]:
    evaluated = trainer.eval_dataset
    return [trainer.train_dataset, *(evaluated.values() if isinstance(evaluated, dict) else [evaluated])]


def refuse_an_empty_reference(accelerator: Accelerator, reference: Any) -> None:
    """Raises ValueError if a process has zeros for the weights of the reference model; None stands for no model.

    With FSDP2 and `cpu_ram_efficient_loading`, transformers before 5.23 leaves zeros in all processes of a node but the
    first. accelerate sends them the policy's weights, but not the reference's. Every process has to call this.
    """
    if reference is None or not accelerator.is_fsdp2:
        return
    shard = local_weights(reference.get_output_embeddings().weight)
    empty = torch.tensor([shard.numel() > 0 and not shard.any()], device=accelerator.device)
    if accelerator.gather(empty).any():
        raise ValueError(
            "the reference model was loaded by only one process, and the KL to it would be wrong: set "
            "fsdp_cpu_ram_efficient_loading to false in the configuration of accelerate, or install transformers 5.23"
        )


def warn_about_saving(accelerator: Accelerator) -> None:
    """Warns where FSDP will write shards instead of a model, of which transformers says nothing."""
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    if fsdp is not None and "FULL_STATE_DICT" not in str(fsdp.state_dict_type):
        warnings.warn(
            "save_model will write no weights with FSDP's SHARDED_STATE_DICT, and checkpoints will hold only shards: "
            "set fsdp_state_dict_type to FULL_STATE_DICT, or join the shards of the last checkpoint with `accelerate "
            "merge-weights`",
            stacklevel=3,
        )


def warn_about(args: TrollConfig, model: torch.nn.Module) -> None:
    """Warns of settings that are valid, but probably not what the user meant."""
    if args.always_on_policy and args.surrogate != "none":
        warnings.warn(
            f"every update is on-policy, where surrogate {args.surrogate!r} is the identity: old and new policy are "
            "equal. Give each rollout several updates: set updates_per_rollout, or raise steps_per_generation above "
            f"gradient_accumulation_steps (now {args.steps_per_generation} and {args.gradient_accumulation_steps}), or "
            "num_iterations above 1" + (". diagnostics_steps has nothing to measure" if args.diagnostics_steps else ""),
            stacklevel=3,
        )
    lora_dropout = max((getattr(config, "lora_dropout", 0.0) for config in _peft_configs(model)), default=0.0)
    if args.disable_dropout and lora_dropout:
        warnings.warn(
            f"lora_dropout={lora_dropout} is set to 0: dropout changes the policy between scoring and update, and the "
            "trust region would project that noise (disable_dropout=False keeps it)",
            stacklevel=3,
        )
    if not args.disable_dropout and any(dropout_rates(model)):
        warnings.warn(
            "the model has dropout and disable_dropout=False: the policy differs between scoring and update by that "
            "noise, which the trust region projects",
            stacklevel=3,
        )
    updates = args.rollout_steps // math.gcd(args.rollout_steps, args.gradient_accumulation_steps)
    nobody_set = args.save_steps == type(args).__dataclass_fields__["save_steps"].default
    if args.save_strategy == "steps" and args.save_steps >= 1 and args.save_steps % updates and not nobody_set:
        warnings.warn(
            f"save_steps={args.save_steps} is not a multiple of the {updates} updates after which a rollout ends: a "
            "run resumed from the middle of a rollout starts a new one and does not repeat the interrupted run "
            f"exactly. Set save_steps={math.ceil(args.save_steps / updates) * updates}",
            stacklevel=3,
        )
    if args.save_strategy != "no" and args.sync_ref_model:
        warnings.warn(
            "TRL saves no reference model with a checkpoint: with sync_ref_model=True, a resumed run begins with the "
            "first reference again, and does not repeat the interrupted run exactly",
            stacklevel=3,
        )


def warn_about_precision(accelerator: Accelerator, model: torch.nn.Module, learning_rate: float) -> None:
    """Warns where the trained weights have too few bits for a learning rate."""
    sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    if not accelerator.is_main_process or (sharded and accelerator.mixed_precision != "no"):
        return  # sharded weights have float32 copies to train, in any dtype that the model was loaded in
    share = unresolved_share(model, learning_rate)
    if share > MAX_UNRESOLVED:
        warnings.warn(
            f"{share:.0%} of the trained weights are too large for learning_rate={learning_rate:g} in their "
            'dtype: a step is rounded away, and they never move. Load the model with dtype="float32" (in '
            "model_init_kwargs, where the trainer loads it) and compute in bf16 with bf16=True; or train LoRA adapters "
            "in float32",
            stacklevel=3,
        )


def _peft_configs(model: torch.nn.Module) -> list[Any]:
    configs: Any = getattr(model, "peft_config", None)
    return list(configs.values()) if isinstance(configs, dict) else []
