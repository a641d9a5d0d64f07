"""The system calls that a program may make, as a filter for the kernel (seccomp, classic BPF).

Calls that are not listed here are refused, including those that the kernel does not have yet. Programs may start
threads but no processes, so the kernel's limits on the CPU time and memory of a process hold for the whole program.
They may open, read and write files, wait, and ask for the time. They may not hold up other users of the same files
(leases, watches, exclusive locks, writing to the disk, dropping caches), reach another process, change attributes of a
file, or use memory that no limit counts. They may not send SIGKILL, lower the limit on CPU time at which the kernel
sends it, or exit with the status of a killed sandbox: a SIGKILL always came from the kernel or the supervisor.
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass
from itertools import groupby

#: Each machine's column in the tables below, and its AUDIT_ARCH.
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

#: Numbers on (x86_64, aarch64); None where the machine has no such call.
Numbers = tuple[int | None, int | None]

ALLOWED: dict[str, Numbers] = {
    # files
    "read": (0, 63),
    "write": (1, 64),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "readv": (19, 65),
    "writev": (20, 66),
    "preadv": (295, 69),
    "pwritev": (296, 70),
    "preadv2": (327, 286),
    "pwritev2": (328, 287),
    "lseek": (8, 62),
    "open": (2, None),
    "openat": (257, 56),
    "openat2": (437, 437),
    "creat": (85, None),
    "close": (3, 57),
    "close_range": (436, 436),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "stat": (4, None),
    "lstat": (6, None),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "statfs": (137, 43),
    "fstatfs": (138, 44),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getdents": (78, None),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "fchdir": (81, 50),
    "umask": (95, 166),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "fallocate": (285, 47),
    "sendfile": (40, 71),
    "copy_file_range": (326, 285),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rmdir": (84, None),
    # waiting
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "epoll_create": (213, None),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441),
    "eventfd": (284, None),
    "eventfd2": (290, 19),
    "pause": (34, None),
    "wait4": (61, 260),
    "waitid": (247, 95),
    # a pair of sockets that the program has
    "sendto": (44, 206),
    "recvfrom": (45, 207),
    "recvmsg": (47, 212),
    "shutdown": (48, 210),
    "getsockname": (51, 204),
    "getpeername": (52, 205),
    "getsockopt": (55, 209),
    # memory
    "brk": (12, 214),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "mprotect": (10, 226),
    # threads and signals
    "futex": (202, 98),
    "futex_waitv": (449, 449),
    "set_robust_list": (273, 99),
    "rseq": (334, 293),
    "set_tid_address": (218, 96),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126),
    "getcpu": (309, 168),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    # time
    "time": (201, None),
    "gettimeofday": (96, 169),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "alarm": (37, None),
    "getitimer": (36, 102),
    "setitimer": (38, 103),
    "times": (100, 153),
    # what it is
    "getpid": (39, 172),
    "getppid": (110, 173),
    "gettid": (186, 178),
    "getpgid": (121, 155),
    "getpgrp": (111, None),
    "getsid": (124, 156),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getgroups": (115, 158),
    "getpriority": (140, 141),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "getrandom": (318, 278),
}

#: These do nothing and succeed. Files are in memory or read-only, so there is nothing to write to a disk, but the disk
#: would flush its cache.
PRETENDED: dict[str, Numbers] = {
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "msync": (26, 227),
    "sync": (162, 81),
}

EQUAL, GREATER_EQUAL, ANY_BIT = 0x15, 0x35, 0x45  # BPF_JMP | BPF_JEQ, BPF_JGE, BPF_JSET | BPF_K


@dataclass(frozen=True)
class Rule:
    """A call that one argument allows or refuses. Only its low half is tested, which is all that the kernel reads.

    Attributes:
        numbers: The call's number on each machine.
        argument: Index of the argument, from 0.
        test: `EQUAL` or `ANY_BIT`.
        operands: The argument is tested with each of these values.
        allows: Whether the call is allowed if one of the tests holds and refused otherwise, or the reverse.
        then: What to do with a call that this rule allows: "allow", or the name of a further rule below this one.
        refused: What to do with a call that this rule refuses: "refuse", or "end" to end the process.
        mask: The bits of the argument that are tested.
    """

    numbers: Numbers
    argument: int
    test: int
    operands: tuple[int, ...]
    allows: bool = True
    then: str = "allow"
    refused: str = "refuse"
    mask: int = 0xFFFFFFFF


SIGKILL = 9
KILLED_STATUS = (128 + SIGKILL, 128)  # exit status of a killed sandbox; the last one is gVisor's own failure
CLONE_THREAD = 0x00010000
MAP_HUGETLB = 0x40000  # memory from a stock that all of the machine shares
LOCK_EX = 2  # which needs no right to write, so that one program could hold up all readers
AF_UNIX = 1
RLIMIT_CPU = 0

CHECKED: dict[str, Rule] = {
    "clone": Rule((56, 220), 0, ANY_BIT, (CLONE_THREAD,)),
    "exit": Rule((60, 93), 0, EQUAL, KILLED_STATUS, allows=False, refused="end", mask=0xFF),
    "exit_group": Rule((231, 94), 0, EQUAL, KILLED_STATUS, allows=False, refused="end", mask=0xFF),
    # F_DUPFD to F_SETFL, F_GETLK to F_SETLKW, F_OFD_GETLK to F_OFD_SETLKW, F_DUPFD_CLOEXEC
    "fcntl": Rule((72, 25), 1, EQUAL, (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030)),
    # FIONREAD, FIONBIO, FIOCLEX, FIONCLEX, TCGETS, TCGETS2, TIOCGWINSZ
    "ioctl": Rule((16, 29), 1, EQUAL, (0x541B, 0x5421, 0x5451, 0x5450, 0x5401, 0x802C542A, 0x5413)),
    "flock": Rule((73, 32), 1, ANY_BIT, (LOCK_EX,), allows=False),
    "kill": Rule((62, 129), 1, EQUAL, (SIGKILL,), allows=False),
    "tgkill": Rule((234, 131), 2, EQUAL, (SIGKILL,), allows=False),
    # MADV_NORMAL to MADV_DONTNEED, MADV_FREE, MADV_HUGEPAGE to MADV_DODUMP, MADV_GUARD_INSTALL and _REMOVE
    "madvise": Rule((28, 233), 2, EQUAL, (0, 1, 2, 3, 4, 8, 14, 15, 16, 17, 102, 103)),
    "mmap": Rule((9, 222), 3, ANY_BIT, (MAP_HUGETLB,), allows=False),
    # PR_GET_PDEATHSIG, PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME
    "prctl": Rule((157, 167), 0, EQUAL, (2, 3, 15, 16)),
    "prlimit64": Rule((302, 261), 0, EQUAL, (0,), then="limit"),  # its own, not those of the process that tests it
    "limit": Rule((None, None), 1, EQUAL, (RLIMIT_CPU,), allows=False),
    "setrlimit": Rule((160, 164), 0, EQUAL, (RLIMIT_CPU,), allows=False),
    "socketpair": Rule((53, 199), 0, EQUAL, (AF_UNIX,)),
}

#: From this number on, numbers are the same on every machine, and C libraries do without the calls if they are missing
#: (Linux 5.1 and later). One is clone3, whose flags no filter can see.
NEW = 424
X32 = 0x40000000  # x86_64's second set of numbers

# Offsets in struct seccomp_data.
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16

LOAD, AND, RETURN = 0x20, 0x54, 0x06  # BPF_LD | BPF_W | BPF_ABS, BPF_ALU | BPF_AND | BPF_K, BPF_RET | BPF_K

#: The filter's results, by the label of the line that returns them.
ENDS = {
    "allow": 0x7FFF0000,
    "pretend": 0x00050000,
    "refuse": 0x00050000 | errno.EPERM,
    "missing": 0x00050000 | errno.ENOSYS,
    "end": 0x80000000,
}

#: Operation, operand, and the labels to go to if it holds and if not; "" is the next line.
Line = tuple[int, int, str, str]


def filter_program(machine: str | None = None) -> bytes:
    """The filter as an array of `struct sock_filter`.

    Args:
        machine: What `platform.machine()` returns; this machine by default.

    Raises:
        ValueError: No system call numbers are known for the machine.
    """
    machine = machine or platform.machine()
    if machine not in MACHINES:
        raise ValueError(f"no system call filter for {machine}, only for {', '.join(MACHINES)}")
    column, architecture = MACHINES[machine]
    lines: list[Line] = [(LOAD, ARCHITECTURE, "", ""), (EQUAL, architecture, "", "end"), (LOAD, NUMBER, "", "")]
    lines += [(GREATER_EQUAL, end, "", label) for label, end in _ranges(column)]
    places: dict[str, int] = {}
    lines.append((RETURN, ENDS["end"], "", ""))
    for name, rule in CHECKED.items():
        places[name] = len(lines)
        lines += [(LOAD, ARGUMENTS + 8 * rule.argument, "", ""), (AND, rule.mask, "", "")]
        found, other = (rule.then, rule.refused) if rule.allows else (rule.refused, rule.then)
        lines += [(rule.test, operand, found, "") for operand in rule.operands[:-1]]
        lines.append((rule.test, rule.operands[-1], found, other))
    for label, value in ENDS.items():
        places[label] = len(lines)
        lines.append((RETURN, value, "", ""))
    return b"".join(
        struct.pack("=HBBI", operation, *(places[label] - index - 1 if label else 0 for label in labels), operand)
        for index, (operation, operand, *labels) in enumerate(lines)
    )


def _ranges(column: int) -> list[tuple[str, int]]:
    """The label for each range of call numbers, with the first number after the range."""
    labels = {number: "allow" for numbers in ALLOWED.values() if (number := numbers[column]) is not None}
    labels |= {number: "pretend" for numbers in PRETENDED.values() if (number := numbers[column]) is not None}
    labels |= {number: name for name, rule in CHECKED.items() if (number := rule.numbers[column]) is not None}
    of_each = [labels.get(number, "refuse" if number < NEW else "missing") for number in range(max(NEW, *labels) + 1)]
    ranges, end = [], 0
    for label, group in groupby(of_each):
        end += len(list(group))
        ranges.append((label, end))
    return [*ranges, ("missing", X32)]
