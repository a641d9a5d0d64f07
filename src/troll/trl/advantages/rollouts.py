"""The advantages of a rollout in place of TRL's, and PPO's critic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from torch import Tensor

from troll.trl.advantages.critic import Critic, CriticSettings
from troll.trl.advantages.estimators import ESTIMATORS, combine_rewards, token_advantages
from troll.trl.config import TrollConfig
from troll.trl.seam import loss_mask, sequences

#: What the critic learns from travels through TRL's buffer under these keys, (B, T) each.
VALUES, RETURNS, VALUE_MASK = "troll_values", "troll_returns", "troll_value_mask"


class Advantages:
    """Makes the advantages of `TrollConfig.advantage_estimator`; every method runs on every process.

    It changes one entry of a rollout, ``advantages``; "gae" makes it (B, T), which TRL's loss takes. The critic of
    "gae" is trained next to the policy, in the same updates, by an optimiser of its own.

    Args:
        accelerator: The trainer's.
        args: The trainer's.
        policy: The trainer's model.
        given: The model as the trainer was given it: a name, or the model.
    """

    def __init__(self, accelerator: Accelerator, args: TrollConfig, policy: Any, given: Any) -> None:
        self._accelerator, self._args = accelerator, args
        self._estimator = ESTIMATORS[args.advantage_estimator]
        self._rewards = torch.empty(0)
        self.critic: Critic | None = None
        if self._estimator.needs_critic:
            with torch.random.fork_rng(devices=[]):  # the rollouts are those of another estimator with the same seed
                self.critic = _critic(accelerator, args, policy, given)

    def observe(self, rewards_per_function: Tensor, weights: Tensor) -> None:
        """Keeps the (N, F) rewards of a rollout of all processes, with the (F,) weights of the functions."""
        self._rewards = combine_rewards(rewards_per_function, weights)

    def of(self, rolled_out: dict[str, Any]) -> tuple[dict[str, Any], Tensor | None, dict[str, float]]:
        """A rollout with the estimator's advantages, and what its critic learns from.

        Returns:
            The rollout; the advantages of the completions of all processes, (N,), for TRL's table, None where they are
            TRL's own; and metrics.
        """
        mask = loss_mask(rolled_out)
        first = self._accelerator.process_index * len(mask)
        own = slice(first, first + len(mask))
        if self.critic is not None:
            ids, attention_mask = sequences(rolled_out)
            values = self.critic.values(ids, attention_mask, mask.shape[1], self._args.per_device_train_batch_size)
            made = token_advantages(
                self._rewards[own],
                values,
                mask,
                self._args.gamma,
                self._args.gae_lambda,
                whitened=self._args.whiten_advantages,
                reduce=self._accelerator.reduce,
            )
            learned = {VALUES: values, RETURNS: made.returns, VALUE_MASK: made.mask}
            means = made.advantages.sum(-1) / made.mask.sum(-1).clamp(min=1)
            return rolled_out | {"advantages": made.advantages} | learned, self._accelerator.gather(means), {}
        if self._estimator.of_sequences is not None:
            token_counts = self._accelerator.gather(mask.sum(-1))
            rewards, metrics = self._rewards, {}
            if self._args.kl_in_reward:
                kl = self._sequence_kl(rolled_out, mask)
                rewards = rewards - self._args.beta * kl
                metrics["kl"] = float(kl.sum() / token_counts.sum().clamp(min=1))
            assert self._args.num_generations is not None  # TRL's default
            advantages = self._estimator.of_sequences(rewards, self._args.num_generations, token_counts)
            return rolled_out | {"advantages": advantages[own]}, advantages, metrics
        return rolled_out, None, {}

    def _sequence_kl(self, rolled_out: dict[str, Any], mask: Tensor) -> Tensor:
        """Σ_t (log p_old − log p_ref) of each completion of all processes, (N,)."""
        token_kl = (rolled_out["old_per_token_logps"] - rolled_out["ref_per_token_logps"]) * mask
        kl: Tensor = self._accelerator.gather(token_kl.sum(-1))
        return kl

    # The critic

    def start(self) -> None:
        """Forgets what an interrupted update has left."""
        if self.critic is not None:
            self.critic.start()

    @property
    def policy_rests(self) -> bool:
        """Whether only the critic is trained in the update that is being accumulated."""
        return self.critic is not None and self.critic.warming_up

    def train_critic(self, inputs: dict[str, Any]) -> None:
        """Forward and backward of the critic on a micro-batch, if there is one."""
        if self.critic is not None:
            self.critic.train_on(*sequences(inputs), inputs[RETURNS], inputs[VALUES], inputs[VALUE_MASK])

    def step_critic(self) -> None:
        """The critic's own update, where the policy has made one."""
        if self.critic is not None:
            self.critic.step()

    def metrics(self) -> dict[str, float]:
        """``critic/*`` since the last call."""
        found = {} if self.critic is None else self.critic.metrics()
        return {f"critic/{name}": value for name, value in found.items()}

    def save(self, checkpoint: Path) -> None:
        """Writes the critic, if there is one, into a checkpoint."""
        if self.critic is not None:
            self.critic.save(checkpoint)

    def load(self, checkpoint: Path) -> None:
        """Goes on with the critic of a checkpoint."""
        if self.critic is not None:
            self.critic.load(checkpoint)


def _critic(accelerator: Accelerator, args: TrollConfig, policy: Any, given: Any) -> Critic:
    start = args.critic_model_name_or_path or (given if isinstance(given, str) else policy)
    peft_config = policy.peft_config[policy.active_adapter] if is_peft_model(policy) else None
    # Its weights are float32, in which small steps do not get lost, whichever the policy's are; and the policy's
    # revision and quantisation are those of one repository.
    left_out = {"dtype", "device_map"} | (
        {"revision", "quantization_config"} if args.critic_model_name_or_path else set()
    )
    options: dict[str, Any] = dict(args.model_init_kwargs or {})  # type: ignore[arg-type]
    settings = CriticSettings(
        learning_rate=args.critic_learning_rate,
        weight_decay=args.critic_weight_decay,
        max_grad_norm=args.critic_max_grad_norm,
        value_clip=args.value_clip,
        critic_only_steps=args.critic_warmup_steps,
    )
    return Critic(
        accelerator,
        start,
        settings,
        peft_config=peft_config,
        model_init_kwargs={name: value for name, value in options.items() if name not in left_out},
        gradient_checkpointing=args.gradient_checkpointing,
    )
