"""The paths of the matrix: every way from logits to an old policy and a step."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import troll
from tests.troll.trust_region.cases import Array, tensor
from tests.troll.trust_region.matrix_cases import CASES, Case, upstream
from troll import Constraint, LMHead, Logits, PackedPolicy, SparsePolicy
from troll.trust_region.kernels import KERNELS_VARIABLE
from troll.trust_region.paper import paper_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Group = Any


class Made(NamedTuple):
    """A source of some logits.

    Attributes:
        source: The source.
        leaves: What it is made of.
        pulled_back: From the gradient of the logits (N, V) to those of the leaves; of errors, if `size` is abs.
    """

    source: Any
    leaves: list[Tensor]
    pulled_back: Callable[..., list[Array]]


@dataclass(frozen=True)
class Path:
    """A way from logits to a step.

    Attributes:
        make: Makes a source of logits (N, V) in the path's dtype; of a process's slice of them, in a group.
        dtype: The dtype of the leaves.
        kernels: Who computes.
        entropy: Whether the entropy is read, on another way through a tile.
        carried: What becomes of the old policy between capture and step.
        read_first: The step gets the policy that was read at the old tokens.
        paper: The step is the paper's.
        one_backward: All outputs are differentiated at once: where a second time is refused, or slow.
        takes: Whether there is such a source of a case's logits, and the path may matter to it.
        error: Roundings of a logit on the way, of which four are allowed for anyway.
    """

    make: Callable[[Tensor, Group], Made]
    dtype: torch.dtype = torch.float64
    kernels: str = "torch"
    entropy: bool = False
    carried: Callable[[SparsePolicy], SparsePolicy] = lambda old: old
    read_first: bool = False
    paper: bool = False
    one_backward: bool = False
    takes: Callable[[Case], bool] = lambda case: True
    error: float = 1.0

    @property
    def computed(self) -> torch.dtype:
        """The dtype of all that comes out."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def unit(self) -> float:
        """Half the distance of 1 to the next number that the path computes with."""
        return torch.finfo(self.computed).eps / 2 * self.error


class Found(NamedTuple):
    """What came of a case on a path.

    Attributes:
        old: The old policy.
        values: The fields of the step, (N,) each.
        gradients: Those of the leaves, of Σ upstream · output for each output; or of all together, for "all".
    """

    old: SparsePolicy
    values: dict[str, Tensor]
    gradients: dict[str, list[Tensor]]


def run(path: Path, case: Case, group: Group = None) -> Found:
    """Captures, takes a step and differentiates."""
    with mock.patch.dict(os.environ, {KERNELS_VARIABLE: path.kernels}):
        before, after = (path.make(tensor(logits, path.dtype).to(DEVICE), group) for logits in (case.old, case.new))
        shape = before.source.shape

        def placed(numbers: Array) -> Tensor:
            return torch.from_numpy(numbers).to(DEVICE).view(shape)

        old = troll.capture(
            before.source,
            placed(case.tokens),
            top_k=case.top_k,
            mass_threshold=case.mass_threshold,
            truncation=case.truncation,
        )
        constraint = None
        if case.groups is not None and case.weights is not None:
            constraint = Constraint(placed(case.groups), placed(case.weights), 2)

        source, kl_bound = after.source, placed(case.kl_bound)
        if path.paper:
            step = paper_step(source.logits, old, kl_bound)
        else:
            step = troll.trust_region_step(
                troll.log_probs_at(source, old.token_ids) if path.read_first else source,
                path.carried(old),
                kl_bound,
                constraint=constraint,
                pull=case.pull,
                entropy=path.entropy,
            )
        outputs = {
            name: (placed(arriving).to(step.log_ratio.dtype) * getattr(step, name)).sum()
            for name, arriving in upstream(case).items()
            if getattr(step, name) is not None
        }
        if path.one_backward:
            outputs = {"all": torch.stack(list(outputs.values())).sum()}
        gradients = {name: _gradients(output, after.leaves) for name, output in outputs.items()}
        values = {name: x.detach().flatten().cpu() for name, x in vars(step).items() if x is not None}
        return Found(old.view((len(case.tokens),)).to("cpu"), values, gradients)


def _gradients(output: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return [x.cpu() for x in torch.autograd.grad(output, leaves, retain_graph=True, materialize_grads=True)]


# Sources

FILL = 7.0


def _part(z: Tensor, dim: int, group: Group) -> Tensor:
    """This process's slice of the vocabulary."""
    return z if group is None else z.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


def logits(z: Tensor, group: Group) -> Made:
    leaf = _part(z, -1, group).clone().requires_grad_()
    return Made(Logits(leaf, temperature=None, vocab_group=group), [leaf], lambda g, size=same: [g])


def donated(z: Tensor, group: Group) -> Made:
    """The leaf is not what is donated: a model's logits are no leaf."""
    leaf = z.clone().requires_grad_()
    return Made(Logits(leaf * 1, donate=True), [leaf], lambda g, size=same: [g])


def view(z: Tensor, group: Group) -> Made:
    """`logits[:, :-1]` of two sequences."""
    rows = z.view(2, -1, z.shape[-1])
    leaf = torch.cat([rows, z.new_full((2, 1, z.shape[-1]), FILL)], 1).requires_grad_()

    def pulled_back(g: Array, size: Callable[[Array], Array] = same) -> list[Array]:
        g = g.reshape(2, -1, g.shape[-1])
        return [np.concatenate([g, np.zeros((2, 1, g.shape[-1]))], 1)]

    return Made(Logits(leaf[:, :-1]), [leaf], pulled_back)


def apart(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that lie among as many others, and where."""
    others = torch.full_like(x, FILL)
    return torch.stack([others, x], 1).flatten(0, 1).requires_grad_(), 2 * torch.arange(len(x), device=x.device) + 1


def _scattered(g: Array) -> Array:
    return np.stack([np.zeros_like(g), g], 1).reshape(-1, g.shape[-1])


def rows(z: Tensor, group: Group) -> Made:
    leaf, index = apart(z)
    return Made(Logits(leaf, rows=index), [leaf], lambda g, size=same: [_scattered(g)])


def scaled(z: Tensor, group: Group) -> Made:
    """Powers of two, which round nothing."""
    leaf = (z / 2).requires_grad_()
    return Made(Logits(leaf, temperature=2.0, scale=4.0), [leaf], lambda g, size=same: [2 * g])


def _capped(z: Tensor) -> tuple[Tensor, float, Array]:
    """What the softcap, half as large again as the largest logit, turns into z; and its slope."""
    cap = 1.5 * max(1.0, float(z.abs().amax())) if z.numel() else 1.0
    return cap * torch.atanh(z.double() / cap).to(z), cap, (1 - (z.double() / cap) ** 2).cpu().numpy()


def capped(z: Tensor, group: Group) -> Made:
    raw, cap, slope = _capped(z)
    leaf = raw.requires_grad_()
    return Made(Logits(leaf, softcap=cap), [leaf], lambda g, size=same: [slope * g])


def head(z: Tensor, group: Group, *, softcap: bool = False, lifted: bool = False, among: bool = False) -> Made:
    """The logits are hidden states that an identity multiplies; a bias excludes the tokens that no row allows.

    Args:
        z: The logits.
        group: The processes, or None.
        softcap: Whether there is a softcap, and no bias.
        lifted: Whether the bias moves other logits too, which only float64 does exactly.
        among: Whether the rows lie among others.
    """
    fine = ~(z.isnan() | (z == torch.inf)).any(-1) & (z > -torch.inf).any(-1)
    excluded = (z[fine] == -torch.inf).all(0) & bool(len(z))
    raw, cap, slope = _capped(z) if softcap else (z, None, np.ones(()))
    bias = (torch.arange(z.shape[-1], device=z.device) % 5 / 4).to(z) * lifted
    hidden = torch.where(excluded, 0.0, raw - bias)
    states = hidden.double().cpu().numpy()
    bias = bias.masked_fill(excluded, -torch.inf)
    weight = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
    leaves = [x.requires_grad_() for x in (hidden, _part(weight, 0, group).clone(), _part(bias, 0, group).clone())]
    index = None
    if among:
        leaves[0], index = apart(hidden.detach())
    source = LMHead(leaves[0], leaves[1], None if softcap else leaves[2], softcap=cap, rows=index, vocab_group=group)

    def pulled_back(g: Array, size: Callable[[Array], Array] = same) -> list[Array]:
        g = slope * g
        with np.errstate(invalid="ignore"):  # 0 · NaN of states that are no distribution
            of_weight = g.T @ size(states)
        return [_scattered(g) if among else g, of_weight, *([] if softcap else [g.sum(0)])]

    return Made(source, leaves[: 2 if softcap else 3], pulled_back)


def same(x: Array) -> Array:
    return x


def _head(**settings: bool) -> Callable[[Tensor, Group], Made]:
    return lambda z, group: head(z, group, **settings)


def packed(old: SparsePolicy) -> SparsePolicy:
    return PackedPolicy.of(old).unpack()


def joined(old: SparsePolicy) -> SparsePolicy:
    """Put together again from parts of the packed form."""
    parts = PackedPolicy.of(old)
    return PackedPolicy.cat([parts[:1], parts[1:]]).unpack()


def by_column(case: Case) -> bool:
    """A head's weight is an identity here, which is large where the vocabulary is."""
    return case.excludes_by_column and case.old.shape[-1] <= 512


def finite(case: Case) -> bool:
    return case.excludes_nothing


def finite_by_column(case: Case) -> bool:
    return finite(case) and by_column(case)


def of(*names: str) -> Callable[[Case], bool]:
    """Takes some cases by name."""
    return lambda case: any(case is CASES[name] for name in names)


#: What shows where the form of the logits goes wrong.
FEW = ("peaked", "not a distribution")

#: For forms of the logits, or of the old policy between capture and step, which change no number.
FORMS = (
    *("peaked", "masked", "not a distribution", "below the floor", "ties", "truncated by top-k", "equal"),
    *("equal, near-deterministic", "shared bound, mean", "wide, ties", "no positions"),
)

#: Cases that are no other ones to the paper's step, with multipliers within its range.
PAPER = (
    *("peaked", "flat", "masked", "masked columns", "below the floor", "below the floor, inside", "outside the top K"),
    *("ties", "everything", "one slot", "two outcomes", "equal", "no positions"),
)

#: The interpreter takes a second for what torch does in 20 ms. Kernels have no part in a shared bound, do not know what
#: truncates a policy, and choose as many tokens of a small vocabulary as of a large one.
NOT_OF_TRITON = (
    *("shared bound, mean", "shared bound, sum", "shared bound, proximal", "ties, more than a slice"),
    *("truncated by top-p", "truncated by min-p first", "truncated, proximal", "equal, truncated"),
    *("equal, near-deterministic", "equal, proximal", "equal, masked", "equal, below the floor", "masked"),
    "outside the top K",
)
OF_HEAD = (*FEW, "masked columns", "ties", "truncated by top-k", "everything", "equal", "no positions")


def forms_by_column(case: Case) -> bool:
    return of(*FORMS)(case) and by_column(case)


FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16

PATHS: dict[str, Path] = {
    "logits": Path(logits),
    "logits, entropy": Path(logits, entropy=True),
    "logits, float32": Path(logits, FLOAT32),
    "logits, bfloat16": Path(logits, BFLOAT16, entropy=True),
    "logits, float16": Path(logits, FLOAT16, takes=of(*FORMS)),
    "view": Path(view, entropy=True, takes=of(*FORMS)),
    "rows": Path(rows, FLOAT32, takes=of(*FORMS)),
    "scaled": Path(scaled, BFLOAT16, entropy=True),
    "softcap": Path(capped, takes=finite, entropy=True),
    "donated": Path(donated, BFLOAT16, takes=of(*FORMS), one_backward=True),
    "head": Path(_head(lifted=True), takes=by_column),
    "head, entropy": Path(_head(lifted=True), takes=by_column, entropy=True),
    "head, float32": Path(_head(), FLOAT32, takes=by_column, entropy=True),
    "head, bfloat16": Path(_head(), BFLOAT16, takes=by_column),
    "head, float16": Path(_head(), FLOAT16, takes=forms_by_column, entropy=True),
    "head, softcap": Path(_head(softcap=True), takes=finite_by_column),
    "rows of a head": Path(_head(among=True), FLOAT32, takes=forms_by_column),
    "packed": Path(logits, takes=of(*FORMS), carried=packed),
    "packed, joined": Path(logits, FLOAT32, takes=of(*FORMS), carried=joined),
    "read first": Path(logits, FLOAT32, read_first=True),
    "read first, head": Path(_head(), read_first=True, takes=by_column),
    "paper": Path(logits, paper=True, takes=of(*PAPER)),
    "paper, float32": Path(logits, FLOAT32, paper=True, takes=of("peaked", "masked columns")),
}

TRITON: dict[str, Path] = {
    "triton": Path(logits, FLOAT32, takes=lambda case: not of(*NOT_OF_TRITON)(case)),
    "triton, entropy": Path(logits, FLOAT32, takes=of("peaked", "masked columns", "truncated by top-k"), entropy=True),
    "triton, bfloat16": Path(logits, BFLOAT16, takes=of("peaked")),
    "triton, view": Path(view, FLOAT16, takes=of(*FEW)),
    "triton, rows": Path(rows, FLOAT32, takes=of("peaked")),
    "triton, donated": Path(donated, BFLOAT16, takes=of(*FEW)),
    "triton, softcap": Path(capped, FLOAT32, takes=of("peaked"), error=6.0),
    "triton, scaled": Path(scaled, BFLOAT16, takes=of("peaked"), entropy=True),
    "triton, head": Path(_head(), FLOAT32, takes=of(*OF_HEAD), entropy=True),
    "triton, rows of a head": Path(_head(among=True), BFLOAT16, takes=of(*FEW)),
}
TRITON = {name: dataclasses.replace(path, kernels="triton", one_backward=True) for name, path in TRITON.items()}


def in_slices(case: Case) -> bool:
    return case.old.shape[-1] % 8 == 0


def head_in_slices(case: Case) -> bool:
    return in_slices(case) and by_column(case)


#: Run by every process of a group, with its slice of the vocabulary: reading/test_vocabulary.py.
SLICED: dict[str, Path] = {
    "sliced": Path(logits, takes=in_slices, entropy=True),
    "sliced, float32": Path(logits, FLOAT32, takes=of(*FEW)),
    "sliced, bfloat16": Path(logits, BFLOAT16, takes=of(*FEW), entropy=True),
    "sliced head": Path(_head(lifted=True), takes=of(*FEW)),
    "sliced head, entropy": Path(_head(lifted=True), takes=head_in_slices, entropy=True),
    "sliced head, bfloat16": Path(_head(), BFLOAT16, takes=of(*FEW)),
}
if importlib.util.find_spec("triton") is not None:
    by_triton: dict[str, Any] = {"kernels": "triton", "entropy": True, "one_backward": True}
    SLICED["sliced head, triton"] = Path(_head(), FLOAT32, takes=of("nearly disjoint"), **by_triton)
