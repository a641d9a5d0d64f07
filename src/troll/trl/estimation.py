"""GRPOTrainer with other advantage estimators, PPO's critic among them."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from trl import GRPOTrainer

from troll.trl.advantages import ESTIMATORS, combine_rewards, token_advantages
from troll.trl.config import TrollConfig
from troll.trl.critic import Critic, CriticSettings

#: What the critic learns from travels through TRL's buffer under these keys, (B, T) each.
VALUES, RETURNS, VALUE_MASK = "troll_values", "troll_returns", "troll_value_mask"


class AdvantageTrainer(GRPOTrainer):
    """[`~trl.GRPOTrainer`] whose advantages are those of `TrollConfig.advantage_estimator`.

    It changes one entry of a rollout, ``advantages``; "gae" makes it (B, T), which TRL's loss takes. The critic of
    "gae" is trained beside the policy, in the same updates, by an optimiser of its own, and checkpointed with it.
    """

    args: TrollConfig
    model: Any

    def __init__(self, model: Any, reward_funcs: Any, args: TrollConfig, *positional: Any, **kwargs: Any) -> None:
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        self.estimator = ESTIMATORS[args.advantage_estimator]
        self.critic = None
        if self.estimator.needs_critic:
            with torch.random.fork_rng(devices=[]):  # the rollouts are those of another estimator with the same seed
                self.critic = self._make_critic(model)
        self._rewards = torch.empty(0)

    def _make_critic(self, model: Any) -> Critic:
        args = self.args
        start = args.critic_model_name_or_path or (model if isinstance(model, str) else self.model)
        peft_config = self.model.peft_config[self.model.active_adapter] if is_peft_model(self.model) else None
        # Its weights are float32, in which small steps do not get lost, whatever the policy's are; and the policy's
        # revision and quantisation are those of one repository.
        left_out = {"dtype", "device_map"} | (
            {"revision", "quantization_config"} if args.critic_model_name_or_path else set()
        )
        options: dict[str, Any] = dict(args.model_init_kwargs or {})  # type: ignore[arg-type]
        options = {name: value for name, value in options.items() if name not in left_out}
        settings = CriticSettings(
            learning_rate=args.critic_learning_rate,
            weight_decay=args.critic_weight_decay,
            max_grad_norm=args.critic_max_grad_norm,
            value_clip=args.value_clip,
            critic_only_steps=args.critic_warmup_steps,
        )
        return Critic(
            self.accelerator,
            start,
            settings,
            peft_config=peft_config,
            model_init_kwargs=options,
            gradient_checkpointing=args.gradient_checkpointing,
        )

    # The rollout

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        rolled_out: dict[str, Any] = super()._generate_and_score_completions(inputs)
        return self._with_advantages(rolled_out) if self.model.training else rolled_out

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(*args, **kwargs)
        self._rewards = combine_rewards(rewards, self.reward_weights)
        return rewards

    def _with_advantages(self, rolled_out: dict[str, Any]) -> dict[str, Any]:
        """A rollout with the advantages of the estimator in place of TRL's, and what its critic learns from."""
        mask = loss_mask(rolled_out)
        first = self.accelerator.process_index * len(mask)
        own = slice(first, first + len(mask))
        if self.critic is not None:
            values = self.critic.values(*_sequences(rolled_out), self.args.per_device_train_batch_size)
            made = token_advantages(
                self._rewards[own],
                values,
                mask,
                self.args.gamma,
                self.args.gae_lambda,
                whitened=self.args.whiten_advantages,
                reduce=self.accelerator.reduce,
            )
            lengths = made.mask.sum(-1).clamp(min=1)
            self._log_advantages(self.accelerator.gather(made.advantages.sum(-1) / lengths))
            learned = {VALUES: values, RETURNS: made.returns, VALUE_MASK: made.mask}
            return rolled_out | {"advantages": made.advantages} | learned
        if self.estimator.of_sequences is not None:
            token_counts = self.accelerator.gather(mask.sum(-1))
            assert self.args.num_generations is not None  # TRL's default
            advantages = self.estimator.of_sequences(self._rewards, self.args.num_generations, token_counts)
            self._log_advantages(advantages)
            return rolled_out | {"advantages": advantages[own]}
        return rolled_out

    def _log_advantages(self, advantages: Tensor) -> None:
        """Puts those of the whole rollout, (N,), where TRL has just put its own for the table of completions."""
        logged: deque[float] = self._logs["advantages"]  # type: ignore[assignment]
        for _ in range(min(len(advantages), len(logged))):
            logged.pop()
        logged.extend(advantages.tolist())

    # The update

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if self.critic is not None and self.model.training:
            input_ids, attention_mask, _ = _sequences(inputs)
            self.critic.train_on(input_ids, attention_mask, inputs[RETURNS], inputs[VALUES], inputs[VALUE_MASK])
        loss: Tensor = super()._compute_loss(model, inputs)
        return loss

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """The parent's; at the end of an update, the critic makes its own."""
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        if self.critic is not None:
            if self.critic.warming_up:
                model.zero_grad()  # without a gradient, the optimiser leaves a parameter as it is
            self.critic.step()
        return loss

    # What lasts

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs the parent's metrics and ``critic/*``."""
        if self.critic is not None and self.model.training:
            for name, value in self.critic.metrics().items():
                self._metrics["train"][f"critic/{name}"].append(value)
        super().log(logs, start_time)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.critic is not None:
            self.critic.save(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.critic is not None:
            self.critic.load(checkpoint)


def loss_mask(batch: dict[str, Any]) -> Tensor:
    """The tokens that the policy chose, (B, T)."""
    mask: Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


def _sequences(batch: dict[str, Any]) -> tuple[Tensor, Tensor, int]:
    """Token ids and attention mask of prompts and completions, (B, P + T), and T."""
    ids, mask = (torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], 1) for name in ("ids", "mask"))
    return ids, mask, batch["completion_ids"].shape[1]
