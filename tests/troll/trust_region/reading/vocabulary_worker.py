"""One process of test_vocabulary: every case on its slice of the vocabulary, and what came of it in a file."""

import datetime
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import troll
from tests.troll.trust_region.cases import FAMILIES, pairs
from troll import LMHead, Logits, SparsePolicy, Truncation
from troll.trust_region.kernels import VARIABLE
from troll.trust_region.reading import head as head_module
from troll.trust_region.reading import logits as logits_module
from troll.trust_region.reading.capture import capture_with_entropy
from troll.trust_region.reading.source import LogitsSource

Group = dist.ProcessGroup | None
Result = dict[str, Tensor]

#: What would show if anything else were exchanged.
COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
    *("broadcast", "broadcast_object_list", "gather", "reduce", "reduce_scatter", "reduce_scatter_tensor", "barrier"),
)

HIDDEN = 16

#: The outputs whose gradients are compared, each by itself.
DIFFERENTIABLE = ("log_ratio", "log_prob", "regression", "entropy", "kept_log_mass")


@dataclass(frozen=True)
class Case:
    """An old and a new policy of some tokens, and how they are captured and projected."""

    family: str
    vocab_size: int
    top_k: int
    mass_threshold: float = 1e-5
    dtype: torch.dtype = torch.float64
    kl_bound: float = 0.05
    from_hidden: bool = False
    transform: tuple[tuple[str, Any], ...] = ()
    kernels: str = "torch"
    rows: int = 12
    seed: int = 0
    pull: str = "projection"
    truncation: Truncation | None = None

    def logits(self) -> tuple[Tensor, Tensor]:
        """(old, new), (rows, V) in float64."""
        family = "peaked" if self.family in BROKEN else self.family
        if family in FAMILIES:
            old, new = map(torch.from_numpy, pairs(family, self.rows, self.vocab_size, self.seed))
        else:  # almost everything ties
            generator = np.random.default_rng(self.seed)
            old, new = torch.from_numpy(generator.integers(3, size=(2, self.rows, self.vocab_size)).astype(float))
        if self.family in BROKEN:
            BROKEN[self.family](old, new)
        return old, new

    def tokens(self, old: Tensor) -> Tensor:
        """Sampled from the old policy; any token that it does not rule out in every third row."""
        generator = torch.Generator().manual_seed(self.seed)
        weights = old.nan_to_num(0.0, 0.0, -torch.inf).softmax(-1).nan_to_num(1.0)
        weights[::3] = (weights[::3] > 0).to(weights.dtype)
        return torch.multinomial(weights, 1, generator=generator).squeeze(-1)

    def upstream(self, name: str) -> Tensor:
        """A gradient that arrives at an output, (rows,)."""
        return torch.from_numpy(np.random.default_rng([self.seed, *name.encode()]).standard_normal(self.rows))

    def head(self) -> dict[str, Tensor]:
        """Hidden states of both policies, and the head; in the family "masked" a bias rules out half the vocabulary."""
        generator = torch.Generator().manual_seed(self.seed)
        sizes = {
            "old_hidden": (self.rows, HIDDEN),
            "hidden": (self.rows, HIDDEN),
            "weight": (self.vocab_size, HIDDEN),
            "bias": (self.vocab_size,),
        }
        if self.family == "ties":
            return {name: torch.randint(3, size, generator=generator).double() for name, size in sizes.items()}
        parts = {name: torch.randn(size, generator=generator, dtype=torch.float64) for name, size in sizes.items()}
        parts["hidden"] = parts["old_hidden"] + 0.3 * parts["hidden"]
        if self.family == "masked":
            parts["bias"][: self.vocab_size // 2] = -torch.inf
            parts["bias"][self.vocab_size - 2] = -torch.inf
        if self.family == "not a distribution":
            parts["hidden"][1, 3] = torch.nan
            parts["old_hidden"][2, 3] = torch.nan
        return parts


def _empty_slices(old: Tensor, new: Tensor) -> None:
    """Quarters of the vocabulary without any mass: in both policies, in one of them, or all but one."""
    quarter = old.shape[-1] // 4
    old[0, :quarter], new[0, :quarter] = -torch.inf, -torch.inf
    new[1, quarter : 2 * quarter] = -torch.inf
    old[2, -quarter:] = -torch.inf
    old[3, quarter:], new[3, quarter:] = -torch.inf, -torch.inf
    old[4, :-quarter], new[4, :-quarter] = -torch.inf, -torch.inf
    old[5:7, :] = -torch.inf
    old[5, -1], old[6, 0] = 0.0, 0.0  # one token alone
    new[6, 1:] = -torch.inf


def _not_a_distribution(old: Tensor, new: Tensor) -> None:
    new[0, 0], new[1, -1], new[2] = torch.nan, torch.inf, -torch.inf
    old[3, 0], old[4, -1], old[5] = torch.nan, torch.inf, -torch.inf
    new[6], new[7, : new.shape[-1] // 2] = torch.nan, torch.nan


BROKEN: dict[str, Callable[[Tensor, Tensor], None]] = {
    "empty slices": _empty_slices,
    "not a distribution": _not_a_distribution,
}


def random_cases(count: int, *, from_hidden: bool) -> list[Case]:
    """Of every family, in every combination that comes up."""
    generator = np.random.default_rng(7 + from_hidden)
    families = ["peaked", "masked", "ties"] if from_hidden else [*FAMILIES, "ties", "empty slices"]
    transforms: list[tuple[tuple[str, Any], ...]] = [
        (),
        (("temperature", 0.7), ("softcap", 6.0), ("scale", 1.5)),
        (("entropy", True),),
        (("entropy", True), ("temperature", 1.4)),
    ]

    def choose(options: Any) -> Any:
        return options[generator.integers(len(options))]

    return [
        Case(
            families[seed % len(families)],
            choose([4, 12, 60, 256, 2048]),
            choose([1, 3, 8, 64]),
            choose([0.0, 1e-5, 1e-2]),
            choose([torch.float64, torch.float32]),
            choose([1e-3, 0.05, 0.5]),
            from_hidden,
            choose(transforms),
            seed=seed,
        )
        for seed in range(count)
    ]


CASES = [
    *random_cases(40, from_hidden=False),
    *random_cases(18, from_hidden=True),
    Case("not a distribution", 256, 8),
    Case("not a distribution", 256, 8, dtype=torch.float32),
    Case("not a distribution", 256, 8, from_hidden=True),
    Case("empty slices", 60, 60, 0.0),  # dense
    Case("ties", 256, 200, 0.0),  # more than a slice holds
    Case("peaked", 256, 200, 0.0, from_hidden=True),
    Case("peaked", 256, 8, pull="proximal"),
    Case("flat", 256, 8, 1e-2, pull="proximal"),
    Case("flat", 256, 8, from_hidden=True, pull="proximal"),
    Case("peaked", 256, 8, dtype=torch.bfloat16),
    Case("peaked", 256, 8, dtype=torch.bfloat16, from_hidden=True),
    Case("peaked", 256, 64, truncation=Truncation(top_k=20, top_p=0.9, min_p=0.01)),
    Case("ties", 256, 256, truncation=Truncation(top_k=20), transform=(("entropy", True),)),
    Case("peaked", 256, 64, from_hidden=True, pull="proximal", truncation=Truncation(top_k=40)),
    Case("peaked", 256, 8, rows=0),
    Case("peaked", 256, 8, rows=0, from_hidden=True),
]

TRITON_CASES = [
    Case("peaked", 256, 8, 1e-2, torch.float32, from_hidden=True, kernels="triton", transform=transform, rows=6)
    for transform in ((("entropy", True),), (("softcap", 6.0),))
]


def run(case: Case, group: Group) -> Result:
    """Captures, projects and differentiates on this process's slice; on all of it without a group."""
    with mock.patch.dict(os.environ, {VARIABLE: case.kernels}):
        return _from_hidden(case, group) if case.from_hidden else _from_logits(case, group)


def mine(whole: Tensor, dim: int, group: Group) -> Tensor:
    """This process's slice."""
    if group is None:
        return whole
    return whole.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


def _from_logits(case: Case, group: Group) -> Result:
    old_logits, new_logits = case.logits()
    tokens = case.tokens(old_logits)
    old_logits, new_logits = (mine(x.to(case.dtype), -1, group) for x in (old_logits, new_logits))
    settings, entropy = _settings(case)
    before = Logits(old_logits, **settings, vocab_group=group)
    new = Logits(new_logits.requires_grad_(), **settings, vocab_group=group)
    return _result(case, before, tokens, new, entropy, {"logits": new_logits})


def _from_hidden(case: Case, group: Group) -> Result:
    parts = {name: part.to(case.dtype) for name, part in case.head().items()}
    parts |= {name: mine(parts[name], 0, group) for name in ("weight", "bias")}
    old_hidden = parts.pop("old_hidden")
    settings, entropy = _settings(case)
    generator = torch.Generator().manual_seed(case.seed)
    # The masked half is never sampled.
    tokens = torch.randint(case.vocab_size // 2, (case.rows,), generator=generator) + case.vocab_size // 2
    before = LMHead(old_hidden, parts["weight"].clone(), parts["bias"].clone(), **settings, vocab_group=group)
    leaves = {name: part.requires_grad_() for name, part in parts.items()}
    new = LMHead(leaves["hidden"], leaves["weight"], leaves["bias"], **settings, vocab_group=group)
    return _result(case, before, tokens, new, entropy, leaves)


def _settings(case: Case) -> tuple[dict[str, Any], bool]:
    """Of the source, and whether the entropy is read."""
    settings = dict(case.transform)
    return settings, settings.pop("entropy", False)


def _result(
    case: Case, before: LogitsSource, tokens: Tensor, new: LogitsSource, entropy: bool, leaves: dict[str, Tensor]
) -> Result:
    settings: Any = {"mass_threshold": case.mass_threshold, "truncation": case.truncation}
    old = troll.capture(before, tokens, top_k=case.top_k, **settings)
    assert old.vocab_size == case.vocab_size
    step = _step(new, old, case, entropy)
    result = {}
    if entropy:
        _, result["old_entropy"] = capture_with_entropy(before, tokens, top_k=case.top_k, mass_threshold=0.0)
    result |= {"token_ids": old.token_ids, "slot": old.slot, "old_log_probs": old.log_probs}
    result |= {"old_tail": old.tail_log_prob, "ratio_of_equals": _step(before, old, case).log_ratio}
    result |= {name: value.detach() for name, value in vars(step).items() if value is not None}
    for name in DIFFERENTIABLE:
        output = getattr(step, name)
        if output is None or not output.requires_grad:  # the regression where nothing is projected
            continue
        loss = (case.upstream(name).to(output.dtype) * output).sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
        result |= {f"{name}:{leaf}": gradient for leaf, gradient in zip(leaves, gradients, strict=True)}
    return result


def _step(source: LogitsSource, old: SparsePolicy, case: Case, entropy: bool = False) -> Any:
    pull: Any = case.pull
    return troll.trust_region_step(source, old, case.kl_bound, pull=pull, entropy=entropy)


@contextmanager
def exchanges() -> Iterator[list[tuple[str, int]]]:
    """Which collectives are called, and with how many numbers from this process."""
    calls: list[tuple[str, int]] = []

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            sent = args[1] if name == "all_gather_into_tensor" else args[0]
            calls.append((name, sent.numel()))
            return original(*args, **kwargs)

        return call

    with ExitStack() as patches:
        for name in COLLECTIVES:
            patches.enter_context(mock.patch.object(dist, name, counted(name)))
        yield calls


#: What is exchanged for these is counted.
COUNTED: dict[str, dict[str, Any]] = {
    "logits": {},
    "hidden": {"from_hidden": True},
    "entropy": {"from_hidden": True, "transform": (("entropy", True),)},
}


def exchanged(group: Group, vocab_size: int) -> dict[str, list[tuple[str, int]]]:
    """What a capture, a step and one backward pass for each output exchange."""
    found = {}
    for name, settings in COUNTED.items():
        with exchanges() as calls:
            run(Case("peaked", vocab_size, 8, 0.0, **settings), group)
        found[name] = calls
    return found


def refusals(group: Group) -> dict[str, str]:
    """What is said of calls that do not fit."""
    assert group is not None
    slices, rank = dist.get_world_size(group), dist.get_rank(group)
    tokens = torch.zeros(3, dtype=torch.int64)
    narrow, wide = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, 6, dtype=torch.float64)
    uneven = troll.capture(torch.zeros(3, 4 * slices + 1), tokens)
    old = troll.capture(Logits(narrow, vocab_group=group), tokens)
    only_first = dist.new_group([0])
    head = LMHead(torch.zeros(3, HIDDEN), torch.zeros(6, HIDDEN), vocab_group=group)
    different = Logits(wide if rank == 0 else narrow, vocab_group=group)
    calls: dict[str, Callable[[], Any]] = {
        "slices of different sizes": lambda: troll.capture(different, tokens, top_k=2),
        "uneven vocabulary": lambda: troll.trust_region_step(Logits(narrow, vocab_group=group), uneven),
        "logits": lambda: troll.trust_region_step(Logits(wide, vocab_group=group), old),
        "whole logits": lambda: troll.trust_region_step(narrow, old),
        "head": lambda: troll.trust_region_step(head, old),
        "token": lambda: troll.capture(Logits(narrow, vocab_group=group), tokens + 4 * slices),
        "another group": lambda: troll.capture(Logits(narrow, vocab_group=only_first), tokens),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            said[name] = str(error)
    return said


def main(rank: int, slices: int, folder: str, cases: list[Case]) -> None:
    """Leaves what `run` gave for each case, `exchanged` and `refusals` in `folder/RANK.pt`."""
    torch.set_num_threads(1)
    store, patience = f"file://{folder}/store", datetime.timedelta(minutes=2)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=slices, timeout=patience)
    group = dist.group.WORLD
    # Several tiles each way, and a remainder.
    tiles = mock.patch.multiple(head_module, TOKEN_TILE=5, WHOLE_ROWS={"cpu": 4 * 64}, VOCABULARY_TILE=100)
    with tiles, mock.patch.object(logits_module, "TILE_LOGITS", 5 * 64):
        results = {str(case): run(case, group) for case in cases}
        found = {
            "results": results,
            "exchanged": [exchanged(group, vocab_size) for vocab_size in (256, 4096)],
            "refusals": refusals(group),
        }
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
