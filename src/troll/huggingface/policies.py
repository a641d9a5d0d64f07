"""The old policy and the trust region of a Hugging Face model, from token ids."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from troll.huggingface.dropout import warn_about_dropout
from troll.huggingface.forward import ReadingOutput, ReadingRequest, forward_and_read
from troll.trust_region.checks import check_shape
from troll.trust_region.constraint import Constraint
from troll.trust_region.policy.on_support import PolicyOnSupport
from troll.trust_region.policy.packed import PackedPolicy
from troll.trust_region.policy.sparse import SparsePolicy
from troll.trust_region.policy.truncation import Truncation
from troll.trust_region.projection import broadcast_bound
from troll.trust_region.reading.capture import captured
from troll.trust_region.reading.head import LMHead
from troll.trust_region.reading.read import read
from troll.trust_region.step import Pull, TrustRegionStep
from troll.trust_region.step import trust_region_step as step_of_policy


def capture(
    model: nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    attention_mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    top_k: int = 64,
    mass_threshold: float = 1e-5,
    truncation: Truncation | None = None,
    **model_inputs: Any,
) -> SparsePolicy:
    """Captures the old policy, that of a model when a rollout is scored, without gradient and without all logits.

    Args:
        model: A causal or vision-language model of transformers, also wrapped by PEFT, DDP, FSDP, DeepSpeed or
            `torch.compile`. The first reading is compared with the model's own logits.
        input_ids: The tokens of B sequences, (B, L).
        labels: (B, L) as in transformers: the tokens to score, −100 elsewhere.
        attention_mask: (B, L); None for no padding.
        temperature: The sampling temperature, which the policy remembers.
        top_k: K ≥ 1, the largest number of tokens to keep.
        mass_threshold: δ in [0, 1): fewer tokens are kept where they already cover 1 − δ of the mass.
        truncation: The sampler's truncation, or None, as in [capture][troll.capture]; K and δ then have no effect.
        **model_inputs: Further arguments of the model's forward, such as images.

    Returns:
        A policy of (B, L − 1) positions: position t predicts the label at t + 1. Where that label is −100, token 0 has
        all the mass.

    Raises:
        ValueError: If shapes do not fit, or the head cannot be read (it is quantised, offloaded, or has LoRA).
        RuntimeError: If the model's logits are not those of its head.
    """
    warn_about_dropout(model)
    targets = targets_of(input_ids, labels)
    scored = targets != -100
    policy, _ = capture_tokens(
        model,
        targets,
        temperature=temperature,
        top_k=top_k,
        mass_threshold=mass_threshold,
        truncation=truncation,
        input_ids=input_ids,
        attention_mask=attention_mask,
        **model_inputs,
    )
    token_ids = scatter(policy.token_ids, scored, fill=-1)
    log_probs = scatter(policy.log_probs, scored, fill=-torch.inf)
    for slots in (token_ids, log_probs):  # token 0 has all the mass where nothing is scored
        slots[..., 0].masked_fill_(~scored, 0)
    return dataclasses.replace(
        policy,
        token_ids=token_ids,
        log_probs=log_probs,
        tail_log_prob=scatter(policy.tail_log_prob, scored, fill=-torch.inf),
        slot=scatter(policy.slot, scored),
    )


def trust_region_step(
    model: nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    old: SparsePolicy,
    kl_bound: float | Tensor = 0.05,
    *,
    attention_mask: Tensor | None = None,
    temperature: float = 1.0,
    constraint: Constraint | None = None,
    pull: Pull = "projection",
    entropy: bool = False,
    **model_inputs: Any,
) -> TrustRegionStep:
    """Computes the trust region of one optimisation step of a model, without all its logits.

    Args:
        model: The model, as in [capture][troll.huggingface.capture].
        input_ids: The tokens of B sequences, (B, L).
        labels: (B, L), −100 where a token does not count.
        old: The old policy, (B, L − 1), of the same labels.
        kl_bound: ε > 0, in nats; a float, or a tensor that broadcasts to (B, L − 1). This argument,
            `constraint`, `pull` and `entropy` are those of [trust_region_step][troll.trust_region_step].
        attention_mask: (B, L); None for no padding.
        temperature: The sampling temperature, that of the capture.
        constraint: Groups of the (B, L − 1) tokens that share one multiplier; None gives each its own.
        pull: The form of the step's `regression`: "projection" or "proximal".
        entropy: Whether the step's `entropy` is computed.
        **model_inputs: Further arguments of the model's forward.

    Returns:
        A step of (B, L − 1) positions, for [troll_loss][troll.troll_loss] with the mask `labels[:, 1:] != -100` or a
        part of it; 0 where that is false.

    Raises:
        ValueError: If shapes do not fit, the temperature is not that of the capture, (on a CPU) the old policy is of
            other labels, a name is unknown, or the head cannot be read.
        RuntimeError: If the model's logits are not those of its head, or something rounds its outputs.
    """
    warn_about_dropout(model)
    targets = targets_of(input_ids, labels)
    old.check_positions(targets.shape)
    old.check_temperature(temperature)
    scored = targets != -100
    at = scored.nonzero(as_tuple=True)  # one wait for the device
    counted = old[at]
    # Positions are checked before the pass of the model.
    if isinstance(kl_bound, Tensor):
        kl_bound = kl_bound.to(targets.device)
        kl_bound = broadcast_bound(kl_bound, targets.shape, kl_bound)[at]
    constraint = None if constraint is None else constraint.flat(targets.shape)[scored.reshape(-1)]
    _check_sampled(counted, targets[at])
    new, _ = read_tokens(
        model,
        targets[at],
        at,
        targets.shape[1],
        counted,
        temperature=temperature,
        entropy=entropy,
        input_ids=input_ids,
        attention_mask=attention_mask,
        **model_inputs,
    )
    step = step_of_policy(new, counted, kl_bound, constraint=constraint, pull=pull)
    values = {name: scatter(x, scored) for name, x in vars(step).items() if x is not None}
    return dataclasses.replace(step, **values, scored=scored)


def _check_sampled(old: SparsePolicy, targets: Tensor) -> None:
    """Raises ValueError unless an old policy's sampled tokens are the targets, (N,)."""
    sampled = old.token_ids.gather(-1, old.slot.unsqueeze(-1)).squeeze(-1)
    # On a GPU this would wait for the device.
    if sampled.device.type == "cpu" and not torch.equal(sampled, targets):
        raise ValueError("old must be of the same labels, got other sampled tokens: index it like input_ids")


def scatter(values: Tensor, mask: Tensor, fill: float = 0) -> Tensor:
    """Puts (N, ...) values where a mask is true, and `fill` elsewhere; differentiable even if it is true nowhere."""
    empty = values.new_full((*mask.shape, *values.shape[1:]), fill)
    return empty.masked_scatter(mask.view(*mask.shape, *(1,) * (values.dim() - 1)), values)


def spread(policy: PackedPolicy, mask: Tensor) -> PackedPolicy:
    """Puts the policies of N tokens where a mask is true; other positions have no slot.

    Args:
        policy: The policies of N tokens, (N,).
        mask: (B, T) bool, true N times.
    """
    per_position: dict[str, Any] = {
        name: scatter(getattr(policy, name), mask) for name in ("counts", "tail_log_prob", "slot")
    }
    return dataclasses.replace(policy, **per_position)


def targets_of(input_ids: Tensor, labels: Tensor) -> Tensor:
    """The token after each position except for the last, (B, L − 1), −100 where it does not count.

    Raises:
        ValueError: If the shapes do not fit.
    """
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids must be (B, L), got {tuple(input_ids.shape)}")
    check_shape("labels", labels, input_ids.shape)
    return labels[:, 1:]


@torch.no_grad()
def capture_tokens(
    model: nn.Module,
    targets: Tensor,
    *,
    temperature: float,
    top_k: int,
    mass_threshold: float,
    truncation: Truncation | None = None,
    head_in_float32: bool = False,
    **inputs: Any,
) -> tuple[SparsePolicy, Tensor | None]:
    """Captures the policy of the N target tokens, (N,); the T targets follow the T positions before the last one.

    Args:
        model: The model, see [capture][troll.huggingface.capture].
        targets: The next tokens, (B, T), −100 where there is none.
        temperature: The sampling temperature, which divides the logits.
        top_k: K, at least 1.
        mass_threshold: δ in [0, 1).
        truncation: The sampler's truncation, or None.
        head_in_float32: Whether the head's product is computed in float32, outside autocast.
        **inputs: Arguments of the model's forward.

    Returns:
        The policy; and, with a truncation, whether each sampled token had to be added to the kept set, (N,) bool.
    """

    def read_own(head: LMHead, token_ids: Tensor) -> dict[str, Tensor]:
        found = captured(head, token_ids, top_k=top_k, mass_threshold=mass_threshold, truncation=truncation)
        return _tensors(found.policy) | ({} if found.added is None else {"added": found.added})

    at = (targets != -100).nonzero(as_tuple=True)  # one wait for the device
    request = ReadingRequest(targets[at], at, targets.shape[1] + 1, read_own, temperature, head_in_float32)
    output = forward_and_read(model, request, **inputs)
    added = output.tensors.pop("added", None)
    assert output.vocab_size is not None
    policy = SparsePolicy(
        **output.tensors,
        vocab_size=output.vocab_size,
        mass_threshold=mass_threshold if truncation is None else 0.0,
        truncated=truncation is not None,
        temperature=float(temperature),
    )
    return policy, added


def read_tokens(
    model: nn.Module,
    token_ids: Tensor,
    at: tuple[Tensor, ...],
    length: int,
    old: SparsePolicy,
    *,
    temperature: float,
    entropy: bool,
    head_in_float32: bool = False,
    **inputs: Any,
) -> tuple[PolicyOnSupport, ReadingOutput]:
    """The new policy on the outcomes that a step needs, (N,), differentiable; and the forward's output.

    The forward gets only integers, and the projection follows outside of it, since FSDP casts floating-point arguments
    to the parameters' dtype.

    Args:
        model: The model, see [capture][troll.huggingface.capture].
        token_ids: The sampled tokens, (N,).
        at: The row of each token and its place among the row's last T, (N,) and (N,).
        length: T, the last tokens of each row, which include the sampled ones.
        old: The old policy of the N tokens, (N,).
        temperature: The sampling temperature, which divides the logits.
        entropy: Whether the entropy over the vocabulary is read.
        head_in_float32: Whether the head's product is computed in float32, outside autocast.
        **inputs: Arguments of the model's forward.
    """

    def read_new(head: LMHead, sampled: Tensor) -> dict[str, Tensor]:
        return _tensors(read(head, old.token_ids.to(sampled.device), entropy=entropy))

    request = ReadingRequest(token_ids, at, length + 1, read_new, temperature, head_in_float32)
    output = forward_and_read(model, request, **inputs)
    if output.vocab_size != old.vocab_size:
        raise ValueError(f"old must be of the model's {output.vocab_size} tokens, got {old.vocab_size}")
    return PolicyOnSupport(**output.tensors, vocab_size=old.vocab_size, temperature=temperature), output


def _tensors(policy: SparsePolicy | PolicyOnSupport) -> dict[str, Tensor]:
    """The tensors of a policy by name: the output of a forward, where DDP and FSDP look for nothing else."""
    return {name: value for name, value in vars(policy).items() if isinstance(value, Tensor)}
