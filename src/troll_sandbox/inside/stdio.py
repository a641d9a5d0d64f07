"""Runs inside the sandbox: runs a program once per test, in a new process with the test's standard input.

This process neither runs nor compiles the program's code, so its reports can be trusted: how the test's process
ended, its CPU time, and the files that were its standard output and error.

The first byte out says that the sandbox has started. Messages in are a length of 8 bytes (little-endian) and as many
bytes: first the program, then the input of each test, sent after the report on the previous one. `report` describes a
message out. A second argument is a folder for the input, to which the program cannot write; /dev/stdin points to the
file there.
"""

import _signal
import gc
import os
import sys

import confine

_messages = open(0, "rb", closefd=False)  # noqa: SIM115


def receive() -> bytes | None:
    """The next message; None at the end."""
    length = _messages.read(8)
    return _messages.read(int.from_bytes(length, "little")) if len(length) == 8 else None


def input_file(folder: str | None = None) -> tuple[int, str]:
    """A file for the input of each test, and the path that opens it in a test."""
    if folder is None:
        descriptor = os.memfd_create("input")
        return descriptor, f"/dev/fd/{descriptor}"
    path = f"{folder}/input"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o400)
    os.chmod(folder, 0o500)
    return descriptor, path


def report(pid: int, files: tuple[int, int], limit: int) -> None:
    """Waits for a test's process and sends five numbers of 8 bytes, the output and the errors.

    The numbers are: wait status, CPU time in microseconds, whether the work folder is empty, and the lengths of the
    output and of the end of the errors.
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
    """Runs and reports the tests. Returns the program in the process of a test, and None in this one."""
    settings = sys.argv[1]
    limit = int(settings.split(",")[2])
    program = receive()
    given, path = input_file(*sys.argv[2:])
    parent = os.getpid()
    while (text := receive()) is not None:
        os.ftruncate(given, 0)
        for start in range(0, len(text), 1 << 20):
            os.pwrite(given, text[start : start + (1 << 20)], start)
        files = [os.open(path, os.O_RDONLY), os.memfd_create("output"), os.memfd_create("errors")]
        pid = os.fork()
        if pid == 0:
            for number, file in enumerate(files):
                os.dup2(file, number)  # which closes the pipes of its parent here
                os.close(file)
            os.close(given)
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)
            _signal.pthread_sigmask(_signal.SIG_UNBLOCK, _signal.valid_signals())
            os.setpgid(0, 0)  # out of bubblewrap's group: a signal to its own group must not end bubblewrap
            confine.die_with_parent(parent)
            confine.confine(settings)
            return program
        report(pid, (files[1], files[2]), limit)
        for file in files:
            os.close(file)
    return None


# From inside, the kernel does not deliver signals to the first process, but gVisor's kernel does.
_signal.signal(_signal.SIGINT, _signal.SIG_DFL)
_signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
confine.die_with_parent()
gc.freeze()  # the processes of tests do not collect the objects that are here already
os.write(1, b"+")
source = serve()
if source is None:
    os._exit(0)
confine.run(source)
