"""A comparison of tuned methods in two stages: settings are chosen on some seeds, and compared on others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from troll.recipes import RecipeError
from troll.runs.grid import Axes, PlannedRun, expand

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
        """The choice for the manifest."""
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

    @property
    def settled(self) -> list[str]:
        """The fields that have the chosen values in the second stage."""
        return [name for name in self.fields if name not in self.axes]

    def runs(self) -> list[PlannedRun]:
        """The first stage: every method with every combination of the values that it reads, on the tuning seeds.

        A method without a field to choose for the second stage has no runs.

        Raises:
            RecipeError: As `troll.runs.grid.expand`, for both stages; or if there is nothing to choose, or a seed is
                in both stages.
        """
        every = expand(self.recipe_names, {**self.axes, **self.fields, "seed": self.seeds}, prefix="tune-")
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

        def settle(recipe_name: str, assignment: Mapping[str, str | None]) -> Mapping[str, str | None]:
            values = chosen.get(self._place(recipe_name, assignment), {})
            return {
                name: values.get(name, value) if name in self.settled else value for name, value in assignment.items()
            }

        firsts = {name: self.fields[name][:1] for name in self.settled}
        return expand(self.recipe_names, {**self.axes, **firsts}, settle)

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

    def record(self, runs: Sequence[PlannedRun], choices: Sequence[Choice] | None = None) -> dict[str, Any]:
        """What the manifest holds about the tuning.

        Args:
            runs: The runs of the first stage.
            choices: The choices from `choose`; None as long as they are open.
        """
        chosen = {} if choices is None else {"chosen": [choice.as_json() for choice in choices]}
        return {"settled": self.settled, "runs": [run.name for run in runs], **chosen}

    def _place(self, recipe_name: str, assignment: Mapping[str, str | None]) -> Place:
        apart = {"seed", *self.fields}
        return recipe_name, tuple((name, value) for name, value in assignment.items() if name not in apart)


def _best_first(means: Mapping[tuple[tuple[str, str], ...], float]) -> list[tuple[Values, float]]:
    ordered = sorted(means.items(), key=lambda item: (-item[1], [_size(value) for _, value in item[0]]))
    return [(dict(values), mean) for values, mean in ordered]


def _size(value: str) -> tuple[float, str]:
    """A key that sorts numbers by their size, and words after them."""
    try:
        return float(value), ""
    except ValueError:
        return float("inf"), value
