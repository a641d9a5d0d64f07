"""Locks of folders: one program at a time writes a run."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

#: What to do about a folder that cannot be used.
ANOTHER_FOLDER = "choose another folder with --output_dir"


@contextlib.contextmanager
def locked(
    folder: Path, lock: str, *, holder: str, error: type[Exception], marker: str | None = None, content: str = ""
) -> Iterator[int]:
    """Makes a folder and holds its lock, a file; child processes may inherit its descriptor to keep it locked.

    Args:
        folder: The folder: new, empty, or with the marker.
        lock: The name of the lock file in the folder.
        holder: The other program that may hold the lock, in words, for errors.
        error: The exception to raise if the folder cannot be used, holds something else or is in use.
        marker: The file that shows what kind of folder it is; None if it may hold anything.
        content: The content of a folder with the marker, in words, for errors.

    Yields:
        The descriptor of the lock file.
    """
    try:
        import fcntl  # not on Windows, where everything but the commands works
    except ImportError as cause:
        raise error(f"output_dir {folder} cannot be locked here: that takes Linux or macOS ({cause})") from cause
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if marker and not (folder / marker).is_file() and any(path.name != lock for path in folder.iterdir()):
            raise error(f"output_dir {folder} is not empty and holds no {content}: {ANOTHER_FOLDER}")
        file = (folder / lock).open("a")
    except OSError as cause:
        raise error(f"output_dir {folder} cannot be used: {cause.strerror}") from cause
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            raise error(f"{holder} is at work in {folder}: wait for it, or {ANOTHER_FOLDER}") from cause
        except OSError as cause:  # some network file systems have no locks
            raise error(f"output_dir {folder} cannot be locked: {cause.strerror}; {ANOTHER_FOLDER}") from cause
        yield file.fileno()


def empty(folder: Path, lock: str, *, holder: str, error: type[Exception]) -> None:
    """Deletes everything in a folder except its lock, which it holds; arguments as in `locked`."""
    with locked(folder, lock, holder=holder, error=error):
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != lock:
                path.unlink()
