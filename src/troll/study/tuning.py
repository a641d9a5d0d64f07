"""A comparison of tuned methods in two stages: settings are chosen on some seeds, and compared on others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from troll.recipes import RecipeError
from troll.study.grid import Axes, PlannedRun, expand

#: What one choice is for: the recipe, and the values of all fields that are neither tuned nor the seed.
Place = tuple[str, tuple[tuple[str, str | None], ...]]
Values = dict[str, str]  # of the tuned fields that a method reads


@dataclass(frozen=True)
class Choice:
    """What the tuning chose for a method.

    Attributes:
        recipe: The recipe's name.
        surrogate: Whose settings were tuned.
        place: What it is for.
        means: The mean final result over the tuning seeds of every combination, the best one first.
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
        """For the manifest."""
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
        recipe_names: As the user gave them.
        axes: Of the second stage.
        fields: The tuned fields, and the values to choose from. One that has values in `axes` too keeps those in the
            second stage: it is tuned only because the best values of the others depend on it.
        seeds: Of the first stage.
    """

    recipe_names: Sequence[str]
    axes: Axes
    fields: Axes
    seeds: Sequence[str]

    @property
    def settled(self) -> list[str]:
        """The fields of which the second stage has the chosen values."""
        return [name for name in self.fields if name not in self.axes]

    def runs(self) -> list[PlannedRun]:
        """The first stage: every method with every combination of the values that it reads, on the tuning seeds.

        A method without a field to choose for the second stage has no runs.

        Raises:
            RecipeError: As :func:`troll.study.grid.expand`, of both stages; there is nothing to choose; or a seed is in
                both stages.
        """
        every = expand(self.recipe_names, {**self.axes, **self.fields, "seed": self.seeds}, prefix="tune-")
        runs = [run for run in every if any(name in run.assignment for name in self.settled)]
        if not runs:
            raise RecipeError(
                f"--tune {' '.join(self.fields)} chooses nothing: no method reads a tuned field that has no values of "
                "its own for the second stage"
            )
        counted = {run.recipe.training.seed for run in self.counted()}
        if both := sorted(counted & {run.recipe.training.seed for run in runs}):
            raise RecipeError(
                f"seed {both[0]} is a tuning seed and a counted one: what was chosen on it would look better than it "
                "is; give --tuning_seeds others"
            )
        return runs

    def counted(self, choices: Sequence[Choice] = ()) -> list[PlannedRun]:
        """The second stage.

        Args:
            choices: From `choose`. A method without one has the first value of each field.
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
        """For every method the combination with the best mean over the tuning seeds; of equal ones, the smaller values.

        Args:
            runs: The first stage.
            results: The final success, or reward, of each of them by its name.
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


def _best_first(means: Mapping[tuple[tuple[str, str], ...], float]) -> list[tuple[Values, float]]:
    ordered = sorted(means.items(), key=lambda item: (-item[1], [_size(value) for _, value in item[0]]))
    return [(dict(values), mean) for values, mean in ordered]


def _size(value: str) -> tuple[float, str]:
    """Numbers by their size, and after them words."""
    try:
        return float(value), ""
    except ValueError:
        return float("inf"), value
