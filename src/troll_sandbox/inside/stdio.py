"""Runs inside the sandbox: a program once per test, each in a process of its own that reads standard input.

This process runs nothing of the program's, not even its compilation, so what it reports is the kernel's word: how the
test's process ended, its CPU time, and the files that were its standard output and error.

The first byte out says that the sandbox stands. Messages in are a length of 8 bytes (little-endian) and so many bytes:
first the program, then the input of each test, sent when the one before has been reported. A message out is described
at `report`. Where there is a second argument, it is a folder for the input that the program cannot write to; the input
has a name there, to which /dev/stdin points.
"""

import _signal
import gc
import os
import sys

import confine

READY = b"+"


def receive() -> bytes | None:
    """The next message; None where there is none."""
    length = _read(8)
    return _read(int.from_bytes(length, "little")) if len(length) == 8 else None


def _read(length: int) -> bytes:
    parts = []
    while length and (part := os.read(0, min(length, 1 << 20))):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def input_file(folder: str | None = None) -> tuple[int, str]:
    """A file to write the input of each test to, and the path by which a test opens it."""
    if folder is None:
        descriptor = os.memfd_create("input")
        return descriptor, f"/dev/fd/{descriptor}"
    path = f"{folder}/input"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o400)
    os.chmod(folder, 0o500)
    return descriptor, path


def report(pid: int, files: tuple[int, int], limit: int) -> None:
    """Waits for a test's process and sends five numbers of 8 bytes, the output and the errors.

    The numbers are: wait status, CPU time in microseconds, whether the work folder is as it was before, and the lengths
    of the output and of the errors' end.
    """
    _, status, usage = os.wait4(pid, 0)
    output = os.pread(files[0], limit, 0)
    size = os.fstat(files[1]).st_size
    errors = os.pread(files[1], 2000, max(0, size - 2000))
    microseconds = round((usage.ru_utime + usage.ru_stime) * 1e6)
    numbers = (status, microseconds, not os.listdir(), len(output), len(errors))
    left = memoryview(b"".join(number.to_bytes(8, "little") for number in numbers) + output + errors)
    while left:
        left = left[os.write(1, left) :]


def serve() -> bytes | None:
    """Reports on one test after another; returns the program in the process of a test, and None after the last."""
    settings = sys.argv[1]
    limit = int(settings.split(",")[2])
    program = receive()
    given, path = input_file(*sys.argv[2:])
    while (text := receive()) is not None:
        os.ftruncate(given, 0)
        for start in range(0, len(text), 1 << 20):
            os.pwrite(given, text[start : start + (1 << 20)], start)
        files = [os.open(path, os.O_RDONLY), os.memfd_create("output"), os.memfd_create("errors")]
        pid = os.fork()
        if pid == 0:
            for number, file in enumerate(files):
                os.dup2(file, number)  # the last hold of this process on the pipes of its parent
                os.close(file)
            os.close(given)
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)
            _signal.pthread_sigmask(_signal.SIG_UNBLOCK, _signal.valid_signals())
            os.setpgid(0, 0)  # out of bubblewrap's group, which a signal to the group could end
            confine.die_with_parent()
            confine.confine(settings)
            return program
        report(pid, (files[1], files[2]), limit)
        for file in files:
            os.close(file)
    return None


# What the kernel does not deliver from inside to the first process; gVisor's kernel does.
_signal.signal(_signal.SIGINT, _signal.SIG_DFL)
_signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
confine.die_with_parent()
gc.freeze()  # what is here already is no concern of the tests' processes, neither while they run nor at their end
os.write(1, READY)
source = serve()
if source is None:
    os._exit(0)
confine.run(source)
