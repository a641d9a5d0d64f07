"""The old policies of verl's batches, captured or reported, and the positions of their tokens in a pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import pairwise

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed import ProcessGroup

from troll import PackedPolicy, SparsePolicy
from troll.verl.records import from_records, without_policies
from troll.verl.seam import tu

#: The field of a batch with an inference engine's reports, (B, words) int32: nested, one record for each sequence.
OLD_POLICIES = "old_policies"


@dataclass(frozen=True)
class ResponseTokens:
    """The response tokens of a micro-batch among the token positions that this process computed.

    A micro-batch has N response tokens, sequence after sequence. Under sequence or context parallelism a process holds
    n of them, in any order; otherwise all.

    Attributes:
        rows: (n,), the positions in this process's logits that predict a response token.
        numbers: (n,), the number of the token that each predicts, among the N.
        total: N, the response tokens of the micro-batch.
        group: The processes that share the micro-batch's tokens; None if this one holds all.
    """

    rows: Tensor
    numbers: Tensor
    total: int
    group: ProcessGroup | None = None

    @classmethod
    def of(cls, places: Tensor, total: int, group: ProcessGroup | None = None) -> ResponseTokens:
        """Finds the tokens from this process's part of `response_places`, flattened; waits for the device once.

        The places number the response tokens from 1, and are 0 where none is predicted.
        """
        (rows,) = places.nonzero(as_tuple=True)
        return cls(rows, places[rows] - 1, total, group)

    def whole(self, values: Tensor) -> Tensor:
        """Collects (n, ...) values of each process's tokens into (N, ...), without gradient."""
        if self.group is None:
            return values
        whole = values.new_zeros(self.total, *values.shape[1:]).index_copy_(0, self.numbers, values)
        torch.distributed.all_reduce(whole, group=self.group)
        return whole

    def largest(self, number: int) -> int:
        """The largest of a number over the processes that share the micro-batch."""
        if self.group is None:
            return number
        found = torch.tensor(number, device=self.rows.device)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=self.group)
        return int(found)

    def on_all_positions(self, values: Tensor, positions: int) -> Tensor:
        """Spreads (n,) values to (positions,), 0 where no response token is predicted; differentiable."""
        return values.new_zeros(positions).index_copy(0, self.rows, values)


def response_places(data: TensorDict) -> Tensor:
    """For every position of the packed micro-batch, 1 + the number of the response token that it predicts; else 0.

    The last prompt token predicts the first response token, and the last response token predicts nothing.

    Returns:
        (positions,) int64. Zeros are what verl pads packs with, so padding predicts nothing either.

    Raises:
        ValueError: If prompts and responses are padded, as by verl's legacy trainer.
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


class OldPolicyStore:
    """The old policies of the last rollout that this process captured, on the host.

    verl balances a batch before it is scored, and sends each sequence to the same processes for its updates. So old
    policies stay where they were captured, and none is sent.
    """

    def __init__(self) -> None:
        self._policies: dict[Hashable, PackedPolicy] = {}

    def keep(self, policy: SparsePolicy, data: TensorDict) -> None:
        """Keeps the policies of a micro-batch.

        Args:
            policy: The policies of its response tokens, (N,).
            data: The micro-batch.
        """
        packed = PackedPolicy.of(policy).to("cpu")
        edges = pairwise(data["responses"].offsets().tolist())
        for key, (start, end) in zip(_sequences(data), edges, strict=True):
            self._policies[key] = packed[start:end]

    def of(self, data: TensorDict) -> PackedPolicy:
        """The old policies of a micro-batch, (N,), on the device of its tokens.

        Raises:
            ValueError: If some of its sequences were not captured here.
        """
        found = [self._policies.get(key) for key in _sequences(data)]
        policies = [policy for policy in found if policy is not None]
        if len(policies) < len(found):
            raise ValueError(
                f"{len(found) - len(policies)} of {len(found)} sequences of a batch have no old policy in this process"
                ": it has to score them before their update"
            )
        return PackedPolicy.cat(policies).to(data["responses"].device)


def _sequences(data: TensorDict) -> list[Hashable]:
    """The keys of a micro-batch's sequences: two with the same key answer one prompt with the same tokens."""
    responses = data["responses"].cpu().unbind()
    prompts = data["prompts"].cpu().unbind()
    uids = tu.get(data, "uid", default=[None] * len(responses))  # images are part of a prompt, but not of its tokens
    return [
        (str(uid), prompt.numpy().tobytes(), response.numpy().tobytes())
        for uid, prompt, response in zip(uids, prompts, responses, strict=True)
    ]


def reported_policies(data: TensorDict, vocab_size: int, *, truncated: bool = False) -> PackedPolicy:
    """The old policies of a micro-batch, (N,), as the inference engine reported them.

    Unreported tokens have no slots, until `fill_unreported`. Tokens that do not count need no report: their policy
    gives them probability 1.

    Args:
        data: The micro-batch.
        vocab_size: V of the LM head. It may be padded with tokens that the inference engine lacks; they have no mass.
        truncated: Whether the rollout used truncated sampling.

    Raises:
        ValueError: If records are missing, damaged, of other tokens or another temperature, or of policies of the other
            kind.
    """
    responses = data["responses"].values()
    policy = from_records([record.to(responses.device) for record in _records(data)])
    if policy.truncated != truncated and len(policy.token_ids):
        kinds = ("whole", "truncated") if truncated else ("truncated", "whole")
        raise ValueError(
            f"the batch's old policies are {kinds[0]}, and those of the rollout's top_p and top_k are {kinds[1]}: its "
            "agent loop must sample with both as they are configured"
        )
    temperature = data["temperature"]
    if not isinstance(temperature, Tensor) and policy.temperature not in (None, temperature):
        raise ValueError(
            f"the batch's tokens were sampled at temperature {policy.temperature}, and that of the rollout is "
            f"{temperature}: its agent loop must sample as it is configured"
        )
    known = policy.counts > 0
    sampled = policy.token_ids[(policy.offsets[:-1] + policy.slot)[known]]
    if known.shape != responses.shape or not torch.equal(sampled, responses[known].to(sampled.dtype)):
        raise ValueError(
            f"the batch's old policies are of other tokens ({len(known)}) than its responses ({len(responses)}): "
            "they are not of the same rollout"
        )
    policy = dataclasses.replace(policy, vocab_size=max(policy.vocab_size, vocab_size), truncated=truncated)
    return _with_certain_tokens(policy, responses, ~known & ~data["response_mask"].values().bool())


def fill_unreported(old: SparsePolicy, own: SparsePolicy) -> SparsePolicy:
    """Fills unreported positions with the network's own policies.

    The engine's distribution at such a token is not known. So the trust region is around the network at the update: the
    token's ratio is 1, and its gradient is the plain policy gradient.

    Args:
        old: The reported policies, (n,), without slots where nothing was reported.
        own: The policies captured from the logits of the update, (n,).
    """
    (unreported,) = (~old.used.any(-1)).nonzero(as_tuple=True)
    return old.with_positions(unreported, own[unreported])


def _records(data: TensorDict) -> list[Tensor]:
    """The record that came with each completion.

    A sequence without a token that counts needs none, and may have another's: verl fills batches up with copies of a
    sample whose response is one masked token, and aborted completions are empty.
    """
    counts = [bool(mask.any()) for mask in data["response_mask"].unbind()]
    if OLD_POLICIES in data:
        found = data[OLD_POLICIES].unbind()
    else:  # a rollout that no agent loop of `troll.verl.agent_loop` asked
        found = [fields.get(OLD_POLICIES) for fields in tu.get(data, "extra_fields", default=[{}] * len(counts))]
    missing = sum(count and record is None for record, count in zip(found, counts, strict=True))
    if missing:
        raise ValueError(
            f"{missing} of the batch's sequences came without their top-K log-probabilities, which "
            "policy_loss.anchor=rollout needs: see docs/verl.md for the rollouts that report them, or set anchor=old"
        )
    return [
        record if count else without_policies(len(response))
        for record, count, response in zip(found, counts, data["responses"].unbind(), strict=True)
    ]


def _with_certain_tokens(policy: PackedPolicy, token_ids: Tensor, which: Tensor) -> PackedPolicy:
    """Gives the token at some positions (N,) without slots probability 1."""
    counts = policy.counts + which.int()
    position = torch.arange(len(counts), device=counts.device)
    old = position.repeat_interleave(policy.counts, output_size=len(policy.token_ids))
    order = torch.cat([old, position[which]]).argsort(stable=True)
    return dataclasses.replace(
        policy,
        token_ids=torch.cat([policy.token_ids, token_ids[which].to(policy.token_ids.dtype)])[order],
        log_probs=torch.cat([policy.log_probs, policy.log_probs.new_zeros(len(order) - len(old))])[order],
        counts=counts,
        tail_log_prob=policy.tail_log_prob.masked_fill(which, -torch.inf),
    )
