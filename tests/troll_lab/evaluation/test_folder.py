from pathlib import Path
from typing import Any

import pytest

from troll.grading import Verdict
from troll_lab.evaluation.config import EvaluationError
from troll_lab.evaluation.folder import (
    append_records,
    claimed,
    read_object,
    read_records,
    replace_records,
    verdict_of,
    with_verdict,
)

SETTINGS = {"model": "m", "seed": 0}
ORDER = [(problem, sample) for problem in (2, 0, 1) for sample in (0, 1)]


def claim(folder: Path, settings: dict[str, Any] = SETTINGS) -> None:
    with claimed(folder, settings, {}):
        pass


def test_claimed_refuses_folders_it_cannot_use(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    for folder, message in ((tmp_path, "is not empty and holds no evaluation"), (tmp_path / "precious/x", "be used")):
        with pytest.raises(EvaluationError, match=message):
            claim(folder)
    assert list(tmp_path.iterdir()) == [tmp_path / "precious"]


def test_claimed_refuses_other_settings_and_a_second_command(tmp_path: Path) -> None:
    with (
        claimed(tmp_path, SETTINGS, {}),
        pytest.raises(EvaluationError, match="another troll eval is at work"),
    ):
        claim(tmp_path)
    claim(tmp_path)
    with pytest.raises(EvaluationError, match="seed is 0 there and null here"):
        claim(tmp_path, {"model": "m"})


def test_damaged_settings_are_named_and_missing_ones_empty(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("[]")
    with pytest.raises(EvaluationError, match=r"settings\.json: expected a JSON object.*: choose"):
        claim(tmp_path)
    assert read_object(tmp_path / "missing.json") == {}
    assert read_records(tmp_path / "missing.jsonl", ORDER, 4) == []


def record(problem: int, sample: int, text: str = "4") -> dict[str, Any]:
    place = {"problem": problem, "sample": sample, "prompt": "2 + 2?", "completion": text}
    return place | {"tokens": 1, "finished": True, "answer": None, "score": 0.0, "reason": "wrong"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.jsonl"


def written(path: Path, count: int = 6) -> list[dict[str, Any]]:
    records = [record(*place) for place in ORDER[:count]]
    append_records(path, records[:1])
    append_records(path, records[1:])
    return records


@pytest.mark.parametrize(("there", "left"), [(6, 6), (5, 4), (4, 4), (3, 0), (1, 0)])
def test_read_records_keeps_only_whole_batches(path: Path, there: int, left: int) -> None:
    records = written(path, there)
    assert read_records(path, ORDER, 4) == records[:left]
    assert read_records(path, ORDER[:left], 1) == records[:left]  # nor has the file more


@pytest.mark.parametrize("cut", [1, 30])
def test_read_records_drops_a_last_line_cut_short(path: Path, cut: int) -> None:
    records = written(path)
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_records(path, ORDER, 2) == records[:4]


@pytest.mark.parametrize(
    "text", ["line\nbreak\r", "\u2028\x85\x0b\x0c\x1c", "\ud800 half a pair", "\x00", "π", '"quoted" \\n', "𝟜"]
)
def test_records_keep_any_text(path: Path, text: str) -> None:
    append_records(path, [record(0, 0, text), record(0, 1)])
    records = read_records(path, [(0, 0), (0, 1)], 1)
    assert [one["completion"] for one in records] == [text, "4"]
    replace_records(path, records)
    assert read_records(path, [(0, 0), (0, 1)], 1) == records


@pytest.mark.parametrize(
    ("line", "damage", "order"),
    [
        (1, b"not JSON\n", ORDER),
        (2, b'{"problem": 2}\n', ORDER),
        (2, b"[]\n", ORDER),
        (1, None, ORDER[::-1]),  # records of other problems
        (5, None, ORDER[:4]),
    ],
)
def test_read_records_names_the_line_that_does_not_belong(
    path: Path, line: int, damage: bytes | None, order: list[tuple[int, int]]
) -> None:
    written(path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line - 1] = damage or lines[line - 1]
    path.write_bytes(b"".join(lines))
    with pytest.raises(EvaluationError, match=f"line {line}: not the record that belongs there"):
        read_records(path, order, 2)


def test_verdict_is_read_from_and_written_to_a_record() -> None:
    assert verdict_of(record(0, 0)) == Verdict(0.0, None, "wrong")
    judged = with_verdict(record(0, 0), Verdict(1.0, "4", "correct"))
    assert verdict_of(judged) == Verdict(1.0, "4", "correct") and list(judged) == list(record(0, 0))
