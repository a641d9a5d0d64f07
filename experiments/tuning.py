"""A comparison of tuned methods in two stages: settings are chosen on some seeds, and compared on others."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from experiments.contest_page import write_contest
from troll.files import json_text, write_atomically
from troll_lab.recipes import RecipeError
from troll_lab.runs.compare import Outcome, compare
from troll_lab.runs.comparison import measure_of
from troll_lab.runs.grid import Axes, PlannedRun, claim, expand, parse_command
from troll_lab.runs.recorded import read_runs
from troll_lab.terminal import say

#: The place of one choice: the recipe, and the values of all fields except for the tuned ones and the seed.
Place = tuple[str, tuple[tuple[str, str | None], ...]]
Values = dict[str, str]  # the values of the tuned fields that a method reads


@dataclass(frozen=True)
class Choice:
    """The tuning's choice for a method.

    Attributes:
        recipe: The name of the recipe.
        surrogate: The surrogate whose settings were tuned.
        place: The recipe and the other settings for which the choice was made.
        means: Every combination with its mean final result over the tuning seeds, the best one first.
    """

    recipe: str
    surrogate: str
    place: Place
    means: Sequence[tuple[Values, float]]

    @property
    def values(self) -> Values:
        """The best combination."""
        return self.means[0][0]

    @property
    def text(self) -> str:
        """The choice in a line."""
        place = " ".join(f"{name}={value}" for name, value in self.place[1] if name != "surrogate")
        values = " ".join(f"{name}={value}" for name, value in self.values.items())
        return f"{' '.join(filter(None, [self.recipe, place, self.surrogate]))}: {values} (mean {self.means[0][1]:.3f})"

    def as_json(self) -> dict[str, Any]:
        """The choice for `tuning.json`."""
        return {
            "recipe": self.recipe,
            "surrogate": self.surrogate,
            "settings": {name: value for name, value in self.place[1] if name != "surrogate"},
            "chosen": self.values,
            "means": [{"values": values, "mean": mean} for values, mean in self.means],
        }


@dataclass(frozen=True)
class Tuning:
    """The plan of both stages.

    Attributes:
        recipe_names: The recipes' names or paths, as the user gave them.
        axes: The values of the fields in the second stage.
        fields: The tuned fields, and the values to choose from. A field that also has values in `axes` keeps those in
            the second stage: it is tuned only because the best values of the others depend on it.
        seeds: The seeds of the first stage.
    """

    recipe_names: Sequence[str]
    axes: Axes
    fields: Axes
    seeds: Sequence[str]

    @classmethod
    def parse(cls, recipe_names: Sequence[str], axes: Axes) -> Tuning:
        """The plan from the options of the command, among which are `--tune` and `--tuning_seeds`.

        Raises:
            RecipeError: If one of the two is missing, or a tuned field has fewer than two values.
        """
        left = {name: list(values) for name, values in axes.items()}
        fields = _tuned(left)
        seeds = left.pop("tuning_seeds", [])
        if not fields or not seeds:
            raise RecipeError("--tune FIELD=VALUE,VALUE ... and --tuning_seeds SEED ... go together: give both")
        return cls(recipe_names, left, fields, seeds)

    @property
    def settled(self) -> list[str]:
        """The fields that have the chosen values in the second stage."""
        return [name for name in self.fields if name not in self.axes]

    def runs(self) -> list[PlannedRun]:
        """The first stage: every method with every combination of the values that it reads, on the tuning seeds.

        A method without a field to choose for the second stage has no runs.

        Raises:
            RecipeError: As `troll_lab.runs.grid.expand`, for both stages; or if there is nothing to choose, or a seed
                is in both stages.
        """
        every = expand(self.recipe_names, {**self.axes, **self.fields, "seed": self.seeds})
        runs = [run for run in every if any(name in run.assignment for name in self.settled)]
        if not runs:
            raise RecipeError(
                f"--tune {' '.join(self.fields)} chooses nothing: no method reads a tuned field without values for the "
                "second stage"
            )
        counted = {run.recipe.training.seed for run in self.counted()}
        if both := sorted(counted & {run.recipe.training.seed for run in runs}):
            raise RecipeError(
                f"seed {both[0]} is a tuning seed and a counted one, and settings that were chosen on it would look "
                "better than they are: give --tuning_seeds other seeds"
            )
        return runs

    def counted(self, choices: Sequence[Choice] = ()) -> list[PlannedRun]:
        """The second stage.

        Args:
            choices: The choices from `choose`. A method without a choice has the first value of each field.
        """
        chosen = {choice.place: choice.values for choice in choices}
        firsts = {name: self.fields[name][:1] for name in self.settled}
        planned = expand(self.recipe_names, {**self.axes, **firsts})
        return [run.with_values(self._settled_values(run, chosen)) for run in planned]

    def _settled_values(self, run: PlannedRun, chosen: Mapping[Place, Values]) -> Values:
        """The values that were chosen for a run, of the fields that it reads and that have no values of their own."""
        values = chosen.get(self._place(run.recipe.given, run.assignment), {})
        return {name: value for name, value in values.items() if name in self.settled and name in run.assignment}

    def choose(self, runs: Sequence[PlannedRun], results: Mapping[str, float]) -> list[Choice]:
        """Chooses for every method the combination with the best mean over the tuning seeds; of equals, the smaller.

        Args:
            runs: The runs of the first stage.
            results: The final success, or reward, of each run by its name.
        """
        found: dict[Place, dict[tuple[tuple[str, str], ...], list[float]]] = {}
        first: dict[Place, PlannedRun] = {}
        for run in runs:
            place = self._place(run.recipe.given, run.assignment)
            first.setdefault(place, run)
            values = tuple((name, str(run.assignment[name])) for name in self.fields if name in run.assignment)
            found.setdefault(place, {}).setdefault(values, []).append(results[run.name])
        return [
            Choice(
                recipe=first[place].recipe.name,
                surrogate=first[place].recipe.training.surrogate,
                place=place,
                means=_best_first({values: fmean(finals) for values, finals in combinations.items()}),
            )
            for place, combinations in found.items()
        ]

    def _place(self, recipe_name: str, assignment: Mapping[str, str | None]) -> Place:
        apart = {"seed", *self.fields}
        return recipe_name, tuple((name, value) for name, value in assignment.items() if name not in apart)


def tune(recipe_names: Sequence[str], arguments: Sequence[str], console: Console) -> Outcome:
    """Makes the runs of both stages, and writes the page of the contest.

    The folder holds a comparison in `tuning`, the choices in `tuning.json`, the comparison of the chosen settings in
    `counted`, and the page. The same command resumes in either stage.

    Args:
        recipe_names: The names or paths of the recipes.
        arguments: The fields and options, as for `troll compare`, with `--tune` and `--tuning_seeds`.
        console: The console for progress and results.

    Returns:
        "finished" if every run is; "failed" if one failed, without a second stage if it was of the first;
        "interrupted" after Ctrl-C.

    Raises:
        RecipeError: If a stage is not a valid grid, if its folder holds another one, or if the first stage has measured
            nothing.
    """
    command = parse_command(recipe_names, arguments)
    plan, folder = Tuning.parse(recipe_names, command.axes), Path(command.output_dir)
    tuning, counted = folder / "tuning", folder / "counted"
    given = shlex.join(["python", "-m", "experiments", "tune", *recipe_names, *arguments])
    runs = plan.runs()
    say(console, "first stage: settings are chosen on the tuning seeds")
    outcome = compare(runs, tuning, console, command.jobs, given)
    if outcome == "failed":
        say(console, "nothing is chosen yet: that needs all runs of the tuning")
    if outcome != "finished":
        return outcome
    runs = claim(tuning, given, runs)  # with the names that an earlier, smaller grid gave them
    choices = plan.choose(runs, _results(tuning, runs))
    for choice in choices:
        say(console, f"chosen    {choice.text}")
    content = [choice.as_json() for choice in choices]
    write_atomically(folder / "tuning.json", json_text(content, indent=2) + "\n")
    say(console, "second stage: the chosen settings are compared on seeds that do not count in the tuning")
    outcome = compare(plan.counted(choices), counted, console, command.jobs, given, plan.settled)
    say(console, f"contest     {write_contest([counted], folder, content)}")
    return outcome


def _results(folder: Path, runs: Sequence[PlannedRun]) -> dict[str, float]:
    """The final success of each run of the first stage; the final reward if no run measured success."""
    names = {run.name for run in runs}
    finished = [run for run in read_runs([folder]) if run.name in names]
    measure = measure_of(finished)
    results = {run.name: value for run in finished if (value := run.final(measure)) is not None}
    if missing := sorted(names - set(results)):
        raise RecipeError(
            f"{missing[0]} has no held-out {measure} after training, so that nothing can be chosen: the recipe needs "
            "eval_strategy and eval_size"
        )
    return results


def _tuned(axes: dict[str, list[str]]) -> Axes:
    """Takes `--tune` out of the axes: FIELD=VALUE,VALUE, or only FIELD if `--FIELD` gives the values."""
    tuned: dict[str, list[str]] = {}
    for given in axes.pop("tune", []):
        name, equals, values = given.partition("=")
        name = name.replace("-", "_")
        if name in ("surrogate", "seed"):
            raise RecipeError(f"--tune {name}: a comparison is over the {name}s; name settings such as kl_bound")
        if name in tuned:
            raise RecipeError(f"--tune has {name} twice: give it all its values at once")
        tuned[name] = values.split(",") if equals else axes.pop(name, [])
        if not all(tuned[name]) or len(tuned[name]) < 2:
            raise RecipeError(f"--tune {name} needs values to choose from: --tune {name}=VALUE,VALUE")
    return tuned


def _best_first(means: Mapping[tuple[tuple[str, str], ...], float]) -> list[tuple[Values, float]]:
    ordered = sorted(means.items(), key=lambda item: (-item[1], [_size(value) for _, value in item[0]]))
    return [(dict(values), mean) for values, mean in ordered]


def _size(value: str) -> tuple[float, str]:
    """A key that sorts numbers by their size, and words after them."""
    try:
        return float(value), ""
    except ValueError:
        return float("inf"), value
