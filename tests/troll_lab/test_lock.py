import sys
from typing import Any

import pytest

from troll_lab.lock import empty, locked


def test_locked_says_where_it_works(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows
    run = locked(tmp_path / "run", "lock", marker="run.json", content="run", holder="another", error=RuntimeError)
    with pytest.raises(RuntimeError, match=r"output_dir .*run cannot be locked here: that takes Linux or macOS"), run:
        pass
    assert not (tmp_path / "run").exists()


def test_empty_keeps_its_lock_and_waits_for_nobody(tmp_path):
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "weights").touch()
    (tmp_path / "metrics.jsonl").touch()
    held: dict[str, Any] = {"holder": "another", "error": RuntimeError}
    with locked(tmp_path, "lock", **held), pytest.raises(RuntimeError, match="another is at work"):
        empty(tmp_path, "lock", **held)
    assert (tmp_path / "checkpoint-2" / "weights").exists()
    empty(tmp_path, "lock", **held)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
