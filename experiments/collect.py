"""From the run folders of `troll compare` to a published table."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments import RECIPES
from experiments.protocol import Phase
from experiments.table import (
    Identity,
    Result,
    Settings,
    evaluation_order,
    merge,
    pack,
    read_csv,
    to_csv,
    write_questions,
)
from troll.files import flat, read_json, write_atomically
from troll.trl.surrogates import MEASURING, SURROGATES, settings_read
from troll_lab import recipes
from troll_lab.runs.comparison import read_comparison
from troll_lab.runs.grid import PlannedRun
from troll_lab.runs.recorded import SUCCESS, TRUST, Run, metric, number

# Settings with their own column, and settings of a run's output only.
_APART = {"surrogate", "learning_rate", "seed", "output_dir", "resume_from_checkpoint", "use_cpu"}
# What a row names if a run has it, whatever its recipe has: `learning_rate` is another number with it.
_NAMED = {"kl_target"}
_LEFT_BEHIND = ("save_", "logging_", "report_to", "run_name")


def collect(folders: Iterable[Path], table: Path, phase: Phase) -> tuple[int, int]:
    """Adds finished runs to a table, and replaces those that are in it already.

    Args:
        folders: Run folders, or folders of `troll compare`.
        table: A CSV file, made if it does not exist. Lists of questions are written next to it, and the commands, as
            NAME.txt.
        phase: What the runs count for.

    Returns:
        The number of runs that were added or replaced, and the number of unfinished ones.

    Raises:
        FileNotFoundError: If a folder has no runs.
        ValueError: If a file is malformed; if a run does not fit the table (its recipe is unknown, it did not log
            once a rollout, or its verdicts are not those of its last evaluation); or if a run occurs twice, or is
            in the table with another phase.
    """
    read = read_comparison(list(folders))
    runs, commands = read.runs, table.with_suffix(".txt")
    table.parent.mkdir(parents=True, exist_ok=True)
    finished = [run for run in runs if run.finished]
    found = [_result(run, phase, table.parent) for run in finished]
    former = read_csv(table) if table.exists() else []
    phases, places = {row.identity: row.phase for row in former}, dict[Any, Path]()
    for run, row in zip(finished, found, strict=True):
        if (known := phases.get(row.identity, phase)) != phase:
            raise ValueError(f"{run.folder} is in {table} as a {known} run: collect it as such, or into another table")
        if (other := places.setdefault(row.identity, run.folder)) != run.folder:
            raise ValueError(f"{other} and {run.folder} are the same run: name one of them only")
    write_atomically(table, to_csv(merge(former, found)))
    lines = commands.read_text(encoding="utf-8").splitlines() if commands.exists() else []
    new = [command.replace(f"{Path.cwd()}/", "") for command in read.commands]  # published without the local path
    write_atomically(commands, "".join(f"{line}\n" for line in dict.fromkeys([*lines, *new])))
    return len(found), len(runs) - len(found)


def identity_of(run: PlannedRun) -> Identity:
    """The key that a run of a grid will have in a table."""
    training, settings = run.recipe.training, _as_in_a_file(run.settings)
    return (
        run.recipe.name,
        training.surrogate,
        float(settings["learning_rate"]),
        _settings(run.recipe.name, training.surrogate, flat(settings), _as_in_a_file(settings_read(training))),
        training.seed,
    )


def _as_in_a_file(settings: Mapping[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(dict(settings)))
    return read


def _result(run: Run, phase: Phase, folder: Path) -> Result:
    success = run.final("success")
    if success is None:
        raise ValueError(f"{run.folder}/summary.json has no success_after: the task must tell success from failure")
    completions, curve = _curve(run)
    eval_size, questions, verdicts = _verdicts(run, success, folder)
    return Result(
        regime=run.recipe,
        surrogate=run.surrogate,
        learning_rate=float(_setting(run, "learning_rate")),
        settings=_settings(run.recipe, run.surrogate, run.settings, _read(run)),
        seed=run.seed,
        phase=phase,
        success_before=number(run.summary.get("success_before")),
        success_after=success,
        right_before=next(iter(metric(run.rows, "rewards/right/mean").tolist()), None),
        right_after=_after(run, "right"),
        formatted_after=_after(run, "formatted"),
        eval_size=eval_size,
        token_kl=_mean(run, f"{TRUST}kl_before_mean"),
        sequence_kl=_mean(run, f"{TRUST}diagnostics/sequence_kl"),
        completions=completions,
        curve=curve,
        entropy=tuple(map(_rounded, metric(run.rows, "entropy").tolist())),
        questions=questions,
        verdicts=verdicts,
        commit=run.summary.get("commit") or "",
        machine=str(run.summary.get("machine", "")),
        versions=" ".join(f"{name} {version}" for name, version in run.summary.get("versions", {}).items()),
        rates=() if run.settings.get("kl_target") is None else _rates(run),
    )


def _rates(run: Run) -> tuple[float, ...]:
    """The learning rate of each rollout's last update. The last line of a run may be a summary without a rate."""
    return tuple(map(_rounded, metric(run.rows, "learning_rate").tolist()))


def _setting(run: Run, name: str) -> Any:
    if name not in run.settings:
        raise ValueError(f"{run.folder}/config.yaml has no {name}: the recipe or the command must set it")
    return run.settings[name]


def _settings(recipe: str, surrogate: str, settings: Mapping[str, Any], read: Mapping[str, Any]) -> Settings:
    """The settings that a run's surrogate reads, and those in which the run differs from its recipe, as in a table.

    Args:
        recipe: The name of the recipe.
        surrogate: The surrogate.
        settings: All settings of the run.
        read: The settings that its surrogate and its measurements read; those of measurements only count as others.
    """
    plain, varied = _recipe(recipe)
    apart = _APART | _foreign(read)
    others = {
        name: value
        for name, value in settings.items()
        if name not in apart
        and not name.startswith(_LEFT_BEHIND)
        and ((plain.get(name) != value and name not in _NAMED) or (name in varied and value is not None))
    }
    measured = set(MEASURING) - set(SURROGATES[surrogate].reads) if surrogate in SURROGATES else set()
    own = {name: value for name, value in read.items() if value is not None and name not in measured}
    texts = {
        name: value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        for name, value in (others | own).items()
    }
    return tuple(sorted(texts.items()))


def _read(run: Run) -> Mapping[str, Any]:
    """The settings that a run's surrogate reads."""
    if run.settings_read is None:
        raise ValueError(f"{run.folder}/summary.json has no surrogate_settings: an older version made it; run it again")
    read: Mapping[str, Any] = run.summary["surrogate_settings"]
    return read


def _foreign(read: Collection[str]) -> set[str]:
    """The settings that only other surrogates read."""
    return {name for entry in SURROGATES.values() for name in entry.reads} - set(read)


@cache
def _recipe(name: str) -> tuple[Mapping[str, Any], Collection[str]]:
    """A recipe's resolved settings, and the fields that its rows name with the recipe's value too."""
    own = RECIPES / f"{name}.yaml"
    if name not in recipes.names() and not own.is_file():
        raise ValueError(f"{name} is neither a recipe of the package nor in {RECIPES}: its runs' changes are unknown")
    given = str(own) if own.is_file() else name
    _, grid = recipes.read(given)
    first = [f"--{field}={recipes.as_argument(values[0])}" for field, values in grid.items()]
    return flat(_as_in_a_file(recipes.plain(recipes.load(given, first)))), {*grid, *_NAMED}


def _curve(run: Run) -> tuple[int, tuple[int, ...]]:
    """The number of completions in a rollout, and the number of right ones in each rollout."""
    updates = int(run.summary["updates_per_rollout"]) * int(run.settings.get("gradient_accumulation_steps", 1))
    completions = updates * int(_setting(run, "per_device_train_batch_size"))
    shares = metric(run.rows, SUCCESS).tolist()
    if len(shares) != run.summary["rollouts"]:
        raise ValueError(
            f"{run.folder}/metrics.jsonl has {SUCCESS} in {len(shares)} lines for {run.summary['rollouts']} rollouts: "
            "set logging_steps to the updates of a rollout"
        )
    right = [share * completions for share in shares]
    if any(abs(value - round(value)) > 0.01 for value in right):
        raise ValueError(f"{run.folder}/metrics.jsonl: {SUCCESS} is not a share of {completions} completions")
    return completions, tuple(map(round, right))


def _verdicts(run: Run, success: float, folder: Path) -> tuple[int, str, str]:
    """The number of judged draws, the name of their list of questions, and the verdicts; empty without a file."""
    path = run.folder / "verdicts.json"
    if not path.is_file():
        return int(run.summary["eval_size"]), "", ""
    found = read_json(path)
    verdicts, questions = found.get("success", []), found.get("question", [])
    if len(verdicts) != len(questions) or not verdicts:
        raise ValueError(f"{path}: expected a question for each success, got {len(questions)} for {len(verdicts)}")
    order = evaluation_order(len(verdicts), run.seed)
    if found.get("row", order) != order:  # the first runs did not write it
        raise ValueError(f"{path}: its rows are not in the order of an evaluation with seed {run.seed}")
    if None in verdicts:
        raise ValueError(f"{path}: {verdicts.count(None)} completions could not be judged, so the success is not known")
    if found.get("step") != run.summary.get("success_after_step"):
        raise ValueError(f"{path} is of step {found.get('step')}, not of the last evaluation")
    if not math.isclose(sum(verdicts) / len(verdicts), success, abs_tol=1e-6):
        raise ValueError(f"{path}: the mean of success is not the success_after of summary.json")
    return len(verdicts), write_questions(folder, questions), pack(verdicts)


def _after(run: Run, reward: str) -> float | None:
    """The held-out mean of a reward in the last evaluation; None if the task has no such reward."""
    values = metric(run.rows, f"eval_rewards/{reward}/mean").tolist()
    return values[-1] if values else None


def _mean(run: Run, key: str) -> float | None:
    values = metric(run.rows, key).tolist()
    return _rounded(fmean(values)) if values else None


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
