"""Tiny random models of real configurations, a character tokenizer and a data set, all made in code."""

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import PeftConfig, get_peft_model
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from tests.tolerance import rounding, within
from troll.trl import TrollConfig, TrollTrainer
from troll.trust_region.policy.packed import PackedPolicy

SPECIAL_TOKENS = ["<pad>", "<s>", "</s>"]
VOCABULARY = [*SPECIAL_TOKENS, *"abcdefghijklmnopqrstuvwxyz0123456789+-*/=?!.,"]

COMMON: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    # Several tokens end a completion, so that lengths differ.
    "eos_token_id": [2, 3, 4, 5, 6],
}

#: What rounding may do to a log-probability: the longest sums of a network are its MLPs', and logits are 10 at most.
LOG_PROB_ERROR = rounding(COMMON["intermediate_size"], 10)

#: And to a mean of numbers of about 1 that it is the relative error of: the errors within a sum mostly cancel.
MEAN_ERROR = LOG_PROB_ERROR / math.sqrt(COMMON["intermediate_size"])

#: And to a gradient, relative to the largest, of the same log-probabilities: it is added up over the vocabulary.
GRADIENT_ERROR = rounding(len(VOCABULARY))

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "qwen2": {},
    "llama": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "apertus": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0, "sliding_window": 16},
    "granite": {"logits_scaling": 2.0},
    "cohere": {"logit_scale": 0.5},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "router_aux_loss_coef": 0.1,
    },
}


def make_model(architecture: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of about twenty thousand parameters."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(architecture, **{**COMMON, **ARCHITECTURES.get(architecture, {}), **changes})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        # So that a random model has opinions. With tied weights it would repeat its last token.
        model.get_output_embeddings().weight *= 2 if model.config.tie_word_embeddings else 4
    model.generation_config.eos_token_id = COMMON["eos_token_id"]
    return model


def adapted(model: Any, config: PeftConfig, scale: float = 0.05) -> Any:
    """The model with a random adapter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, of tied weights
        made: Any = get_peft_model(model, copy.deepcopy(config)).eval()  # which PEFT changes
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(scale * noise.to(parameter))
    return made


def make_tokenizer(*special: str) -> PreTrainedTokenizerFast:
    """One token per character, and more special ones."""
    ids = {token: i for i, token in enumerate([*VOCABULARY, *special])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    options: dict[str, Any] = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "padding_side": "left"}
    options |= {"additional_special_tokens": [*special]} if special else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def make_dataset(size: int = 16) -> Dataset:
    """Prompts of different lengths."""
    return Dataset.from_dict({"prompt": [f"{'ab' * (i % 3)}{i}+{3 * i}=" for i in range(size)]})


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Differs within a group: an arbitrary value of each token, averaged over the completion."""
    return [sum(token * 7 % 11 for token in ids) / 11 / len(ids) for ids in completion_ids]


#: Two updates per rollout of two groups of four.
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "num_generations": 4,
    "steps_per_generation": 2,
    "max_completion_length": 8,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "max_steps": 4,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "seed": 7,
}


def config(folder: Path, **given: Any) -> TrollConfig:
    """A configuration that is not that of the tests' trainers: on a CPU, and else with the defaults."""
    return TrollConfig(**{"output_dir": str(folder), "report_to": "none", "use_cpu": True, "bf16": False, **given})


#: Of a trainer, without its configuration and its model.
ARGUMENTS = inspect.signature(GRPOTrainer).parameters.keys() - {"args", "model"}


@dataclass
class Maker:
    """Builds trainers of one test."""

    model_path: Callable[[str], Path]
    output_dir: Path
    #: The class of its trainers, where a test names none.
    trainer_class: type[GRPOTrainer] = TrollTrainer

    def model(self, architecture: str = "llama") -> PreTrainedModel:
        """A fresh copy of the tiny model."""
        return AutoModelForCausalLM.from_pretrained(self.model_path(architecture), dtype=torch.float32).train()

    def __call__(
        self,
        trainer_class: type[GRPOTrainer] | None = None,
        model: str | PreTrainedModel = "llama",
        **given: Any,
    ) -> Any:
        """A trainer of the given class, from its arguments and settings.

        Settings of a `TrollConfig` that a `GRPOConfig` lacks are left out for it.
        """
        trainer_class = trainer_class or self.trainer_class
        config_class: Any = trainer_class.config if issubclass(trainer_class, TrollTrainer) else GRPOConfig
        settings = {"disable_dropout": True, "output_dir": str(self.output_dir), **DEFAULTS, **given}
        unknown = TrollConfig.__dataclass_fields__.keys() - config_class.__dataclass_fields__.keys()
        args = config_class(**{k: v for k, v in settings.items() if k not in ARGUMENTS | unknown})
        parts = {"reward_funcs": reward, "train_dataset": make_dataset(), "processing_class": make_tokenizer()}
        parts |= {name: given[name] for name in ARGUMENTS & given.keys() if given[name] is not None}
        return trainer_class(self.model(model) if isinstance(model, str) else model, args=args, **parts)

    def stock(self, model: str | PreTrainedModel = "llama", **settings: Any) -> GRPOTrainer:
        """A `GRPOTrainer` with an infinite clip."""
        trainer = self(GRPOTrainer, model, **settings)
        trainer.epsilon_low = trainer.epsilon_high = torch.inf
        return trainer


def rollout(trainer: Any) -> list[dict[str, Any]]:
    """Generates and scores one rollout, as the training loop does, and returns its micro-batches."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    torch.manual_seed(0)
    trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    return trainer._buffered_inputs


def rolled_out(trainer: Any, seed: int = 0) -> dict[str, Any]:
    """A rollout of this process as the trainer makes it, before TRL shuffles its rows."""
    trainer.model.train()
    torch.manual_seed(seed + trainer.accelerator.process_index)
    return trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))


def move(model: torch.nn.Module, scale: float, seed: int = 1) -> None:
    """Moves every weight by `scale` of its own size, as updates would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(scale * parameter.std(correction=0) * noise)


def loss_and_gradients(trainer: Any, inputs: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of one micro-batch and its gradient by parameter name."""
    trainer.model.train()
    trainer.model.zero_grad()
    trainer._metrics["train"].clear()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), gradients(trainer.model)


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all, by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def changed(before: dict[str, torch.Tensor], model: torch.nn.Module) -> set[str]:
    """The names of the parameters that are no longer what they were."""
    return {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}


def same_policies(ours: list[PackedPolicy], theirs: list[PackedPolicy]) -> list[bool]:
    """Which of the policies are, bit by bit, the others."""
    return [
        all(torch.equal(value, vars(other)[part]) for part, value in vars(one).items() if torch.is_tensor(value))
        for one, other in zip(ours, theirs, strict=True)
    ]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = GRADIENT_ERROR
) -> None:
    """Equal up to `tolerance`, relative to the largest entry of all gradients."""
    assert actual.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 0
    for name, gradient in expected.items():
        error = float((actual[name] - gradient).abs().max()) / largest
        assert error <= within(tolerance), f"{name}: {error:.1e}"


def assert_same_update(ours: Any, theirs: Any, inputs: dict[str, Any]) -> None:
    """Loss and gradients of a micro-batch are the same in both trainers; the metrics are those of this micro-batch."""
    loss, gradients = loss_and_gradients(ours, inputs)
    expected, expected_gradients = loss_and_gradients(theirs, inputs)
    assert loss == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert_same_gradients(gradients, expected_gradients)


def follow(theirs: Any, ours: Any) -> None:
    """Puts a trainer that has no rollout of its own where another one is."""
    theirs.model.load_state_dict(ours.model.state_dict())
    theirs.current_gradient_accumulation_steps = ours.current_gradient_accumulation_steps


def same_updates(ours: Any, theirs: Any, scale: float = 0.15) -> Iterator[dict[str, Any]]:
    """The micro-batches of a rollout of ours, after each of which both have made the same update of moved weights."""
    buffered = rollout(ours)
    move(ours.model, scale)
    follow(theirs, ours)
    for inputs in buffered:
        assert_same_update(ours, theirs, inputs)
        yield inputs


def tensors(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Of a rollout, what a process can leave in a file for a test."""
    return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}


def halved(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with which each of two processes takes half of a rollout."""
    size = settings.get("per_device_train_batch_size", DEFAULTS["per_device_train_batch_size"])
    return settings | {"per_device_train_batch_size": size // 2, "ddp_backend": "gloo"}


def unpadded(batch: dict[str, Any], name: str = "completion") -> list[list[int]]:
    """Token ids of the completions of a rollout, or of its prompts."""
    rows = zip(batch[f"{name}_ids"], batch[f"{name}_mask"].bool(), strict=True)
    return [ids[mask].tolist() for ids, mask in rows]


def group_advantages(rewards: Any, size: int = 4) -> torch.Tensor:
    """GRPO's, (N,)."""
    grouped = torch.as_tensor(rewards).view(-1, size)
    return ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).flatten()


def logged(trainer: Any, key: str) -> list[float]:
    """A metric's values, in the order of the steps."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]


@contextmanager
def no_warnings_about(words: str) -> Iterator[None]:
    """Fails on a warning that contains `words`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{words}")
        yield
