"""verl's actor on a CPU, as its worker builds it, and rollouts for it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import shutil
import tempfile
from atexit import register as at_exit
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import response_from_nested

from tests.troll.verl.records import records_of
from troll_lab.runs.toy_model import character_tokenizer

PLUG_IN = ("+troll=fsdp",)

#: A trust region that is reached, and a support that leaves mass outside.
SMALL = ("kl_bound=0.02", "top_k=12", "mass_threshold=1e-3")

ACTOR = "actor_rollout_ref.actor"


def policy_loss(*settings: str) -> list[str]:
    return [f"{ACTOR}.policy_loss.{setting}" for setting in settings]


#: The inference engine's own distributions as the anchor, of a rollout that reports them.
REPORTED = (
    *policy_loss("anchor=rollout"),
    "algorithm.rollout_correction.bypass_mode=true",
    "actor_rollout_ref.rollout.name=transformers",
)


def place(rank: int, world: int, port: int) -> dict[str, str]:
    """What verl's workers read of themselves in their environment."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def saved(model: PreTrainedModel, folder: Path) -> Path:
    """The folder, with a model and a tokenizer of characters."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


#: Of a language model of 24,000 parameters whose distributions are peaked.
SHAPE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.45}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 64}


def peaked_model() -> PreTrainedModel:
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    own = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), tie_word_embeddings=True, **SHAPE, **own))


_parsed: dict[str, Any] = {}


@contextmanager
def parsed_once() -> Iterator[None]:
    """Within this context files of settings are parsed only the first time, which is what takes Hydra its time."""
    load = OmegaConf.load

    def load_once(file: Any) -> Any:
        name = getattr(file, "name", file)
        if name not in _parsed:
            _parsed[name] = load(file)
        return copy.deepcopy(_parsed[name])

    with mock.patch.object(OmegaConf, "load", load_once):
        yield


def composed(model: Path, *overrides: str) -> DictConfig:
    """verl's own configuration, of its Hydra files, for any engine that trains a tiny model on a CPU."""
    with parsed_once(), initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            overrides=[
                "algorithm.adv_estimator=grpo",
                "trainer.device=cpu",
                "trainer.n_gpus_per_node=1",
                "data.train_batch_size=12",
                f"actor_rollout_ref.model.path={model}",
                "actor_rollout_ref.model.enable_gradient_checkpointing=false",
                f"{ACTOR}.optim.lr=3e-3",
                f"{ACTOR}.optim.total_training_steps=10",
                f"{ACTOR}.ppo_mini_batch_size=4",
                f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
                "actor_rollout_ref.rollout.n=1",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
                *overrides,
            ],
        )


def configuration(model: Path, *overrides: str, plug_in: Sequence[str] = PLUG_IN) -> DictConfig:
    """`composed` for the FSDP engine."""
    return composed(
        model,
        "model_engine=dp",
        *plug_in,
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"{ACTOR}.strategy=fsdp2",
        f"+{ACTOR}.fsdp_config.mixed_precision={{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}}",
        f"{ACTOR}.fsdp_config.use_torch_compile=false",
        f"{ACTOR}.use_torch_compile=false",
        *overrides,
    )


@dataclass(frozen=True, eq=False)
class Sample:
    """A prompt, its response, and which response tokens count."""

    prompt: Tensor
    response: Tensor
    mask: Tensor
    advantages: Tensor

    @property
    def input_ids(self) -> Tensor:
        return torch.cat([self.prompt, self.response])


def rollout(n: int = 12, seed: int = 1) -> list[Sample]:
    """Samples of different lengths; every third of several turns, whose middle the policy did not write."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for number in range(n):
        prompt, response = (
            torch.randint(3, 99, (int(torch.randint(low, high, (), generator=generator)),), generator=generator)
            for low, high in ((2, 7), (1, 8))
        )
        mask = torch.ones(len(response), dtype=torch.long)
        if number % 3 == 0:
            mask[1:3] = 0
        advantage = torch.randn((), generator=generator)
        samples.append(Sample(prompt, response, mask, advantage.expand(len(response)).clone()))
    return samples


def nested(tensors: Iterable[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(list(tensors), layout=torch.jagged)


def as_batch(samples: Sequence[Sample], temperature: float = 1.0, **fields: Sequence[Tensor]) -> TensorDict:
    """What v1's agent loop puts into the transfer queue, with further fields of the response tokens."""
    masks = nested(sample.mask for sample in samples)
    tensors = {
        "input_ids": nested(sample.input_ids for sample in samples),
        "position_ids": nested(torch.arange(len(sample.input_ids)) for sample in samples),
        "prompts": nested(sample.prompt for sample in samples),
        "responses": nested(sample.response for sample in samples),
        "response_mask": masks,
        "loss_mask": masks.clone(),
        "advantages": nested(sample.advantages for sample in samples),
        **{name: nested(values) for name, values in fields.items()},
    }
    return tu.get_tensordict(tensors, {"temperature": temperature})


@dataclass
class Step:
    """One update: the network before it, and its gradient on the whole mini-batch, before it is clipped."""

    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor]


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


@dataclass
class Actor:
    """What verl's `ActorRolloutRefWorker` makes of the actor, and the calls that its v1 trainer makes."""

    config: DictConfig
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.actor = actor = self._settings()
        model = omega_conf_to_dataclass(self.config.actor_rollout_ref.model)
        rollout = self.config.actor_rollout_ref.rollout
        actor.model_config = model
        parts = {"engine_config": actor.engine, "optimizer_config": actor.optim, "checkpoint_config": actor.checkpoint}
        worker = TrainingWorkerConfig(model_type="language_model", model_config=model, **parts)
        engine = worker.engine_config
        engine.use_dynamic_bsz = actor.use_dynamic_bsz
        engine.infer_max_token_len_per_gpu = rollout.log_prob_max_token_len_per_gpu
        engine.infer_micro_batch_size_per_gpu = rollout.log_prob_micro_batch_size_per_gpu
        engine.max_token_len_per_gpu = actor.ppo_max_token_len_per_gpu
        engine.micro_batch_size_per_gpu = actor.ppo_micro_batch_size_per_gpu
        engine.use_remove_padding = model.use_remove_padding
        self.worker = TrainingWorker(config=worker)
        self.worker.reset()
        self.worker.set_loss_fn(partial(ppo_loss, config=actor))
        self.engine = self.worker.engine
        self._optimizer_step = self.engine.optimizer_step
        self.engine.optimizer_step = self._recorded_step
        self._initial = [_local(p).clone() for p in self._own_parameters()]
        self._configured = {f.name: getattr(actor, f.name) for f in dataclasses.fields(actor)}

    def reset(self, **changes: Any) -> Actor:
        """The network and its optimizer as they were built; and other settings, of the actor or of its trust region."""
        for parameter, value in zip(self._own_parameters(), self._initial, strict=True):
            _local(parameter).copy_(value)
        optimizer = self.engine.optimizer
        for each in getattr(optimizer, "chained_optimizers", [optimizer]):  # of Megatron's
            each.state.clear()
        optimizer.zero_grad()
        self.steps.clear()
        settings = self._configured["policy_loss"]
        own = {f.name for f in dataclasses.fields(settings)}
        settings = dataclasses.replace(settings, **{name: changes.pop(name) for name in own & changes.keys()})
        for name, value in (self._configured | changes | {"policy_loss": settings}).items():
            object.__setattr__(self.actor, name, value)
        if hasattr(self.engine, "trust_region"):
            self.engine.trust_region = settings
            if (self.engine.kl_target or settings.kl_target) is not None:
                self.begin_schedule()
        return self

    def begin_schedule(self) -> None:
        """Replaces verl's scheduler, and with a KL target ours around it."""
        scheduler = self.engine._build_lr_scheduler(self.engine.optimizer)
        self.engine.lr_scheduler = self.engine.checkpoint_manager.lr_scheduler = scheduler

    @property
    def final_norm(self) -> torch.nn.Module:
        return self.engine.module.model.norm

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.engine.optimizer

    def _settings(self) -> Any:
        return omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)

    def _own_parameters(self) -> list[torch.nn.Parameter]:
        return list(self.engine.module.parameters())

    def _recorded_step(self) -> float:
        self.steps.append(Step(self.parameters(), self._gradients()))
        return self._optimizer_step()

    def _gradients(self) -> dict[str, Tensor]:
        with self._whole_parameters():
            return {name: _whole(p.grad) for name, p in self._named_parameters() if p.grad is not None}

    def parameters(self) -> dict[str, Tensor]:
        with self._whole_parameters():
            return {name: _whole(value) for name, value in self._named_parameters()}

    def _named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, parameter in self.engine.module.named_parameters():
            yield name.replace("_fsdp_wrapped_module.", ""), parameter

    def _whole_parameters(self) -> AbstractContextManager[None]:
        """FSDP 1 shards parameters without a trace in their type."""
        module = self.engine.module
        return FSDP.summon_full_params(module, with_grads=True) if isinstance(module, FSDP) else nullcontext()

    def infer(self, batch: TensorDict, **options: Any) -> TensorDict:
        """A pass without gradient; None where another process of the model's returns it."""
        batch = batch.copy()
        lengths = batch["input_ids"].offsets().diff().tolist()
        tu.assign_non_tensor(batch, **{"compute_loss": False, "global_token_num": lengths, **options})
        return self.worker.infer_batch(batch)

    def score(self, batch: TensorDict) -> TensorDict:
        """The batch with its old log-probabilities, and what else the pass returned, as it comes out of the queue."""
        return with_scores(batch, self.infer(batch, calculate_entropy=True))

    def update(self, batch: TensorDict, mini_batch: int = 4, **options: Any) -> Mapping[str, Any]:
        """The updates of one rollout; verl's metrics, a list each."""
        batch = batch.copy()
        entropy = self.actor.calculate_entropy or self.actor.entropy_coeff != 0
        defaults: dict[str, Any] = {"global_batch_size": mini_batch, "mini_batch_size": mini_batch}
        defaults |= {"epochs": 1, "seed": 3, "calculate_entropy": entropy, "dataloader_kwargs": {"shuffle": False}}
        tu.assign_non_tensor(batch, **(defaults | options))
        output = self.worker.train_mini_batch(batch)
        return {} if output is None else tu.get(output, "metrics")


def captured(engine: Any, batch: TensorDict) -> list[Tensor]:
    """The old policies that an engine keeps of a batch, as a record for each sequence."""
    return records_of(engine.old_policies.of(batch), batch["responses"].offsets().diff().tolist())


def with_scores(batch: TensorDict, scores: TensorDict) -> TensorDict:
    """A copy of the batch with what v1's trainer makes of a pass's results."""
    batch = batch.copy()
    batch["old_log_probs"] = response_from_nested(scores["log_probs"], batch["response_mask"])
    return batch


@functools.cache
def model_folder() -> Path:
    folder = Path(tempfile.mkdtemp())
    at_exit(shutil.rmtree, folder, ignore_errors=True)
    return saved(peaked_model(), folder)


def in_this_process(config: DictConfig) -> Actor:
    with mock.patch.dict(os.environ, place(0, 1, get_free_port())):
        return Actor(config)


@functools.cache
def single(*overrides: str, plug_in: Sequence[str] = PLUG_IN) -> Actor:
    """An actor in this process by itself; `Actor.reset` it before use, since all tests share it."""
    return in_this_process(configuration(model_folder(), *overrides, plug_in=plug_in))


def trolled(packed: bool = True, *overrides: str) -> Actor:
    padding = f"actor_rollout_ref.model.use_remove_padding={packed}"
    return single(padding, *policy_loss(*SMALL), *overrides).reset()
