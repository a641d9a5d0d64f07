import sys

import pytest

from troll_lab.lock import locked


def test_locked_says_where_it_works(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows
    run = locked(tmp_path / "run", "lock", marker="run.json", content="run", holder="another", error=RuntimeError)
    with pytest.raises(RuntimeError, match=r"output_dir .*run cannot be locked here: that takes Linux or macOS"), run:
        pass
    assert not (tmp_path / "run").exists()
