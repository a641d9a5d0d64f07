"""Old policies in verl's batches: one checked record for each sequence, and where its tokens stand in a pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed import ProcessGroup
from verl.utils import tensordict_utils as tu

from troll import PackedPolicy, SparsePolicy
from troll.trust_region.policy.wire import from_records, to_records

#: The field of the batch, (B, words) int32: nested, since sequences differ in length and in how peaked they are.
OLD_POLICIES = "old_policies"


@dataclass(frozen=True)
class ResponseTokens:
    """The response tokens of a micro-batch among the token positions that this process computed.

    A micro-batch has N response tokens, sequence after sequence. Under sequence or context parallelism a process holds
    n of them, in any order; without, all.

    Attributes:
        rows: (n,), the positions in this process's logits that predict a response token.
        numbers: (n,), which of the N tokens each predicts.
        total: N.
        group: The processes that share the micro-batch's tokens; None if this one holds all.
    """

    rows: Tensor
    numbers: Tensor
    total: int
    group: ProcessGroup | None = None

    @classmethod
    def of(cls, places: Tensor, total: int, group: ProcessGroup | None = None) -> ResponseTokens:
        """From `response_places` as this process holds them, flattened; waits for the device once."""
        (rows,) = places.nonzero(as_tuple=True)
        return cls(rows, places[rows] - 1, total, group)

    def whole(self, values: Tensor) -> Tensor:
        """(n, ...) values of this process's tokens, to those of all (N, ...); without gradient."""
        if self.group is None:
            return values
        whole = values.new_zeros(self.total, *values.shape[1:]).index_copy_(0, self.numbers, values)
        torch.distributed.all_reduce(whole, group=self.group)
        return whole

    def on_all_positions(self, values: Tensor, positions: int) -> Tensor:
        """(n,) values to (positions,), 0 where no response token is predicted; differentiable."""
        return values.new_zeros(positions).index_copy(0, self.rows, values)


def response_places(data: TensorDict) -> Tensor:
    """For every position of the packed micro-batch, 1 + the number of the response token that it predicts; else 0.

    The last prompt token predicts the first response token, and the last response token predicts nothing.

    Returns:
        (positions,) int64. Zeros are what verl pads packs with, so padding predicts nothing either.

    Raises:
        ValueError: If prompts and responses are padded, as verl's legacy trainer has them.
    """
    if not (data["prompts"].is_nested and data["responses"].is_nested):
        raise ValueError("prompts and responses must be nested tensors, as verl's v1 trainer makes them")
    prompts, responses = (data[name].offsets().diff() for name in ("prompts", "responses"))
    lengths = prompts + responses
    positions = data["input_ids"].values().shape[0]
    sequence = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths, output_size=positions)
    # The position within the sequence, counted from the one that predicts its first response token.
    within = torch.arange(positions, device=lengths.device) - (lengths.cumsum(0) - lengths + prompts - 1)[sequence]
    predicts = (within >= 0) & (within < responses[sequence])
    return torch.where(predicts, (responses.cumsum(0) - responses)[sequence] + within + 1, 0)


def as_field(policy: SparsePolicy, data: TensorDict) -> Tensor:
    """A policy of the N response tokens of a micro-batch, as the field `OLD_POLICIES`."""
    lengths = data["responses"].offsets().diff().tolist()
    return torch.nested.as_nested_tensor(to_records(PackedPolicy.of(policy), lengths), layout=torch.jagged)


def from_field(data: TensorDict, *, anchor: str, vocab_size: int = 1) -> PackedPolicy:
    """The old policies of a micro-batch, (N,): captured by the old-policy pass, or reported by the inference engine.

    Args:
        data: The micro-batch.
        anchor: "old" or "rollout".
        vocab_size: V of the LM head. It may be padded with tokens that an inference engine knows nothing of, and that
            have no mass.

    Raises:
        CorruptPolicy: If a record is damaged.
        ValueError: If there are none, or they are not of the response tokens.
    """
    records = _reported(data, vocab_size) if anchor == "rollout" else _captured(data)
    responses = data["responses"].values()
    policy = from_records([record.to(responses.device) for record in records])
    sampled = policy.token_ids[policy.offsets[:-1] + policy.slot]
    if not torch.equal(sampled, responses.to(sampled.dtype)):
        raise ValueError(
            f"the batch's old policies are of other tokens ({len(sampled)}) than its responses ({len(responses)}): "
            "they are not of the same rollout"
        )
    if anchor == "rollout":
        policy = dataclasses.replace(policy, vocab_size=max(policy.vocab_size, vocab_size))
    return policy


def _captured(data: TensorDict) -> list[Tensor]:
    if OLD_POLICIES not in data:
        raise ValueError(
            f"the batch has no {OLD_POLICIES}: its old log-probabilities were not computed by an engine of troll.verl"
        )
    return list(data[OLD_POLICIES].unbind())


def _reported(data: TensorDict, vocab_size: int) -> list[Tensor]:
    """The records that came with the completions.

    A sequence without a token that counts needs none: verl fills batches up with copies of a sample whose response is
    one masked token, and completions that were aborted are empty. Their policies are certain of what is there.
    """
    counts = [bool(mask.any()) for mask in data["response_mask"].unbind()]
    fields: list[Mapping[str, Any]] = tu.get(data, "extra_fields", default=[{}] * len(counts))
    records = [field.get(OLD_POLICIES) if count else None for field, count in zip(fields, counts, strict=True)]
    missing = sum(counts) - sum(record is not None for record in records)
    if missing:
        raise ValueError(
            f"{missing} of the batch's sequences came without their top-K log-probabilities, which "
            "policy_loss.anchor=rollout needs: see docs/verl.md for the rollouts that report them, or set anchor=old"
        )
    real = [record for record in records if record is not None]
    none = torch.empty(0)
    like = from_records(real[:1]) if real else PackedPolicy(none, none, none, none, none, 1, vocab_size, 0.0)
    responses = data["responses"].unbind()
    return [
        _certain(response, like) if record is None else record
        for record, response in zip(records, responses, strict=True)
    ]


def _certain(token_ids: Tensor, like: PackedPolicy) -> Tensor:
    """A record of policies that are certain of these tokens, captured as another was."""
    ids = token_ids.cpu().int()
    policy = dataclasses.replace(
        like,
        token_ids=ids,
        log_probs=torch.zeros(len(ids)),
        counts=torch.ones_like(ids),
        tail_log_prob=torch.full((len(ids),), -torch.inf),
        slot=torch.zeros_like(ids),
    )
    (record,) = to_records(policy, [len(ids)])
    return record
