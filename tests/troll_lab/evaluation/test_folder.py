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


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(EvaluationError, match="is not empty and holds no evaluation"), claimed(tmp_path, {}, {}):
        pass
    with pytest.raises(EvaluationError, match="cannot be used"), claimed(tmp_path / "precious" / "x", {}, {}):
        pass
    assert list(tmp_path.iterdir()) == [tmp_path / "precious"]


def test_a_setting_that_is_gone_is_another_setting(tmp_path: Path) -> None:
    with claimed(tmp_path, SETTINGS, {}):
        pass
    with pytest.raises(EvaluationError, match="seed is 0 there and null here"), claimed(tmp_path, {"model": "m"}, {}):
        pass


def test_two_commands_cannot_share_a_folder(tmp_path: Path) -> None:
    with (
        claimed(tmp_path, SETTINGS, {}),
        pytest.raises(EvaluationError, match="another troll eval is at work"),
        claimed(tmp_path, SETTINGS, {}),
    ):
        pass
    with claimed(tmp_path, SETTINGS, {}):
        pass


def test_a_damaged_file_is_named_and_a_missing_one_is_empty(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("[]")
    with (
        pytest.raises(EvaluationError, match=r"settings\.json: expected a JSON object.*: choose"),
        claimed(tmp_path, SETTINGS, {}),
    ):
        pass
    assert read_object(tmp_path / "missing.json") == {}
    assert read_records(tmp_path / "missing.jsonl", ORDER, 4) == []


ORDER = [(problem, sample) for problem in (2, 0, 1) for sample in (0, 1)]


def record(problem: int, sample: int, text: str = "4") -> dict[str, Any]:
    return {
        "problem": problem,
        "sample": sample,
        "prompt": "2 + 2?",
        "completion": text,
        "tokens": 1,
        "finished": True,
        "answer": None,
        "score": 0.0,
        "reason": "wrong",
    }


def written(path: Path, count: int) -> list[dict[str, Any]]:
    records = [record(*place) for place in ORDER[:count]]
    append_records(path, records[:1])
    append_records(path, records[1:])
    return records


@pytest.mark.parametrize(("there", "left"), [(6, 6), (5, 4), (4, 4), (3, 0), (1, 0)])
def test_only_whole_batches_stay(tmp_path: Path, there: int, left: int) -> None:
    path = tmp_path / "x.jsonl"
    records = written(path, there)
    assert read_records(path, ORDER, 4) == records[:left]
    whole = tmp_path / "whole.jsonl"
    append_records(whole, records[:left])
    assert path.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("cut", [1, 30])
def test_a_last_line_cut_short_is_dropped(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.jsonl"
    records = written(path, 6)
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_records(path, ORDER, 2) == records[:4]


@pytest.mark.parametrize(
    "text", ["line\nbreak\r", "\u2028\x85\x0b\x0c\x1c", "\ud800 half a pair", "\x00", "π", '"quoted" \\n', "𝟜"]
)
def test_any_text_comes_back(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.jsonl"
    append_records(path, [record(0, 0, text), record(0, 1)])
    records = read_records(path, [(0, 0), (0, 1)], 1)
    assert [one["completion"] for one in records] == [text, "4"]
    replace_records(path, records)
    assert read_records(path, [(0, 0), (0, 1)], 1) == records


@pytest.mark.parametrize(("line", "damage"), [(1, b"not JSON\n"), (2, b'{"problem": 2}\n'), (2, b"[]\n")])
def test_damage_is_named(tmp_path: Path, line: int, damage: bytes) -> None:
    path = tmp_path / "x.jsonl"
    written(path, 6)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line - 1] = damage
    path.write_bytes(b"".join(lines))
    with pytest.raises(EvaluationError, match=f"line {line}: not the record that belongs there"):
        read_records(path, ORDER, 2)


def test_records_of_other_problems_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    written(path, 6)
    with pytest.raises(EvaluationError, match="line 1: not the record"):
        read_records(path, ORDER[::-1], 2)
    with pytest.raises(EvaluationError, match="line 5: not the record"):
        read_records(path, ORDER[:4], 2)


def test_the_verdict_in_a_record() -> None:
    assert verdict_of(record(0, 0)) == Verdict(0.0, None, "wrong")
    judged = with_verdict(record(0, 0), Verdict(1.0, "4", "correct"))
    assert verdict_of(judged) == Verdict(1.0, "4", "correct") and list(judged) == list(record(0, 0))
