"""GRPOTrainer with a trust region instead of a clip."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOTrainer

from troll.huggingface.dropout import disable_dropout
from troll.huggingface.forward import unwrapped
from troll.huggingface.positions import positions_from_mask
from troll.huggingface.token_ids import without_embedding
from troll.trl import checks, sampling, seam
from troll.trl.anchor import RolloutAnchor
from troll.trl.callback import TrollCallback
from troll.trl.config import TrollConfig
from troll.trl.diagnostics import Diagnostics
from troll.trl.estimators import ESTIMATORS, combine_rewards
from troll.trl.kl_target import KLTargetRate
from troll.trl.micro_batch import SurrogateLoss
from troll.trl.monitor import Monitor
from troll.trl.old_policy import OLD_POLICY, OldPolicyCapture
from troll.trl.surrogates import SURROGATES
from troll.trl.ungraded import UngradedFilter


class TrollTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` with TROLL (arXiv 2510.03817) instead of the clip.

    The policy term uses the projected log-probability of the sampled token where GRPO uses the raw one; the clip is
    off; and `regression_weight · KL(p̃ ‖ ⌊q⌋)`, where ⌊q⌋ is the projection without gradient, is added with the policy
    term's normalisation. The regression term is treated as TRL treats its own KL penalty: it acts on every scored
    token, and neither the high-entropy mask, nor the off-policy mask, nor vLLM's importance weights apply to it.

    `TrollConfig.surrogate` replaces TROLL by another method, such as TRL's clip, and `TrollConfig.advantage_estimator`
    selects the estimator of advantages; a comparison changes exactly one of them.

    Everything else, including the arguments, is as in `GRPOTrainer`. The network p̃ is saved and used for inference,
    never the projection q.

    Four methods of `GRPOTrainer` are overridden, in the order in which a batch meets them:

    - `_generate_and_score_completions` adds the old policy to a rollout, and advantages of other estimators.
    - `_get_per_token_logps_and_entropies` captures the old policy in the pass in which TRL scores a rollout, and later
      gives TRL's loss the scores of the new policy, which has been read for the trust region.
    - `_calculate_rewards` keeps the rewards for the estimators, and leaves out what a grader could not judge.
    - `_compute_loss` is TRL's loss, of a micro-batch whose old log-probabilities make its ratio the surrogate's.

    The old policy is made in `troll.trl.old_policy` or `anchor`, and a micro-batch is told from top to bottom in
    `micro_batch`; what happens before a training and between
    updates, in `troll.trl.callback`. A trainer that samples in another way, such as `troll_lab.trl.LabTrainer`, changes
    `_roll_out` and `_make_old_policy`; where a sample has several rows, `of_rows` and `of_samples`; and where older
    weights sample, `passes_behind`.

    Attributes:
        kl_bound: ε in nats, which the next update uses: at first that of `args`. A callback may set it between updates,
            to the same number on every process (`examples/hold_kl.py`); checkpoints do not keep it.

    Raises:
        TypeError: If `args` is not a `TrollConfig`, or has settings of another trainer.
        ValueError: Under tensor, context or sequence parallelism; or if the training set has fewer prompts than a
            rollout takes (with `max_steps`, before the first step). In training, before the first step, if an
            evaluation has nothing to evaluate, or the sampler's settings were changed since the trainer was made.
        FloatingPointError: In training, if logits or the loss are NaN or infinite, before the optimiser sees them.
        RuntimeError: In training, if TRL's loss does not use the trust region, before the optimiser makes a step. In an
            evaluation, if generation left the model in training mode.
        NothingJudgedError: In training, if a grader could judge nothing in three rollouts in a row.
    """

    args: TrollConfig
    model: Any

    #: The class of `args`.
    config: type[TrollConfig] = TrollConfig

    _tag_names = ["trl", "troll"]
    _name = "TROLL"
    _paper = {
        "title": "TROLL: Trust Regions improve Reinforcement Learning for Large Language Models",
        "id": "2510.03817",
    }

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: TrollConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        *positional: Any,
        **kwargs: Any,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else seam.get_config_model_id(model.config)
            args = self.config(f"{name.split('/')[-1]}-TROLL")
        checks.refuse_another_config(args, self.config)
        # After the user's own, and before the parent shares out the models: see `on_init_end`.
        self.callback = TrollCallback(self)
        callbacks = [*(callbacks or []), self.callback]
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset,
            eval_dataset,
            processing_class,
            reward_processing_classes,
            callbacks,
            *positional,
            **kwargs,
        )
        args = self.args = sampling.settle_trainer(self)
        #: The tokens of the tokenizer that the model lacks, by id.
        self.missing_tokens = without_embedding(self.model, seam.tokenizer_of(self))
        checks.refuse_misfits(self)
        if self.accelerator.is_main_process:
            checks.warn_about(args, self.model)
            checks.warn_about_saving(self.accelerator)
        if args.kl_target is None:  # else the rate is not known yet
            checks.warn_about_precision(self.accelerator, self.model, args.learning_rate)
        self._prepare_models()

        self.kl_bound: float = args.kl_bound
        self.surrogate = SURROGATES[args.surrogate]
        # Infinity in the configuration itself would not be valid JSON.
        if "epsilon" not in self.surrogate.fields:
            self.epsilon_low = torch.inf
        if "epsilon_high" not in self.surrogate.fields:
            self.epsilon_high = torch.inf
        if args.kl_in_reward:
            self.beta = 0.0  # or the parent would add the KL to the loss too

        self.old_policy = self._make_old_policy()
        self._make_parts()
        #: Sets the learning rate in a training with a `kl_target`; None for the scheduler only.
        self.kl_target_rate: KLTargetRate | None = None
        #: The (N, F) rewards of the current rollout, of all processes.
        self.rollout_rewards = torch.empty(0)

    def _prepare_models(self) -> None:
        """Changes the models that TRL has loaded where TRL's way of scoring them would be wrong."""
        for scored in (self.model, self.ref_model):  # by TRL, which gives no position ids
            if scored is not None:
                positions_from_mask(unwrapped(scored))
        seam.name_experts(self)
        head = self.model.get_output_embeddings()
        if hasattr(head, "token_adapter"):  # of trainable_token_indices; TRL asks for a bias, which PEFT leaves out
            head.bias = None
        if self.args.use_vllm:
            seam.load_whole_weights(self.vllm_generation)
        if self.args.disable_dropout:  # TRL switches only layers off
            disable_dropout(self.model)

    def _make_parts(self) -> None:
        """Makes the parts that count within a training; each training begins with new ones."""
        self.surrogate_loss = SurrogateLoss(self)
        self.ungraded = UngradedFilter(self.accelerator, self.reward_funcs, self.reward_weights)
        self.monitor = Monitor(self.accelerator, self.args)
        self.diagnostics = Diagnostics(self)

    def _make_old_policy(self) -> OldPolicyCapture:
        """The old policy: the engine's, or captured."""
        return RolloutAnchor(self) if self.args.anchor == "rollout" else OldPolicyCapture(self)

    def begin(self) -> None:
        """Begins a training: refuses what cannot be trained, and leaves out the state of an interrupted one.

        Raises:
            ValueError: See the class.
        """
        sampling.refuse_changes(self)
        checks.refuse_few_rows(self)
        seam.begin_anew(self)
        self._make_parts()

    # The rollout

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Overrides the parent: adds the old policy, and advantages of other estimators, to a rollout for training."""
        checks.refuse_columns(self, inputs[0])  # a stream's columns and prompts are known only now
        checks.refuse_token_ids(self, inputs)
        self.old_policy.start()
        training = self.model.training
        rolled_out = self.old_policy.read(self._roll_out(inputs))
        if self.model.training and not training:  # which use_transformers_continuous_batching does
            raise RuntimeError("generation left the model in training mode, so its evaluation would be a training step")
        if not training:
            return rolled_out
        if self.args.kl_in_reward:
            rolled_out["ref_per_token_logps"] = seam.reference_log_probs(self, rolled_out)
        rolled_out = self.ungraded.without(rolled_out, self.of_rows)
        rolled_out = self.old_policy.added_to(rolled_out)
        rolled_out = self._advantages(rolled_out)
        if OLD_POLICY in rolled_out and self.diagnostics.due(rollout=True):
            self.diagnostics.probe(rolled_out)
        return rolled_out

    def _roll_out(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """The parent's rollout: completions, rewards, scores, and advantages."""
        return super()._generate_and_score_completions(inputs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Overrides the parent: captures the old policy of a rollout, and gives the loss the new policy's scores."""
        score = super()._get_per_token_logps_and_entropies
        scores = self.surrogate_loss.take_scores()
        if scores is not None:
            return scores
        if self.old_policy.expects_scoring:
            return self.old_policy.score(score, *args, **kwargs)
        return score(*args, **kwargs)

    def _calculate_rewards(
        self, inputs: list[Any], prompts: list[Any], completions: list[Any], completion_ids_list: list[Any]
    ) -> Tensor:
        """Overrides the parent: keeps the rewards, without those of completions that a grader could not judge."""
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        rewards = self.ungraded.excluded(rewards)
        if self.model.training:
            self.ungraded.count_verdicts()
            self.observe_rewards(rewards)
            seam.add_metrics(self, self.ungraded.metrics(rewards))
        return rewards

    def observe_rewards(self, rewards: Tensor) -> None:
        """Keeps the (N, F) rewards of a rollout of all processes; the last call counts."""
        self.rollout_rewards = rewards
        self.ungraded.observe(rewards)

    def _advantages(self, rolled_out: dict[str, Any]) -> dict[str, Any]:
        """A rollout with the advantages of `TrollConfig.advantage_estimator`; TRL's table shows them too."""
        estimator = ESTIMATORS[self.args.advantage_estimator]
        if estimator.of_sequences is None:  # TRL's own
            return rolled_out
        mask = seam.loss_mask(rolled_out)
        token_counts = self.of_samples(mask.sum(-1))
        rewards = combine_rewards(self.rollout_rewards, self.reward_weights)
        if self.args.kl_in_reward:
            token_kl = (rolled_out["old_per_token_logps"] - rolled_out["ref_per_token_logps"]) * mask
            kl = self.of_samples(token_kl.sum(-1))
            rewards = rewards - self.args.beta * kl
            seam.add_metrics(self, {"kl": float(kl.sum() / token_counts.sum().clamp(min=1))})
        assert self.num_generations is not None  # only TRL's annotation allows it
        advantages = estimator.of_sequences(rewards, self.num_generations, token_counts)
        seam.replace_logged_advantages(self, advantages)
        return rolled_out | {"advantages": self.of_rows(advantages)}

    def of_rows(self, values: Tensor) -> Tensor:
        """The values of this process's rows of a rollout, (B, ...), from those of the samples of all processes."""
        size = len(values) // self.accelerator.num_processes
        return values[self.accelerator.process_index * size :][:size]

    def of_samples(self, values: Tensor) -> Tensor:
        """The values of the samples of all processes, (N,), from those of this process's rows, (B,)."""
        gathered: Tensor = self.accelerator.gather(values)
        return gathered

    def passes_behind(self, *, anew: bool) -> int:
        """The age, in passes, of the weights that sampled a rollout when its first pass begins.

        Args:
            anew: Whether the next rollout is meant, not the current one.
        """
        return 0

    # The update

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Overrides the parent: the surrogate's loss in off-policy updates, and checks at the end of each update."""
        training, trl_loss = self.model.training, super()._compute_loss
        if training:
            self.ungraded.count(inputs)
        # With vLLM's importance correction, on-policy updates have old log-probabilities too.
        off_policy = training and "old_per_token_logps" in inputs and not self.args.always_on_policy
        loss = self.surrogate_loss(trl_loss, model, inputs) if off_policy else trl_loss(model, inputs)
        if training:
            self.monitor.observe_loss(loss)
            if self.kl_target_rate is not None:
                self.monitor.add(self.kl_target_rate.sums_of(inputs))
            if self.accelerator.sync_gradients:  # DeepSpeed makes the update in the backward pass of this micro-batch
                sums = self.monitor.check(self.state.global_step)
                if self.kl_target_rate is not None:
                    self.kl_target_rate.update(sums)
        if not self.surrogate.clips:
            seam.drop_clip_metrics(self)
        return loss
