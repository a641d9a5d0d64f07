"""TROLL as slime's custom loss.

slime's pass that computes old log-probabilities and its updates run in one process, in the same micro-batches. So a
hook on the model keeps the old policies of the pass, in order, and the loss uses them in that order; it verifies the
match by their tokens and by slime's old log-probabilities. README.md has the command line.
"""

from __future__ import annotations

from argparse import Namespace
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from torch import Tensor
from torch.utils.hooks import RemovableHandle

import troll

#: slime's options that this loss does not support, and the value that each must have.
NEUTRAL: dict[str, Any] = {
    "recompute_loss_function": False,  # would take an old policy twice
    "context_parallel_size": 1,  # the label of a slice's last token is in another process
    "use_rollout_logprobs": False,  # there would be no pass to capture in
    "rollout_top_p": 1.0,  # slime's log-probabilities would be those of the nucleus
    "use_opsm": False,
    "get_mismatch_metrics": False,
    "use_unbiased_kl": False,
    "custom_tis_function_path": None,
    "custom_pg_loss_reducer_function_path": None,
}

#: The log-probabilities of a token in slime's arithmetic and in TROLL's, of the same float32 logits, in nats.
LOG_PROB_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Settings:
    """The settings of the trust region, read from `--custom-config-path`, where their names start with `troll_`.

    Attributes:
        kl_bound: ε, in nats.
        regression_weight: α.
        top_k: K, tokens of the old policy kept per position.
        mass_threshold: δ.
    """

    kl_bound: float = 0.05
    regression_weight: float = 1.0
    top_k: int = 64
    mass_threshold: float = 1e-5

    @classmethod
    def of(cls, args: Namespace) -> Settings:
        """From slime's arguments.

        Raises:
            ValueError: If an option is set that this loss does not support, or a setting is unknown.
        """
        for name, value in NEUTRAL.items():
            if (found := getattr(args, name, value)) != value:
                raise ValueError(f"TROLL in slime takes {name}={value}, got {found}")
        if args.advantage_estimator in ("gspo", "cispo"):
            raise ValueError(f"{args.advantage_estimator} is a loss of its own: take --advantage-estimator grpo")
        given = {x.removeprefix("troll_"): value for x, value in vars(args).items() if x.startswith("troll_")}
        known = [x.name for x in fields(cls)]
        if unknown := sorted(given.keys() - known):
            raise ValueError(f"TROLL in slime has no setting troll_{unknown[0]}; it has troll_{', troll_'.join(known)}")
        return cls(**given)


#: The old policies of a rollout's micro-batches, with their sampled tokens.
_captured: deque[tuple[Tensor, troll.PackedPolicy]] = deque()

_hook: RemovableHandle | None = None


def before_log_prob(args: Namespace, model: Sequence[torch.nn.Module], store_prefix: str) -> None:
    """`--custom-megatron-before-log-prob-hook-path`: the next pass without gradient is the old policy's.

    Args:
        args: slime's arguments.
        model: The chunks of this process.
        store_prefix: Of the names of the pass's results: "" for the policy's, "ref_" for the reference's.
    """
    global _hook
    settings = Settings.of(args)
    if _hook is not None:
        _hook.remove()
        _hook = None
    is_policy = not store_prefix and getattr(model[0], "role", "actor") == "actor"
    if is_policy and mpu.is_pipeline_last_stage(ignore_virtual=True):
        _captured.clear()
        _hook = model[-1].register_forward_hook(partial(_capture, settings, args), with_kwargs=True)


def _capture(
    settings: Settings, args: Namespace, module: torch.nn.Module, _: Any, inputs: dict[str, Tensor], logits: Tensor
) -> None:
    if module.training:  # an update, which goes on to the loss
        return
    rows, sampled = _tokens(inputs["input_ids"], inputs["loss_mask"])
    policy = troll.capture(
        _source(args, logits, rows), sampled, top_k=settings.top_k, mass_threshold=settings.mass_threshold
    )
    _captured.append((sampled, troll.PackedPolicy.of(policy)))


def _tokens(input_ids: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """The n rows of (1, T) logits whose next token counts, and these tokens, (n,) each."""
    rows = loss_mask[0].nonzero().squeeze(-1)
    return rows, input_ids[0][rows + 1]


def _source(args: Namespace, logits: Tensor, rows: Tensor, donate: bool = False) -> troll.Logits:
    """This process's slice of the logits, (1, T, V/n), at n rows; with `donate`, given up where that can be."""
    spread = mpu.get_tensor_model_parallel_world_size() > 1
    whole = logits.is_contiguous() and logits.untyped_storage().nbytes() == logits.nbytes
    return troll.Logits(
        logits.squeeze(0),
        temperature=args.rollout_temperature,
        rows=rows,
        donate=donate and whole and args.rollout_temperature == 1.0,
        vocab_group=mpu.get_tensor_model_parallel_group() if spread else None,
    )


def _old_policy(sampled: Tensor, log_probs: Tensor) -> troll.SparsePolicy:
    """The old policy of the next micro-batch.

    Args:
        sampled: Its n tokens that count.
        log_probs: slime's own old log-probabilities of them, (n,).

    Raises:
        RuntimeError: If there is none, or it is another micro-batch's.
    """
    if not _captured:
        raise RuntimeError(
            "no old policy is left for this micro-batch: set --custom-megatron-before-log-prob-hook-path "
            "troll_slime.before_log_prob"
        )
    tokens, packed = _captured.popleft()
    if not torch.equal(tokens, sampled):
        raise RuntimeError("the old policy is that of other tokens: slime updates in another order than it scores")
    old = packed.unpack()
    if not torch.allclose(old.log_prob, log_probs, rtol=0, atol=LOG_PROB_TOLERANCE, equal_nan=True):
        worst = float((old.log_prob - log_probs).abs().max())
        raise RuntimeError(
            f"the old policy's log-probabilities are up to {worst:.3g} off slime's own: is this another network?"
        )
    return old


def loss_function(
    args: Namespace,
    batch: dict[str, Any],
    logits: Tensor,
    sum_of_sample_mean: Callable[[Tensor], Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """`--custom-loss-function-path`, with `--loss-type custom_loss`.

    Like slime's own policy loss, with the projected ratio, and the regression in place of the clip.

    Args:
        args: slime's arguments.
        batch: A micro-batch, samples one after the other.
        logits: This process's slice, (1, T, V/n).
        sum_of_sample_mean: slime's reducer of values at all response tokens.
    """
    settings = Settings.of(args)
    mask = torch.cat(batch["loss_masks"]).bool()
    advantages, old_log_probs = torch.cat(batch["advantages"]), torch.cat(batch["log_probs"])
    rows, sampled = _tokens(batch["tokens"], batch["full_loss_masks"])
    old = _old_policy(sampled, old_log_probs[mask])
    step = troll.trust_region_step(_source(args, logits, rows, donate=True), old, settings.kl_bound, entropy=True)
    assert step.entropy is not None

    def reduced(values: Tensor) -> Tensor:
        """Of values at the n tokens."""
        return sum_of_sample_mean(values.new_zeros(len(mask)).masked_scatter(mask, values))

    policy_term = -torch.exp(step.log_ratio) * advantages[mask]
    if args.use_tis:
        # slime's own weights, of the policy term only: the regression is about the network and not about the rollout.
        weights = torch.exp(old_log_probs - torch.cat(batch["rollout_log_probs"]))[mask]
        policy_term = policy_term * weights.clamp(args.tis_clip_low, args.tis_clip)
    entropy, regression = reduced(step.entropy), reduced(step.regression)
    loss = reduced(policy_term) + settings.regression_weight * regression - args.entropy_coef * entropy
    # slime adds up every metric over samples, which maxima do not allow.
    log = {
        "pg_loss": reduced(policy_term),
        "entropy_loss": entropy,
        "ppo_kl": reduced(old.log_prob - step.log_prob),
        "troll_regression": regression,
        "troll_kl_before": reduced(step.kl_before),
        "troll_kl_after": reduced(step.kl_after),
        "troll_projected_fraction": reduced(step.projected.to(step.kl_before)),
    }
    if args.use_kl_loss:
        from slime.utils.ppo_utils import compute_approx_kl

        reference = torch.cat(batch["ref_log_probs"])[mask]
        log["kl_loss"] = reduced(compute_approx_kl(step.log_prob, reference, kl_loss_type=args.kl_loss_type))
        loss = loss + args.kl_loss_coef * log["kl_loss"]
    if not len(rows):  # every process takes part in the backward pass
        loss = loss + 0 * logits.sum()
    return loss, {"loss": loss.detach().clone()} | {name: value.detach().clone() for name, value in log.items()}
