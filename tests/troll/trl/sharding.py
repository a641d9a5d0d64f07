"""What the back ends of accelerate do differently: how a CPU runs them, and where a whole gradient is found."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from tests.troll.huggingface import heads
from tests.troll.trl import tiny

#: Adapters that are not zero, as new ones would be, have gradients everywhere.
LORA = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)


def fsdp_on_cpu() -> None:
    """accelerate takes FSDP only on devices, though neither it nor torch needs one: calls the CPU a device."""
    original = PartialState.__init__

    def init(self: PartialState, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU
            _make_gloo_average()

    PartialState.__init__ = init


def _make_gloo_average() -> None:
    """Gloo of torch 2.8 adds up where a reduce-scatter asks for the mean: divides, for FSDP2 and for DTensor."""
    size = dist.get_world_size()
    mean = torch.zeros(1)
    dist.reduce_scatter_tensor(mean, torch.ones(size), op=dist.ReduceOp.AVG)
    if mean.item() == 1.0:
        return
    fsdp, dtensor = dist.reduce_scatter_tensor, functional_collectives.reduce_scatter_tensor

    def for_fsdp(output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        fsdp(output, input, dist.ReduceOp.SUM, group)
        output.div_(size if op == dist.ReduceOp.AVG else 1)

    def for_dtensor(tensor: Tensor, reduceOp: str, scatter_dim: int, group: Any) -> Tensor:
        result = dtensor(tensor, "sum", scatter_dim, group)
        return result / size if reduceOp == "avg" else result

    name = "reduce_scatter_tensor"
    setattr(dist, name, for_fsdp)
    setattr(functional_collectives, name, for_dtensor)


def zero_on_cpu() -> None:
    """DeepSpeed leaves what is small whole, and compiles a collective of its own for CPUs: neither, here."""
    import deepspeed
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    DeepSpeedZeroConfig.model_fields["param_persistence_threshold"].default = 0
    DeepSpeedZeroConfig.model_rebuild(force=True)


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether this process now holds only a part of it."""
    return isinstance(parameter, DTensor) or (hasattr(parameter, "ds_tensor") and not parameter.numel())


def whole(tensor: Tensor) -> Tensor:
    """A tensor, or what FSDP2 holds in shards."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the whole trained parameters. Every process has to call it."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            with _gathered(parameter):
                found[name] = whole(parameter.detach()).clone()
    return found


def _gathered(parameter: nn.Parameter) -> Any:
    if not hasattr(parameter, "ds_tensor"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter])


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradient of every parameter that has one. Every process has to call it."""
    if any(hasattr(parameter, "ds_tensor") for parameter in model.parameters()):
        from deepspeed.utils import safe_get_full_grad

        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        return {name: safe_get_full_grad(parameter).clone() for name, parameter in trained.items()}
    return {name: whole(gradient) for name, gradient in tiny.gradients(model).items()}


class KeepGradients(TrainerCallback):
    """What every update was made of."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not args.deepspeed_plugin:
            self.gradients.append(whole_gradients(getattr(model, "module", model)))

    @contextmanager
    def from_deepspeed(self) -> Iterator[None]:
        """DeepSpeed makes the update inside `backward`, before any callback."""
        from deepspeed import DeepSpeedEngine

        step: Callable[..., Any] = DeepSpeedEngine.step

        def keep_and_step(engine: Any, *args: Any, **kwargs: Any) -> Any:
            self.gradients.append(whole_gradients(engine.module))
            return step(engine, *args, **kwargs)

        DeepSpeedEngine.step = keep_and_step
        try:
            yield
        finally:
            DeepSpeedEngine.step = step


def through_heads(name: str, mode: str | None = None) -> dict[str, Tensor]:
    """The gradients of what a model's head says of two sequences, with the head as a shard by itself.

    Each process has one of the sequences; without a mode, one process has both. The loss is their mean.
    """
    unset_hf_deepspeed_config()  # of an earlier trainer, which would have the model made in shards
    model, inputs = heads.MODELS[name](), heads.batch()
    run, backward = model, Tensor.backward
    if mode == "fsdp":
        if not model.config.tie_word_embeddings:
            fully_shard(model.get_output_embeddings())
        fully_shard(model)
    elif mode == "zero3":
        import deepspeed

        config: Any = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
        }
        run, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters()), config=config)
        backward = run.backward
        run.known = HfDeepSpeedConfig(config)  # transformers asks it what to gather, while it lives
    if mode is not None:
        assert is_sharded(model.get_output_embeddings().weight)
    losses = []
    for row in (0, 1) if mode is None else (torch.distributed.get_rank(),):
        own = {key: value[row : row + 1] for key, value in inputs.items()}
        step = heads.read(run, own, heads.captured(run, own))
        losses.append(heads.pull(step.log_prob, step.entropy))
    backward(torch.stack(losses).mean())
    return whole_gradients(model)
