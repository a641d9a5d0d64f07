import io
import json
import math
from pathlib import Path

import numpy as np
import pandas
import pytest

from troll.files import json_text, write_atomically


def test_writing_replaces_the_whole_file_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("a longer old text")
    write_atomically(path, "new")
    assert path.read_text() == "new"

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space left"):
        write_atomically(path, "newer")
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("file", "new")]


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_json_text_is_strict_and_loses_nothing() -> None:
    value = {"a": [math.inf, -math.inf, (math.nan, 0.1)], "b": {"c": np.float64("inf"), "d": None, "e": True}}
    found = json.loads(json_text(value, indent=2), parse_constant=refuse)
    assert found == {"a": ["Infinity", "-Infinity", ["NaN", 0.1]], "b": {"c": "Infinity", "d": None, "e": True}}
    assert float(found["a"][1]) == -math.inf


def test_json_text_is_read_by_pandas_as_numbers() -> None:
    lines = "".join(json_text({"a": value, "b": math.inf}) + "\n" for value in (0.5, math.inf, math.nan))
    found = pandas.read_json(io.StringIO(lines), lines=True)
    assert list(found.dtypes) == ["float64", "float64"]
    assert found["a"].tolist()[:2] == [0.5, math.inf] and math.isnan(found["a"][2])
