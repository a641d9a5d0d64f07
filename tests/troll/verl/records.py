from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import Tensor

from troll import PackedPolicy, SparsePolicy
from troll.verl.records import to_record


def records_of(policy: PackedPolicy, lengths: Sequence[int]) -> list[Tensor]:
    """A record for each of the sequences whose (N,) positions follow one another in the policy."""
    return [to_record(policy[start:end]) for start, end in pairwise([0, *accumulate(lengths)])]


def joined(policies: Sequence[SparsePolicy]) -> SparsePolicy:
    """The policies (T,) of several sequences, one after another."""
    return PackedPolicy.cat([PackedPolicy.of(policy) for policy in policies]).unpack()
