"""One process of the sliced paths: every case on its slice of the vocabulary, and what came of it in a file."""

import datetime
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import troll
from tests.troll.trust_region.matrix_cases import CASES, SIZE, Case, of_family
from tests.troll.trust_region.matrix_paths import SLICED, run
from troll import LMHead, Logits
from troll.trust_region.reading import head as head_module
from troll.trust_region.reading import logits as logits_module
from troll.trust_region.reading.capture import captured

Group = Any

#: What would show if anything else were exchanged.
COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
    *("broadcast", "broadcast_object_list", "gather", "reduce", "reduce_scatter", "reduce_scatter_tensor", "barrier"),
)


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


#: The paths whose exchanges are counted, and the sizes of the vocabulary.
COUNTED = ("sliced, float32", "sliced head", "sliced head, entropy")
SIZES = (64, 512)


def exchanged(group: Group) -> dict[tuple[str, int], list[tuple[str, int]]]:
    """What a capture, a step and one backward pass for each output exchange."""
    found = {}
    for name in COUNTED:
        for size in SIZES:
            case: Case = of_family("flat", size=size, top_k=8, mass_threshold=0.0)
            with exchanges() as calls:
                run(SLICED[name], case, group)
            found[name, size] = calls
    return found


def refusals(group: Group) -> dict[str, str]:
    """What is said of calls that do not fit."""
    slices, rank = dist.get_world_size(group), dist.get_rank(group)
    tokens = torch.zeros(3, dtype=torch.int64)
    narrow, wide = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, 6, dtype=torch.float64)
    uneven = troll.capture(torch.zeros(3, 4 * slices + 1), tokens)
    old = troll.capture(Logits(narrow, vocab_group=group), tokens)
    only_first = dist.new_group([0])
    head = LMHead(torch.zeros(3, 16), torch.zeros(6, 16), vocab_group=group)
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


def entropies(group: Group) -> torch.Tensor | None:
    """Those of a capture, of a process's slice."""
    case = CASES["flat"]
    logits = torch.from_numpy(case.old).chunk(dist.get_world_size(group), -1)[dist.get_rank(group)].contiguous()
    source = Logits(logits, vocab_group=group)
    tokens = torch.from_numpy(case.tokens)
    return captured(source, tokens, top_k=case.top_k, mass_threshold=0.0, entropy=True).entropy


def main(rank: int, slices: int, folder: str) -> None:
    """Leaves in `folder/RANK.pt` what this process found."""
    torch.set_num_threads(1)
    store, patience = f"file://{folder}/store", datetime.timedelta(minutes=2)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=slices, timeout=patience)
    group = dist.group.WORLD
    # Several tiles each way, and a remainder.
    tiles = mock.patch.multiple(head_module, TOKEN_TILE=3, WHOLE_ROWS={"cpu": 2 * SIZE}, VOCABULARY_TILE=32)
    with tiles, mock.patch.object(logits_module, "TILE_LOGITS", 2 * SIZE):
        found = {
            "results": {
                (name, case): run(path, CASES[case], group)
                for name, path in SLICED.items()
                for case in CASES
                if path.takes(CASES[case])
            },
            "exchanged": exchanged(group),
            "refusals": refusals(group),
            "entropies": entropies(group),
        }
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
