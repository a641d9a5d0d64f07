"""The critic of PPO: a value head on a backbone of the policy's family, with its own optimiser."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, is_peft_model
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from troll.trl.monitor import over_processes
from troll.trust_region.metrics import Tally, masked_total
from troll_lab.trl.checkpoints import load_state, save_state
from troll_lab.trl.config import LabConfig
from troll_lab.trl.value_model import value_model

#: The file that `Critic.save` writes: only one, so that it is replaced as a whole.
CRITIC_FILE = "critic.pt"
#: The whole state, on the CPU of the main process, of the trained weights only.
_OPTIONS = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False)


def value_loss(values: Tensor, returns: Tensor, old_values: Tensor, value_clip: float) -> Tensor:
    """PPO's loss of each value: ½ max((V − R)², (V_old + clip(V − V_old, ±c) − R)²).

    A value that has moved by more than c towards its target has no gradient; one that has moved away has one.

    Args:
        values: V, the critic's current values, any shape; the loss and the next two arguments have the same shape.
        returns: R, their targets.
        old_values: V_old, the values at the rollout.
        value_clip: c, in units of reward.
    """
    clipped = old_values + (values - old_values).clamp(-value_clip, value_clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)


class Critic:
    """The critic: estimates values, and trains and saves its value model.

    It runs in one process or more (DDP, or FSDP with `fsdp_version=2`). The gradient of an update is that of the mean
    loss over all its tokens, for any number of micro-batches and processes: micro-batches accumulate the sum, and
    `step` divides it by the number of tokens, which is known only then.

    Args:
        accelerator: The trainer's accelerator. Its `sync_gradients` tells whether a micro-batch ends an update.
        model: The language model to start from; this and the last two are arguments of `value_model`.
        args: The trainer's configuration, with the settings of the critic.
        peft_config: The policy's adapter configuration; None trains all weights.
        model_init_kwargs: Arguments of `from_pretrained`, where `model` is a name.

    Raises:
        ValueError: Under DeepSpeed, Megatron or the first version of FSDP, in fp16, and for the models that
            `value_model` refuses.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: str | os.PathLike[str] | PreTrainedModel | PeftModel,
        args: LabConfig,
        *,
        peft_config: PeftConfig | None = None,
        model_init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        _refuse(accelerator)
        self.accelerator = accelerator
        self._settings = settings = args.critic_settings
        self.steps = 0
        built = value_model(model, peft_config, model_init_kwargs, args.gradient_checkpointing)
        trained = [parameter for parameter in built.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW([group for group in groups if group["params"]], settings.learning_rate)
        self.model, self.optimizer = accelerator.prepare(built, optimizer)
        self.start()

    def start(self) -> None:
        """Begins a training run; drops the gradients and sums of an interrupted update."""
        self.model.zero_grad()  # in the middle of an accumulation accelerate's optimiser would not
        self._tokens = torch.zeros((), device=self.accelerator.device)
        self._tally = Tally()
        self._grad_norms: list[Tensor] = []

    @property
    def warming_up(self) -> bool:
        """Whether only the critic is trained in the current update; `step` moves on to the next one."""
        return self.steps < self._settings.warmup_steps

    # Values

    def values(
        self, input_ids: Tensor, attention_mask: Tensor, completion_length: int, batch_size: int | None = None
    ) -> Tensor:
        """The values of the states in which the completions' tokens were chosen, (B, T) in float32, without gradient.

        Values at padding are undefined.

        Args:
            input_ids: (B, P + T), prompts padded on the left and completions on the right.
            attention_mask: (B, P + T), 0 at padding.
            completion_length: T, the tokens of a completion.
            batch_size: Rows in one forward pass; all by default.
        """
        self.model.eval()
        size = batch_size or len(input_ids)
        with torch.no_grad():
            chunks = [
                self._forward(ids, mask, completion_length)
                for ids, mask in zip(input_ids.split(size), attention_mask.split(size), strict=True)
            ]
        return torch.cat(chunks)

    def _forward(self, input_ids: Tensor, attention_mask: Tensor, completion_length: int) -> Tensor:
        with self.accelerator.autocast():
            output = self.model(input_ids=input_ids, attention_mask=attention_mask)
        # Before the token, not at it: a value that depends on the action cannot be a baseline.
        return output.logits[:, -completion_length - 1 : -1, 0].float()

    # Training

    def train_on(
        self, input_ids: Tensor, attention_mask: Tensor, returns: Tensor, old_values: Tensor, mask: Tensor
    ) -> None:
        """Runs forward and backward on one micro-batch.

        Args:
            input_ids: (B, P + T), as for `values`.
            attention_mask: (B, P + T), 0 at padding.
            returns: (B, T), the targets.
            old_values: (B, T), as `values` gave them at the rollout.
            mask: (B, T), the tokens to train on. Elsewhere returns and values may be anything.
        """
        self.model.train()
        mask = mask.bool()
        wait = nullcontext() if self.accelerator.sync_gradients else self.accelerator.no_sync(self.model)
        with wait:
            new_values = self._forward(input_ids, attention_mask, returns.shape[1])
            values, returns, old_values = (torch.where(mask, x, 0.0) for x in (new_values, returns, old_values))
            losses = value_loss(values, returns, old_values, self._settings.value_clip)
            self.accelerator.backward(losses.sum())
        self._tokens += mask.sum()
        values, error = values.detach(), returns - old_values
        measured = {
            "value_loss": losses,
            "clip_fraction": mask & ((values - old_values).abs() > self._settings.value_clip),
            "value_mean": values,
            "return_mean": returns,
            "return_square": returns**2,
            "error": error,
            "error_square": error**2,
        }
        self._tally += Tally({name: masked_total(numbers.float(), mask) for name, numbers in measured.items()})

    def step(self) -> None:
        """Makes an optimiser step if the last micro-batch ended an update.

        Raises:
            FloatingPointError: If gradients are NaN or infinite, before the optimiser sees them.
        """
        if not self.accelerator.sync_gradients:
            return
        tokens = self.accelerator.reduce(self._tokens, reduction="sum").clamp(min=1)
        self._tokens = torch.zeros_like(self._tokens)
        gradients = [p for p in self.model.parameters() if p.grad is not None]
        for parameter in gradients:  # summed over micro-batches, averaged over processes
            parameter.grad.mul_(self.accelerator.num_processes / tokens)
        norm = nn.utils.clip_grad_norm_(gradients, self._settings.max_grad_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not norm.isfinite():
            raise FloatingPointError(
                f"critic, step {self.steps + 1}: the gradients are NaN or infinite, and the update was not made. "
                "Resume from the last checkpoint with a lower learning rate of the critic"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = self._settings.learning_rate  # a resumed run may have another than its checkpoint
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self._grad_norms.append(norm)

    def metrics(self) -> dict[str, float]:
        """The metrics to log, over all tokens and processes since the last call; every process has to call it.

        - `value_loss`, `value_mean` and `return_mean`, the means over tokens.
        - `clip_fraction`, the share of values that have moved by more than `value_clip` since the rollout.
        - `explained_variance` = 1 − Var(R − V_old) / Var(R), of the values at the rollout, before they were trained on
          these returns: 1 is perfect, 0 no better than a constant. It is left out if all returns are equal.
        - `grad_norm`, before clipping, the mean over updates.

        Without a micro-batch the result is empty. If all completions are masked, it has only `grad_norm`.
        """
        if not self._tally.totals:
            return {}
        tally = over_processes(self._tally, self.accelerator)
        found = {name: total.tolist() for name, total in tally.totals.items()}
        means = {name: total / tokens for name, (total, tokens) in found.items() if tokens}
        if means:
            variance = means.pop("return_square") - means["return_mean"] ** 2
            unexplained = means.pop("error_square") - means.pop("error") ** 2
            # Below this, the difference of two squares is rounding.
            if variance > 1e-6 * means["return_mean"] ** 2:
                means["explained_variance"] = 1 - unexplained / variance
        if self._grad_norms:
            means["grad_norm"] = torch.stack(self._grad_norms).mean().item()
        self._tally, self._grad_norms = Tally(), []
        return means

    # Checkpoints

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the trained weights (with LoRA: adapter and head), the optimiser's state and the number of steps.

        They go into one file of the folder, `CRITIC_FILE`, atomically. Every process has to call it.
        """
        weights, optimizer = get_model_state_dict(self.model, options=_OPTIONS), None
        if self.steps:  # before, it has no state, and asking torch for it would make one
            optimizer = get_optimizer_state_dict(self.model, self.optimizer.optimizer, options=_OPTIONS)
        if self.accelerator.is_main_process:
            save_state({"weights": weights, "optimizer": optimizer, "steps": self.steps}, Path(folder, CRITIC_FILE))
        self.accelerator.wait_for_everyone()

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Restores a critic from `save`: with the same data, training repeats bit by bit. Every process has to call it.

        Raises:
            FileNotFoundError: If the folder has no critic.
            ValueError: If the critic in it has other weights: another model, or LoRA where there was none.
        """
        path = Path(folder, CRITIC_FILE)
        state = load_state(path, "a run with a critic")
        model = self.accelerator.unwrap_model(self.model)
        expected = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
        found = {name: tuple(weight.shape) for name, weight in state["weights"].items()}
        wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        if wrong:
            name = wrong[0]
            raise ValueError(
                f"{path} holds the weights of another critic: {name} has shape {found.get(name)} in it and "
                f"{expected.get(name)} here ({len(wrong)} differ)"
            )
        set_model_state_dict(self.model, state["weights"], options=_OPTIONS)
        if state["optimizer"] is not None:
            set_optimizer_state_dict(self.model, self.optimizer.optimizer, state["optimizer"], options=_OPTIONS)
        self.steps = state["steps"]


def make_critic(trainer: Any, given: Any) -> Critic:
    """The critic of a trainer whose model is loaded.

    Args:
        trainer: The `LabTrainer`.
        given: The `model` argument of the trainer: a name, or a model.
    """
    args, policy = trainer.args, trainer.model
    other = args.critic_settings.model_name_or_path
    # The critic's weights are float32 for any policy, so that small steps do not get lost. The policy's revision and
    # quantisation belong to its own repository.
    left_out = {"dtype", "device_map"} | ({"revision", "quantization_config"} if other else set())
    with torch.random.fork_rng(devices=[]):  # so that other estimators with this seed have the same rollouts
        return Critic(
            trainer.accelerator,
            other or (given if isinstance(given, str) else policy),
            args,
            peft_config=policy.peft_config[policy.active_adapter] if is_peft_model(policy) else None,
            model_init_kwargs={
                name: value for name, value in (args.model_init_kwargs or {}).items() if name not in left_out
            },
        )


def _refuse(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(
            f"a critic cannot be trained with {kind.value}, for which accelerate prepares only one model: use DDP or "
            "FSDP with fsdp_version=2"
        )
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError("a critic needs fsdp_version=2, got 1")
    if accelerator.mixed_precision == "fp16":
        raise ValueError("a critic needs bf16 or float32, got fp16: its loss would share the policy's loss scale")
