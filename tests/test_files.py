import sys
from pathlib import Path

import pytest

from troll.files import locked, write_atomically


def test_locked_says_where_it_works(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows
    run = locked(tmp_path / "run", "lock", marker="run.json", content="run", holder="another", error=RuntimeError)
    with pytest.raises(RuntimeError, match=r"output_dir .*run cannot be locked here: that takes Linux or macOS"), run:
        pass
    assert not (tmp_path / "run").exists()


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
