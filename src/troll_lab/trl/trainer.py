"""TrollTrainer with what changes a rollout or adds a network."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_utils import has_length

from troll.trl import TrollTrainer, checks
from troll.trl.old_policy import OldPolicyCapture
from troll.trl.seam import sequences
from troll_lab.trl import seam
from troll_lab.trl.advantages import RETURNS, VALUE_MASK, VALUES, with_critic, with_token_rewards
from troll_lab.trl.callback import LabCallback
from troll_lab.trl.checkpoints import marked, resolved
from troll_lab.trl.config import LabConfig
from troll_lab.trl.conversations import Conversations
from troll_lab.trl.critic import Critic, make_critic
from troll_lab.trl.eval_metrics import EvalMetrics, sampling_temperature
from troll_lab.trl.generation import generate_in_chunks
from troll_lab.trl.resampling import Resampling
from troll_lab.trl.rollout_weights import RolloutWeights
from troll_lab.trl.token_rewards import Judged


class LabTrainer(TrollTrainer):
    """`TrollTrainer` with what changes a rollout or adds a network; `troll train` uses it.

    PPO's critic, rewards of tokens, groups with equal rewards sampled again, rollouts of several conversations or of
    older weights, generation in chunks, the metrics of `troll eval` in every evaluation, and checkpoints that say
    whether they are complete. With the defaults of `LabConfig` it trains exactly as `TrollTrainer` does. Its
    evaluations have no loss, which is all that scoring their answers would serve.

    Raises:
        TypeError: If `args` is not a `LabConfig`.
        ValueError: Where `TrollTrainer` raises it; and for settings that the model, the data or the back end exclude.
    """

    args: LabConfig

    config = LabConfig

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: LabConfig | None = None, *positional: Any, **kwargs: Any
    ) -> None:
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        args = self.args
        self.rollout_weights = RolloutWeights(self) if args.rollout_delay else None
        self.conversations = Conversations(self.accelerator)
        #: The completions of this process in the current rollout.
        self.judged = Judged((), (), ())
        #: PPO's critic; None for the other estimators.
        self.critic: Critic | None = None
        if args.own_estimator is not None and args.own_estimator.of_tokens is None:
            checks.refuse_rewards_of_tokens(self)
        if args.own_estimator is not None and args.own_estimator.needs_critic:
            self.critic = make_critic(self, model)
            checks.refuse_fewer_tokens("critic", self.critic.model, self)
        self.resampling = Resampling(self) if args.resampling_rounds else None
        self.eval_metrics = EvalMetrics(self.reward_funcs, self.reward_func_names, self.reward_weights)
        if args.generation_chunk_size and not args.use_vllm:
            generate_in_chunks(self.model, args.generation_chunk_size)
        #: The parts that have a file of their own in a checkpoint.
        self.saved_parts = [each for each in (self.critic, self.rollout_weights) if each is not None]
        #: From `checkpoints.resolved`: the checkpoint to resume from, if any, and the defects of newer ones.
        self.resumed: tuple[str | None, dict[Path, str]] = None, {}
        self.add_callback(LabCallback(self))

    # The rollout

    def _make_old_policy(self) -> OldPolicyCapture:
        # With delayed weights, scoring with the weights that sampled the tokens gives the anchor; no engine reports it.
        return OldPolicyCapture(self) if self.args.rollout_delay else super()._make_old_policy()

    def _roll_out(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Overrides the parent: by older weights, with equal groups replaced, or of several conversations."""
        with ExitStack() as stack:
            if self.rollout_func is not None:
                stack.enter_context(self.conversations.rollout(self, inputs[0]))
            if self.model.training and self.rollout_weights is not None:
                stack.enter_context(self.rollout_weights.rollout())
            if self.model.training and self.resampling is not None:
                inputs = stack.enter_context(self.resampling.rollout(inputs))
            rolled_out = super()._roll_out(inputs)
        return self.conversations.with_sample_advantages(rolled_out)

    def _calculate_rewards(
        self, inputs: list[Any], prompts: list[Any], completions: list[Any], completion_ids_list: list[Any]
    ) -> Tensor:
        """Overrides the parent: keeps the completions for rewards of tokens, and the verdicts of an evaluation."""
        last = completion_ids_list[: len(prompts)]  # earlier conversations follow
        rewards = super()._calculate_rewards(inputs, prompts, completions, last)
        if self.model.training:
            self.judged = Judged(inputs, completions, last)
        else:
            self.eval_metrics.observe(rewards)
            self.eval_metrics.keep_answers(prompts, completions, rewards)
        return rewards

    def _advantages(self, rolled_out: dict[str, Any]) -> dict[str, Any]:
        """Overrides the parent: by the critic, or by rewards of tokens."""
        estimator = self.args.own_estimator
        if self.critic is not None:
            return with_critic(self, self.critic, rolled_out)
        if estimator is not None and estimator.of_tokens is not None:
            return with_token_rewards(self, estimator.of_tokens, rolled_out)
        return super()._advantages(rolled_out)

    def of_rows(self, values: Tensor) -> Tensor:
        """Overrides the parent: a sample has a row for each of its conversations."""
        return self.conversations.of_rows(super().of_rows(values))

    def of_samples(self, values: Tensor) -> Tensor:
        """Overrides the parent: the values of a sample's conversations are added up."""
        return super().of_samples(self.conversations.of_samples(values))

    def passes_behind(self, *, anew: bool) -> int:
        """Overrides the parent: delayed weights have an age."""
        return 0 if self.rollout_weights is None else self.rollout_weights.passes_behind(anew=anew)

    # The update

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Overrides the parent: trains the critic on the same micro-batch."""
        if self.model.training and self.critic is not None:
            self.critic.train_on(*sequences(inputs), inputs[RETURNS], inputs[VALUES], inputs[VALUE_MASK])
        return super()._compute_loss(model, inputs)

    # Evaluation

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[None, None, None]:
        """Overrides the parent: answers are sampled and judged, without a loss, which says nothing about them."""
        self._prepare_inputs(inputs)
        return None, None, None

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Overrides the parent: no scores of an evaluation's answers, except to compare them with an engine's."""
        if self.model.training or self.use_vllm:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, **kwargs
            )
        return torch.full((len(input_ids), logits_to_keep), math.nan, device=input_ids.device), None, None

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Overrides the parent: means over completions, and the metrics of `troll eval` for a reward named `success`.

        Their names start with the prefix, which names the data set if there are several: `eval_pass@1`,
        `eval_aime24_pass@1`.
        """
        checks.refuse_no_batch(self, dataloader.dataset)
        own = seam.evaluation_metrics(self)
        self.eval_metrics.start()
        own.clear()
        with sampling_temperature(self, self.args.eval_temperature):
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        problems = len(dataloader.dataset) if has_length(dataloader.dataset) else None
        found = self.eval_metrics.metrics(self.num_generations_eval, problems)
        for name in found.keys() & own.keys():
            del own[name]
        if metric_key_prefix != "eval":  # TRL logs its metrics of every data set under the same names
            numbers = {name: [value for value in values if not math.isnan(value)] for name, values in own.items()}
            found |= {name: sum(values) / len(values) for name, values in numbers.items() if values}
            own.clear()
        assert output.metrics is not None
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in found.items()})
        return output

    # Checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *positional: Any, **kwargs: Any) -> Any:
        """Overrides the parent: True resumes from the newest complete checkpoint in `output_dir`.

        Raises:
            ValueError: If there is none, the processes see different ones, or the given checkpoint is incomplete; and
                where `TrollTrainer` raises it.
        """
        self.resumed = resolved(Path(str(self.args.output_dir)), resume_from_checkpoint)
        return super().train(self.resumed[0], *positional, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        checkpoint = seam.checkpoint_folder(self, trial)
        with marked(self, checkpoint):
            super()._save_checkpoint(model, trial)
            if not self.args.save_only_model:
                for part in self.saved_parts:
                    part.save(checkpoint)
