"""The system calls that a program may not make, as a filter for the kernel (seccomp, classic BPF).

Programs may start threads and no processes: with one process, the kernel's limits on CPU time and memory hold for the
program as a whole. They may not take back the signal that ends them with their parent, nor change owner, mode, times
or attributes of a file: where the user is root, the devices inside are the user's own. They may not take a lease on a
file, which holds up whoever else opens it, nor watch a folder. What reaches other processes, other namespaces, mounts,
devices of the kernel (keys, BPF, io_uring) or memory that no limit counts (memfd, System V shared memory) is refused
too, and so is every call that is newer than this list.
"""

from __future__ import annotations

import errno
import platform
import struct

#: Numbers of refused system calls on (x86_64, aarch64); None where the machine has no such call.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    # processes
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "kcmp": (312, 272),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # what belongs to files: the devices are the user's
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    # the network
    "socket": (41, 198),
    # memory outside the limits
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "userfaultfd": (323, 282),
    "vmsplice": (278, 75),
    # parts of the kernel that a test has no use for
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "io_setup": (206, 0),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "fanotify_init": (300, 262),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "iopl": (172, None),
    "ioperm": (173, None),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
}

#: machine: (its AUDIT_ARCH, column of `REFUSED`, number of clone, number of prctl, number of fcntl)
MACHINES = {"x86_64": (0xC000003E, 0, 56, 157, 72), "aarch64": (0xC00000B7, 1, 220, 167, 25)}

CLONE3 = 435  # on every machine
NEWEST = 450  # set_mempolicy_home_node, Linux 5.17
X32 = 0x40000000  # x86_64's second set of numbers, which would pass by every comparison below
CLONE_THREAD = 0x00010000
PR_SET_PDEATHSIG = 1
F_SETLEASE, F_NOTIFY, F_SETDELEG = 1024, 1026, 1040  # the last is a lease too, new in Linux 6.19

# Offsets in struct seccomp_data; arguments are read by their low half, as the kernel reads those compared here.
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, SECOND_ARGUMENT = 0, 4, 16, 24

LOAD, RETURN = 0x20, 0x06  # BPF_LD | BPF_W | BPF_ABS, BPF_RET | BPF_K
EQUAL, GREATER, GREATER_EQUAL, ANY_BIT = 0x15, 0x25, 0x35, 0x45  # BPF_JMP | BPF_JEQ, JGT, JGE, JSET | BPF_K
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000


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
    architecture, column, clone, prctl, fcntl = MACHINES[machine]
    refused = sorted(number for numbers in REFUSED.values() if (number := numbers[column]) is not None)

    # (operation, operand, label to jump to where it holds); execution goes on with the next line where it does not.
    lines: list[tuple[int, int, str | None]] = [
        (LOAD, ARCHITECTURE, None),
        (EQUAL, architecture, "known"),
        (RETURN, KILL, None),
        (LOAD, NUMBER, "known:"),
        (GREATER_EQUAL, X32, "kill"),
        (GREATER, NEWEST, "missing"),
        (EQUAL, CLONE3, "missing"),  # its flags are behind a pointer; the C library then falls back to clone
        (EQUAL, clone, "clone"),
        (EQUAL, prctl, "prctl"),
        (EQUAL, fcntl, "fcntl"),
        *((EQUAL, number, "refuse") for number in refused),
        (RETURN, ALLOW, "allow:"),
        (LOAD, FIRST_ARGUMENT, "clone:"),
        (ANY_BIT, CLONE_THREAD, "allow_thread"),
        (RETURN, ERROR | errno.EPERM, "refuse:"),
        (LOAD, FIRST_ARGUMENT, "prctl:"),
        (EQUAL, PR_SET_PDEATHSIG, "refuse_argument"),
        (RETURN, ALLOW, None),
        (LOAD, SECOND_ARGUMENT, "fcntl:"),
        (EQUAL, F_SETLEASE, "refuse_argument"),
        (EQUAL, F_NOTIFY, "refuse_argument"),
        (EQUAL, F_SETDELEG, "refuse_argument"),
        (RETURN, ALLOW, None),
        (RETURN, ERROR | errno.EPERM, "refuse_argument:"),
        (RETURN, ERROR | errno.ENOSYS, "missing:"),
        (RETURN, KILL, "kill:"),
        (RETURN, ALLOW, "allow_thread:"),
    ]
    places = {label[:-1]: index for index, (*_, label) in enumerate(lines) if label and label.endswith(":")}
    return b"".join(
        struct.pack(
            "=HBBI",
            operation,
            places[label] - index - 1 if label and not label.endswith(":") else 0,
            0,
            operand,
        )
        for index, (operation, operand, label) in enumerate(lines)
    )
