"""Runs inside the sandbox: sets the limits and the system call filter of its process, and runs a program.

Imports only what loads fast: `ctypes` takes 2.5 ms, a fifth of a whole sandbox, `_ctypes` 0.3 ms.
"""

import _io
import _thread
import atexit
import builtins
import gc
import os
import resource
import sys
from _ctypes import POINTER, CFuncPtr, Structure, _SimpleCData, byref, dlopen, dlsym

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SECCOMP_MODE_FILTER = 2
SIGKILL = 9
MS_NOSUID, MS_NODEV = 2, 4

#: The program's work folder, and the folder of its standard input, to which it cannot write.
WORK, INPUT = "/tmp", "/input"

#: User and group of programs inside.
NOBODY = 65534

#: Signals that wait to be delivered to this user, whom all sandboxes may share.
PENDING_SIGNALS = 128

#: Default recursion limit of programs: LiveCodeBench's number, where CPython has 1000.
RECURSION_LIMIT = 50_000

#: Address space for thread stacks, of which programs touch little, in units of the memory limit.
STACKS = 3

#: Default stack size of a thread in the C library, and the size of its guard pages.
DEFAULT_STACK, GUARD = 8 << 20, 1 << 16


class _Int(_SimpleCData):
    _type_ = "i"


class _Long(_SimpleCData):
    _type_ = "L"


class _Short(_SimpleCData):
    _type_ = "H"


class _Bytes(_SimpleCData):
    _type_ = "z"


class _Filter(Structure):
    _fields_ = [("length", _Short), ("lines", _Bytes)]  # noqa: RUF012


def _function(name: str, *arguments: type) -> "Callable[..., int]":
    class Function(CFuncPtr):
        _flags_ = 1  # the C calling convention
        _restype_ = _Int
        _argtypes_ = arguments

    return Function(dlsym(dlopen(None, 0), name))  # type: ignore[arg-type]


_prctl = _function("prctl", _Int, _Long, POINTER(_Filter), _Long, _Long)
_mount = _function("mount", _Bytes, _Bytes, _Bytes, _Long, _Bytes)
_set_capabilities = _function("capset", _Bytes, _Bytes)


def _call(option: int, value: int, lines: bytes | None = None) -> None:
    program = byref(_Filter(len(lines) // 8, lines)) if lines else None
    if _prctl(option, value, program, 0, 0):
        raise OSError(f"prctl({option}, {value}) failed")


def settle(disk: int) -> None:
    """Mounts the folders in memory, becomes the user who owns them, and drops all capabilities.

    Bubblewrap could bound the size of the work folder, but not the number of files, and every empty file takes a
    kilobyte of the kernel's memory.

    Args:
        disk: Size of the work folder in bytes; it can hold a file or folder for every 4 KiB of it.

    Raises:
        OSError: A folder cannot be mounted, or the capability to mount cannot be dropped.
    """
    work = f"size={disk},nr_inodes={max(64, disk // 4096)}"
    if _mount_memory(WORK, work) or _mount_memory(INPUT, "nr_inodes=2"):
        raise OSError("folders in memory cannot be mounted")
    if os.getuid() != NOBODY:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    version, nothing = 0x20080522, bytes(24)
    _set_capabilities(version.to_bytes(4, sys.byteorder) + bytes(4), nothing)
    if not _mount_memory(WORK, work) or set(os.getresuid() + os.getresgid()) != {NOBODY}:
        raise OSError("the capability to mount is still there")
    os.chdir(WORK)


def _mount_memory(folder: str, options: str) -> int:
    owner = f",mode=700,uid={NOBODY},gid={NOBODY}"
    return _mount(b"memory", folder.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, (options + owner).encode())


def die_with_parent(parent: int = 0) -> None:
    """Lets the kernel kill this process when its parent ends, and ends it now if that has already happened.

    Args:
        parent: The process that must be its parent; 0: any, because the end of a namespace ends this process too.
    """
    _call(PR_SET_PDEATHSIG, SIGKILL)
    if parent and os.getppid() != parent:  # it ended before that call, so the kernel will send no signal
        os._exit(1)


def confine(settings: str) -> None:
    """Sets the limits and the system call filter of this process, for good.

    Args:
        settings: The first argument of every script: CPU seconds, bytes of memory, bytes of a file, threads (0: not
            limited) and the filter in hexadecimal, separated by commas.
    """
    cpu, memory, file, threads, lines = settings.split(",")
    limits = [
        (resource.RLIMIT_CPU, int(cpu)),
        (resource.RLIMIT_AS, (1 + STACKS) * int(memory)),
        (resource.RLIMIT_FSIZE, int(file)),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, PENDING_SIGNALS),
    ]
    if int(threads):
        limits.append((resource.RLIMIT_NPROC, int(threads)))
    for limit, value in limits:
        soft, hard = resource.getrlimit(limit)
        value = value if hard < 0 else min(value, hard)  # the user may have lower limits already
        if (soft, hard) != (value, value):  # gVisor sets some limits at the start, and they cannot be set here
            resource.setrlimit(limit, (value, value))
    lift(int(memory))
    _lend_stacks(int(memory))
    _call(PR_SET_NO_NEW_PRIVS, 1)
    _call(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, bytes.fromhex(lines))


def lift(memory: int) -> None:
    """Lifts CPython's limits on recursion and on digits of integers, and lets the stack use all of the memory."""
    sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(RECURSION_LIMIT)
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (memory if hard < 0 else min(memory, hard), hard))


def _lend_stacks(memory: int) -> None:
    """Bounds the address space, and raises the bound by the stack of every thread that starts.

    No stack is larger than the memory limit. The memory that stacks really use counts: see `Watch`.
    """
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    largest = DEFAULT_STACK

    def bound(stacks: int) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (min(memory + stacks, most), most))

    def lending(start):  # type: ignore[no-untyped-def]
        def start_thread(*arguments, **options):  # type: ignore[no-untyped-def]
            nonlocal largest
            asked = _thread.stack_size()  # this call also resets it to the default
            _thread.stack_size(min(asked, memory))
            largest = max(largest, min(asked, memory))
            bound((_thread._count() + 1) * (largest + GUARD))
            try:
                return start(*arguments, **options)
            finally:
                _thread.stack_size(asked)

        return start_thread

    bound(0)
    for name in ("start_new_thread", "start_joinable_thread"):  # the latter since Python 3.13
        if hasattr(_thread, name):
            setattr(_thread, name, lending(getattr(_thread, name)))


def main_module() -> dict[str, object]:
    """Makes a fresh `__main__` for the program, and hides this folder and the script that runs it."""
    sys.path.pop(0)
    sys.argv[:] = [""]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # as the site module would have defined them
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    return vars(module)


def run(source: bytes) -> None:
    """Runs a program as `__main__` and ends this process with the interpreter's exit status.

    Unlike the interpreter, it does not destroy every object, which takes longer than running a short program.
    """
    status = 1
    try:
        try:
            exec(compile(source, "program.py", "exec", dont_inherit=True), main_module())
            status = 0
        except SystemExit as end:
            status = _exit_status(end.code)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        for file in (sys.stdout, sys.__stdout__):
            if file is not None and not getattr(file, "closed", False):
                file.flush()
        _flush_files()
    except BaseException:
        status = status or 1  # its output could not be written
    finally:
        os._exit(status)


def _flush_files() -> None:
    """Flushes the files that the program did not close, as their finalisers would have."""
    for thing in gc.get_objects():
        if issubclass(type(thing), _io._IOBase):
            try:
                thing.flush()
            except Exception:  # a file that is closed or opened for reading, or the program's own class
                continue


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1
