"""Values that people write, in files of settings and on the command line, as YAML 1.2 reads them (its core schema).

So `1e-1`, `.5` and `+1e-3` are numbers, `010` is 10, and `yes`, `1:30` and `1_000` are texts. JSON is a part of YAML
1.2: Python's own reader gives the same values, and also accepts tabs and surrogate pairs.
"""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import yaml
from yamlcore import CoreDumper, CoreLoader

from troll_lab.terminal import one_line

#: The beginning of a number below 0, by which argparse tells numbers from options; its own pattern lacks -1e-3.
NEGATIVE = re.compile(r"-\.?(\d|inf)")

#: Texts that `float` takes and YAML 1.2 writes with a point in front.
_NOT_FINITE = ("inf", "infinity", "nan")


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a file of settings: a recipe, a task, or a run's `config.yaml`.

    Raises:
        ValueError: If the file does not hold "field: value" lines, or a field twice.
    """
    try:
        settings = parsed(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not YAML ({one_line(error)})") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: expected 'field: value' lines")
    return settings


def yaml_text(settings: dict[str, Any]) -> str:
    """Settings as YAML that `read_yaml` reads back, in their order.

    Raises:
        yaml.YAMLError: If a value is not in YAML's core schema.
    """
    return str(yaml.dump(settings, Dumper=CoreDumper, sort_keys=False))


def parsed(text: str) -> Any:
    """The value of a text in YAML or JSON.

    Raises:
        ValueError: If it is neither, or has a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError:
        pass
    except RecursionError:
        raise ValueError("nested too deeply") from None
    try:
        loader = CoreLoader(text)
        loader.deep_construct = True  # refuses a value that holds itself
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        if mark is None:
            raise ValueError(one_line(error)) from None
        rest = text[mark.index :].partition("\n")[0]
        raise ValueError(f"{error.problem} in line {mark.line + 1}, column {mark.column + 1}: {rest}") from None
    except yaml.YAMLError as error:
        raise ValueError(one_line(error)) from None
    except KeyError as error:
        raise ValueError(f"the value {error} does not fit its tag") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_value(text: str) -> Any:
    """The value of a setting whose type is unknown: JSON, a number, `true`, `false` or `null`, or else the text itself.

    Raises:
        ValueError: If the text is JSON with a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError:
        if not text:  # which YAML takes for null
            return text
    loader = CoreLoader("")
    return loader.construct_object(yaml.ScalarNode(loader.resolve(yaml.ScalarNode, text, (True, False)), text))


def number(value: Any) -> float:
    """A number, from its text or as it is; a type for argparse.

    Raises:
        ArgumentTypeError: If it is not a number.
    """
    found = read_value(value) if isinstance(value, str) else value
    if isinstance(found, str) and found.lower().lstrip("+-") in _NOT_FINITE:
        found = float(found)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ArgumentTypeError(f"must be a number, got {value!r}")
    try:
        return float(found) if isinstance(value, str) else found
    except OverflowError:
        raise ArgumentTypeError(f"must be a number below 1.8e308, got {value:.40}") from None


def whole_number(value: Any) -> int:
    """A whole number, also in the form 1e3, from its text or as it is; a type for argparse.

    Raises:
        ArgumentTypeError: If it is not a whole number.
    """
    found = read_value(value) if isinstance(value, str) else value
    if isinstance(found, float) and found.is_integer():
        found = int(found)
    if isinstance(found, bool) or not isinstance(found, int):
        raise ArgumentTypeError(f"must be a whole number, got {value!r}")
    return found


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The dictionary of a JSON object, whose keys must differ, as in YAML."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"found duplicate key {key!r}")
        found[key] = value
    return found
