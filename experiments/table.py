"""The published table of runs: one row of CSV for each finished run, and the questions that its verdicts answer.

The columns are those of `Result`; every setting has its own column, empty in rows without it. `collapsed` and
`rollouts_to_half` follow from other columns and are there for readers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import cast, get_args

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from experiments.protocol import Phase
from troll.files import write_atomically

#: The settings of a run as (field, value), in the order of the fields.
Settings = tuple[tuple[str, str], ...]

#: What tells a run from all others: its recipe, surrogate, learning rate, other settings, and seed.
Identity = tuple[str, str, float, Settings, int]

#: Rollouts in a running mean, since a single rollout is too noisy to judge a run.
WINDOW = 5

_IDENTITY = ("regime", "surrogate", "learning_rate")  # the settings follow them
_RATES = "rates"  # only tables that have any
_REST = (
    "seed",
    "phase",
    "success_before",
    "success_after",
    "right_before",
    "right_after",
    "formatted_after",
    "eval_size",
    "collapsed",
    "rollouts_to_half",
    "token_kl",
    "sequence_kl",
    "completions",
    "curve",
    "entropy",
    "questions",
    "verdicts",
    "commit",
    "machine",
    "versions",
)


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
        regime: The name of the recipe.
        surrogate: The surrogate, which kept the updates near the old policy.
        learning_rate: The learning rate of the optimiser.
        settings: The other settings that its surrogate reads, and those in which the run differs from its recipe, as
            (field, value) in the order of the fields.
        seed: The seed of the run.
        phase: What the run counts for.
        success_before: Held-out success before training, in [0, 1]; None if it was not measured.
        success_after: Held-out success after training, in [0, 1].
        right_before: Share of the first rollout's answers that were right, in the format or without it; None if the
            task asks for no format.
        right_after: The same of the held-out answers after training.
        formatted_after: Share of these that were in the format, right or not.
        eval_size: The number of draws behind them.
        token_kl: KL of the mean token to the old policy, in nats, mean over the updates that logged it; None without.
            TROLL logs it at every update and the clip only with diagnostics, so the two cannot be compared.
        sequence_kl: KL(old ‖ new) of whole completions, in nats, mean over the updates at which it was measured: the
            last ones of a rollout; None if it was not.
        completions: The number of completions in a rollout.
        curve: The number of right completions in each rollout.
        entropy: The entropy of the policy in each rollout, in nats a token.
        questions: The name of the list of questions, for `read_questions`; empty without verdicts.
        verdicts: Whether each held-out draw was right after training, in `evaluation_order`, as hexadecimal bits; empty
            if unknown.
        commit: The commit of the code, with a `+` if the package had changed since; empty if unknown.
        machine: The machine on which it ran.
        versions: The versions of Python and the packages.
        rates: The learning rate of each rollout's last update, if it follows a KL target; empty without.
    """

    regime: str
    surrogate: str
    learning_rate: float
    settings: Settings
    seed: int
    phase: Phase
    success_before: float | None
    success_after: float
    right_before: float | None
    right_after: float | None
    formatted_after: float | None
    eval_size: int
    token_kl: float | None
    sequence_kl: float | None
    completions: int
    curve: tuple[int, ...]
    entropy: tuple[float, ...]
    questions: str
    verdicts: str
    commit: str
    machine: str
    versions: str
    rates: tuple[float, ...] = ()

    @property
    def identity(self) -> Identity:
        """The key of the run in a table."""
        return self.regime, self.surrogate, self.learning_rate, self.settings, self.seed

    @property
    def learning(self) -> list[float]:
        """Training success of each rollout, in [0, 1]."""
        return [right / self.completions for right in self.curve]

    @property
    def running_means(self) -> dict[int, float]:
        """The mean training success of each five rollouts in a row (of all, if there are fewer), by their end."""
        learning = self.learning
        width = min(WINDOW, len(learning))
        return {end: fmean(learning[end - width : end]) for end in range(width, len(learning) + 1)}

    @property
    def collapsed(self) -> bool:
        """Whether the run lost more than half of what it had learned (its best running mean, of at least 5 %)."""
        best = max(self.running_means.values())
        return best >= 0.05 and self.success_after < best / 2

    @property
    def rollouts_to_half(self) -> int | None:
        """The number of rollouts until the running mean was at least a half; None if it never was."""
        return next((end for end, mean in self.running_means.items() if mean >= 0.5), None)

    @property
    def successes(self) -> NDArray[np.bool_]:
        """The verdicts of the draws in the order of their questions, (eval_size,)."""
        found = np.empty(self.eval_size, dtype=bool)
        found[evaluation_order(self.eval_size, self.seed)] = unpack(self.verdicts, self.eval_size)
        return found


def evaluation_order(size: int, seed: int) -> list[int]:
    """The number of each held-out draw, in the order of an evaluation, which TRL's sampler shuffles by the seed."""
    order: list[int] = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()
    return order


def pack(verdicts: Sequence[int]) -> str:
    """Verdicts as hexadecimal bits, the first draw in the highest bit of the first digit, filled up with zeros."""
    return np.packbits(np.asarray(verdicts, dtype=bool)).tobytes().hex()


def unpack(text: str, size: int) -> NDArray[np.bool_]:
    """Undoes `pack`: the verdicts of `size` draws."""
    return np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8), count=size).astype(bool)


def write_questions(folder: Path, questions: Sequence[int]) -> str:
    """Writes the question of each draw, and returns the name of the list; equal lists have the same name.

    Args:
        folder: The folder of the tables.
        questions: One number for each held-out draw, equal for equal questions.
    """
    numbers = {question: number for number, question in enumerate(dict.fromkeys(questions))}
    text = json.dumps([numbers[question] for question in questions], separators=(",", ":")) + "\n"
    name = hashlib.sha256(text.encode()).hexdigest()[:8]
    write_atomically(_questions_file(folder, name), text)
    return name


def read_questions(folder: Path, name: str) -> NDArray[np.int64]:
    """The question of each draw, (eval_size,)."""
    return np.asarray(json.loads(_questions_file(folder, name).read_text()), dtype=np.int64)


def _questions_file(folder: Path, name: str) -> Path:
    return folder / f"questions-{name}.json"


def merge(old: Iterable[Result], new: Iterable[Result]) -> list[Result]:
    """Merges rows, sorted; a new row replaces the old one of the same run."""
    rows = {row.identity: row for row in (*old, *new)}
    return [rows[identity] for identity in sorted(rows)]


def to_csv(results: Sequence[Result]) -> str:
    """The table as CSV, in the order of the rows."""
    settings = sorted({name for row in results for name, _ in row.settings})
    rest = [*_REST, _RATES] if any(row.rates for row in results) else [*_REST]
    rows = [{name: _text(getattr(row, name)) for name in (*_IDENTITY, *rest)} | dict(row.settings) for row in results]
    table = pd.DataFrame(rows, columns=[*_IDENTITY, *settings, *rest], dtype=str)
    return str(table.to_csv(index=False, na_rep="", lineterminator="\n"))


def read_csv(path: Path) -> list[Result]:
    """Reads what `to_csv` wrote.

    Raises:
        ValueError: If the file is not such a table.
    """
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    if missing := {*_IDENTITY, *_REST} - set(table):
        raise ValueError(f"{path} is not a table of results: it has no column {min(missing)}")
    results = []
    for line, row in enumerate(table.to_dict("records"), start=2):
        try:
            results.append(_parse(row))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {line}: {error}") from error
    return results


def _parse(row: dict[str, str]) -> Result:
    known = {*_IDENTITY, *_REST, _RATES}
    if row["phase"] not in get_args(Phase):
        raise ValueError(f"phase must be one of {', '.join(get_args(Phase))}, got {row['phase']!r}")
    return Result(
        regime=row["regime"],
        surrogate=row["surrogate"],
        learning_rate=float(row["learning_rate"]),
        settings=tuple(sorted((name, value) for name, value in row.items() if name not in known and value)),
        seed=int(row["seed"]),
        phase=cast(Phase, row["phase"]),
        success_before=_optional(row["success_before"]),
        success_after=float(row["success_after"]),
        right_before=_optional(row["right_before"]),
        right_after=_optional(row["right_after"]),
        formatted_after=_optional(row["formatted_after"]),
        eval_size=int(row["eval_size"]),
        token_kl=_optional(row["token_kl"]),
        sequence_kl=_optional(row["sequence_kl"]),
        completions=int(row["completions"]),
        curve=tuple(map(int, row["curve"].split())),
        entropy=tuple(map(float, row["entropy"].split())),
        questions=row["questions"],
        verdicts=row["verdicts"],
        commit=row["commit"],
        machine=row["machine"],
        versions=row["versions"],
        rates=tuple(map(float, row.get(_RATES, "").split())),
    )


def _optional(text: str) -> float | None:
    return float(text) if text else None


def _text(value: object) -> str:
    if value is None:
        return ""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
