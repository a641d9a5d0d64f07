"""Programs that attack: each prints "breach" and exits with status 0 if it succeeds, and does neither if it fails.

`$SECRET` is the path of a secret file, `$PORT` a port on which the user's process listens, and `$ABSTRACT` the name of
its abstract Unix socket. TROLL_SECRET is in the user's environment. The first line has the verdict (`programs.py`).
"""

from tests.troll_sandbox.programs import without_verdict

#: Tries to cancel the signal that ends it with its parent, and closes all descriptors.
OUTLIVING = """
if libc.prctl(1, 0, 0, 0, 0) == 0:
    breach()
libc.prctl(15, b"innocent", 0, 0, 0)
os.closerange(3, 64)
"""

#: Attacks on the machine: its processes, memory and disk.
ON_THE_MACHINE = {
    "fork bomb": "# killed by signal 6\nrefused(*[os.fork] * 20)\nos.abort()",
    "process by system call": """# wrong answer
numbers = {"x86_64": (56, 57, 58, 435), "aarch64": (220, 435)}[os.uname().machine]
for number in numbers:
    if libc.syscall(number, 17, 0, 0, 0, 0) >= 0:
        breach(number)
""",
    "running a program": """# wrong answer
import subprocess
refused(
    lambda: subprocess.run(["/usr/bin/true"]),
    lambda: os.posix_spawn("/usr/bin/true", ["true"], {}),
    lambda: os.execv("/usr/bin/echo", ["echo", "breach"]),
    lambda: os.system("echo breach") and 1 / 0,
    errors=(OSError, ZeroDivisionError),
)
""",
    "thread bomb": """# wrong answer | thread limit
threading.stack_size(32768)
count = 0
try:
    while True:
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        count += 1
except (RuntimeError, MemoryError):
    pass
if count > 50000:
    breach()
""",
    "memory bomb": """# memory limit
blocks = []
while True:
    blocks.append(bytearray(b"x") * (1 << 24))
    if len(blocks) > 64:
        breach()
""",
    "memory bomb in threads": """# wrong answer | memory limit
def grow():
    blocks = []
    while True:
        blocks.append(bytearray(b"x") * (1 << 20))
        if len(blocks) > 1024:
            breach()
for _ in range(8):
    threading.Thread(target=grow).start()
""",
    "memory in files without a name": """# wrong answer
total = 0
for index in range(1000):
    try:
        file = os.memfd_create(str(index))
        total += os.write(file, b"x" * (1 << 20))
    except OSError:
        break
if total:
    breach()
""",
    "memory in shared segments": """# wrong answer
for _ in range(64):
    if libc.shmget(0, 1 << 26, 0o1600) >= 0:
        breach()
""",
    "disk filler": """# killed by signal 6 | time limit
for folder in ("/tmp", "/dev/shm", "/dev", "/", "/usr", "/inside", "/run", "/var/tmp"):
    written = 0
    for index in range(100):
        try:
            with open(f"{folder}/filler{index}", "wb", buffering=0) as file:
                while written < 1 << 30:
                    written += file.write(b"x" * (1 << 20))
        except OSError:
            pass
    if written > 1 << 25 or (written and folder != "/tmp"):
        breach(folder)
os.abort()
""",
    "many files": """# raised OSError | time limit
os.mkdir("d")
count = 0
while True:
    open(f"d/{count}", "w").close()
    count += 1
    if count > 1000000:
        breach()
""",
    "deep folders": "# raised OSError | time limit\nwhile True:\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)",
    "endless output": "# output limit\nwhile True: os.write(1, b'x' * 65536)",
    "endless output that catches every exception": """# time limit | output limit
while True:
    try:
        print("x" * 65536)
    except BaseException:
        pass
""",
    "endless errors": "# raised x | output limit\nwhile True: os.write(2, b'x' * 65536)",
    "sparse output": "# raised OSError\nos.ftruncate(1, 1 << 40)\nbreach()",
    "inode bomb": """# killed by signal 6 | time limit
count = 0
def bomb(make):
    global count
    try:
        while True:
            make(str(count))
            count += 1
            if count > 100000:
                breach()
    except OSError:
        pass
bomb(os.mkdir)
bomb(lambda name: os.symlink("x" * 1000, name))
bomb(lambda name: os.link("0", name) if count else open("0", "w").close())
bomb(lambda name: open(name, "w").close())
os.abort()
""",
    "sync storm": """# time limit | idle limit
descriptors = [os.open(path, os.O_RDONLY) for path in (os.__file__, "/inside", "/tmp")]
while True:
    os.sync()
    for descriptor in descriptors:
        os.fsync(descriptor)
        os.fdatasync(descriptor)
""",
    "dropping cached pages of others": """# wrong answer
file = os.open(os.__file__, os.O_RDONLY)
refused(
    lambda: os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED),
    lambda: mmap.mmap(file, 0, prot=mmap.PROT_READ).madvise(21),
    lambda: mmap.mmap(file, 0, prot=mmap.PROT_READ).madvise(20),
)
if libc.readahead(file, 0, 1 << 20) >= 0 or libc.mincore(0, 0, 0) == 0:
    breach()
""",
    "huge pages of the shared stock": """# wrong answer
for size in (1 << 21, 1 << 30):
    refused(lambda: mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000), number=1)
""",
    "big pipes": "# wrong answer\nrefused(*[lambda: fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)] * 20)",
    "queued signals": """# killed by signal 6
signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 65))
sent = 0
try:
    while True:
        signal.pthread_kill(threading.get_ident(), 40)
        sent += 1
        if sent > 1000:
            breach()
except OSError:
    pass
os.abort()
""",
    "descriptors in flight": """# wrong answer
import array
a, b = socket.socketpair()
try:
    while True:
        a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [b.fileno()] * 50))])
        breach()
except OSError:
    pass
""",
    "timers without end": """# wrong answer
for _ in range(100000):
    if libc.timer_create(0, None, ctypes.byref(ctypes.c_void_p())) == 0:
        breach()
""",
    "page tables": """# time limit | memory limit
blocks = []
try:
    while True:
        block = mmap.mmap(-1, 1 << 21)
        block[0] = 1
        blocks.append(block)
except (OSError, MemoryError):
    pass
while True:
    pass
""",
    "threads that compute": """# time limit | thread limit
import hashlib
def loop():
    while True:
        hashlib.sha256(bytes(1 << 20))
for _ in range(30):
    threading.Thread(target=loop).start()
""",
    "busy loop": "# time limit\nwhile True: pass",
    "endless sleep": "# idle limit\ntime.sleep(10 ** 6)",
    "short sleeps": "# idle limit\nwhile True: time.sleep(0.05)",
    "waiting for a lock": "# idle limit\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()",
    "stopping itself": "# idle limit\nos.kill(os.getpid(), signal.SIGSTOP)\nsignal.pause()",
    "huge number": "# time limit | memory limit\nprint(len(str(7 ** (10 ** 8))))",
    "huge power in the compiler": "# time limit | memory limit\nx = " + "**".join(["9"] * 50),
    "huge text in the compiler": "# memory limit | time limit\n"
    'x = "a" * 10**9\nprint(len(x))\nx = ("a" * 4000) * 10**9',
    "nested source": "# raised SyntaxError | memory limit | raised MemoryError\nx = " + "(" * 100000 + ")" * 100000,
    "nested unary operators": "# memory limit | raised | time limit\nx = " + "-" * 1000000 + "1",
    "long source": "# memory limit | time limit\nx = [" + "1," * 3000000 + "]",
    "crash": "# killed by signal 11\nctypes.string_at(0)",
    "deep recursion": """# time limit | memory limit | killed by signal 11
sys.setrecursionlimit(10 ** 9)
class A:
    def __repr__(self):
        return repr([self])
repr(A())
""",
}

#: Attacks on the user: files, environment, network, processes.
ON_THE_USER = {
    "changing attributes of devices": """# wrong answer
for device in ("/dev/null", "/dev/zero", "/dev/urandom", "/tmp"):
    file = os.open(device, os.O_RDONLY)
    refused(
        lambda: os.chmod(device, 0o666),
        lambda: os.fchmod(file, 0o666),
        lambda: os.chmod(device, 0o666, dir_fd=file),
        lambda: os.utime(device),
        lambda: os.utime(device, (1, 1)),
        lambda: os.utime(file),
        lambda: os.chown(device, -1, -1),
        lambda: os.chown(device, os.getuid(), os.getgid()),
        lambda: os.lchown(device, -1, -1),
        lambda: os.fchown(file, -1, -1),
        lambda: os.setxattr(device, "user.x", b"1"),
        lambda: os.setxattr(file, "user.x", b"1"),
        lambda: os.setxattr(device, "user.x", b"1", follow_symlinks=False),
        errors=(OSError, NotImplementedError),
    )
    for number in (452, 463):  # fchmodat2, setxattrat: newer than the C library
        if libc.syscall(number, -100, device.encode(), 0o666, 0) >= 0:
            breach(number, device)
""",
    "reading files": """# wrong answer
import glob
wanted = ["$SECRET", "/etc/passwd", "/etc/shadow", "/etc/hostname", "/proc/self/environ", "/proc/1/environ",
          "/proc/1/mem", "/proc/self/root/etc/passwd", "/sys/kernel/hostname", "/dev/mem", "/dev/sda", "/dev/tty"]
refused(*[lambda path=path: open(path, "rb").read(1) for path in wanted])
for folder in ("/home", "/root", "/work", "/proc", "/sys", "/mnt", "/var", "/run", os.path.dirname("$SECRET")):
    try:
        names = os.listdir(folder)
    except OSError:
        continue
    if set(names) - {".pyenv"}:
        breach(folder, names)
""",
    "pipes of the process that reports": """# wrong answer
for number in range(8):
    refused(*[lambda mode=mode: os.open(f"/proc/1/fd/{number}", mode) for mode in (os.O_RDONLY, os.O_WRONLY)])
""",
    "leases and watches": """# wrong answer
open("own", "w").close()
paths = ["own", "/tmp", "/", "/usr", "/inside", "/dev/null", os.__file__, os.path.dirname(os.__file__), sys.executable]
attempts = [(fcntl.F_SETLEASE, kind) for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK)]
attempts += [(fcntl.F_NOTIFY, events) for events in (fcntl.DN_MODIFY, fcntl.DN_MULTISHOT | fcntl.DN_ACCESS, 0)]
attempts += [(1040, struct.pack("IHH", 0, kind, 0)) for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK)]  # F_SETDELEG
for path in paths:
    file = os.open(path, os.O_RDONLY)
    for command, argument in attempts:
        refused(lambda: fcntl.fcntl(file, command, argument), number=errno.EPERM)
""",
    "exclusive locks": """# wrong answer
paths = ["/tmp", "/", "/inside", "/dev/null", os.__file__, os.path.dirname(os.__file__), sys.executable]
for path in paths:
    file = os.open(path, os.O_RDONLY)
    for operation in (fcntl.LOCK_EX, fcntl.LOCK_EX | fcntl.LOCK_NB):
        refused(lambda: fcntl.flock(file, operation), number=errno.EPERM)
        refused(lambda: fcntl.lockf(file, operation))
""",
    "limits of the parent": """# wrong answer
for pid in (1, os.getppid(), os.getpid()):
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_CPU):
        refused(lambda: resource.prlimit(pid, limit, (0, 0)))
refused(
    lambda: os.sched_setaffinity(1, {0}),
    lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
    lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
    lambda: os.setpriority(os.PRIO_USER, 0, 19),
)
""",
    "writing to the input": """# wrong answer
refused(
    lambda: open("/dev/stdin", "r+"),
    lambda: open("/input/input", "ab"),
    lambda: os.write(0, b"breach"),
    lambda: os.ftruncate(0, 0),
    lambda: os.truncate("/input/input", 0),
    lambda: os.unlink("/input/input"),
    lambda: os.rename("/input/input", "/input/x"),
    lambda: os.link("/input/input", "/input/x"),
    lambda: open("/input/x", "w"),
    lambda: os.mkdir("/input/x"),
    lambda: os.unlink("/dev/stdin"),
)
""",
    "becoming another user": """# wrong answer
refused(lambda: os.setuid(0), lambda: os.setresuid(0, 0, 0), lambda: os.setgid(0), lambda: os.setgroups([0]))
if libc.mount(b"none", b"/input", b"tmpfs", 0, None) == 0 or os.getuid() == 0:
    breach()
""",
    "reading the environment": """# wrong answer
libc.getenv.restype = ctypes.c_char_p
if "TROLL_SECRET" in os.environ or libc.getenv(b"TROLL_SECRET"):
    breach()
for key in os.environ:
    if key not in ("HOME", "LANG", "MALLOC_ARENA_MAX", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONHASHSEED",
                   "PYTHONUTF8", "PYTHONPATH", "PWD", "LC_CTYPE"):
        breach(key)
""",
    "sockets": """# wrong answer
attempts = [
    (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", $PORT)),
    (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", $PORT)),
    (socket.AF_UNIX, socket.SOCK_STREAM, "\\0$ABSTRACT"),
    (socket.AF_INET, socket.SOCK_STREAM, ("1.1.1.1", 53)),
]
def send(family, kind, address):
    with socket.socket(family, kind) as connection:
        connection.settimeout(1)
        connection.connect(address)
        connection.send(b"breach")
for attempt in attempts:
    refused(lambda: send(*attempt))
for family in (40, 38, 16, 17):  # virtual machines, cryptography, netlink, packets
    refused(lambda: socket.socket(family, socket.SOCK_STREAM))
""",
    "killing the parent": """# killed by signal 15
for pid in (os.getppid(), 1, -1, 0):
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP):
        try:
            os.kill(pid, number)
        except OSError:
            pass
""",
    "killing all others": "# raised PermissionError\n"
    "os.kill(-1, 9)\nos.kill(os.getppid(), 9)\nos.kill(1, 9)\nraise SystemExit(1)",
    "interrupting the parent": "# wrong answer\nos.kill(os.getppid(), signal.SIGINT)\nos.kill(1, signal.SIGINT)",
    "daemonising": "# time limit\nrefused(os.setsid, os.fork, os.setsid, os.fork)\nwhile True: pass",
    "nested namespaces": """# wrong answer
for flags in (0x10000000, 0x00020000, 0x10020000, 0x40000000, 0x20000000):
    if libc.unshare(flags) == 0:
        breach(hex(flags))
if libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0 or libc.umount2(b"/tmp", 2) == 0:
    breach("mount")
if libc.chroot(b"/tmp") == 0:
    breach("chroot")
""",
    "newer and foreign system calls": """# wrong answer
for number in list(range(424, 434)) + [438, 440, 442, 443, 447, 448, *range(451, 480)]:
    if libc.syscall(number, 0, 0, 0, 0, 0, 0) >= 0:
        breach(number)
""",
    "system calls of another architecture": "# killed by signal 31 | wrong answer\n"
    "if libc.syscall(0x40000000 + 39) > 0: breach()",
    "tracing the runner": """# wrong answer
buffer = ctypes.create_string_buffer(16)
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
ours = Vector(ctypes.addressof(buffer), 16)
for pid in (os.getppid(), 1, os.getpid()):
    if libc.ptrace(16, pid, None, None) == 0 or libc.ptrace(0x4206, pid, None, None) == 0:
        breach("ptrace", pid)
    if libc.process_vm_readv(pid, ctypes.byref(ours), 1, ctypes.byref(ours), 1, 0) > 0:
        breach("memory", pid)
    refused(lambda: open(f"/proc/{pid}/mem", "r+b"))
""",
    "raising limits": """# wrong answer
for name in ("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_CORE"):
    limit = getattr(resource, name)
    try:
        hard = resource.getrlimit(limit)[1]
    except OSError:
        hard = 1000  # of CPU time, which is kept from programs
    for value in (hard + 1, resource.RLIM_INFINITY):
        refused(lambda: resource.setrlimit(limit, (value, value)), errors=(ValueError, OSError))
refused(lambda: os.nice(-5))
""",
    "writing to read-only places": """# wrong answer
import glob
for path in ["/inside/stdio.py", "/inside/x", "/usr/x", "/x", "/dev/x", os.__file__, sys.executable, "/etc/x",
             *glob.glob("/packages/*/x")]:
    for mode in ("a", "w", "r+"):
        refused(lambda: open(path, mode).close())
for path in ("/tmp", "/inside", "/usr", "/"):
    refused(lambda: os.rename(path, path.rstrip("/") + "_moved"), lambda: os.rmdir(path))
""",
    "symbolic links": """# wrong answer
for index, target in enumerate(("$SECRET", "/etc/passwd", "/proc/self/environ", "../../../../../etc/passwd")):
    os.symlink(target, f"link{index}")
    refused(lambda: open(f"link{index}", "r+b"))
os.symlink("$SECRET", "program.py")
os.symlink("/", "root")
os.chdir("root")
""",
}

#: Attacks on the checker.
ON_THE_CHECKER = {
    "outliving everything": "# idle limit\n" + OUTLIVING + "time.sleep(1000)",
    "os._exit(0)": "# wrong answer\nos._exit(0)",
    "sys.exit(0)": "# wrong answer\nsys.exit(0)",
    "exit in a finaliser": "# wrong answer\nimport atexit\natexit.register(os._exit, 0)\nraise ValueError",
    "ending by SIGKILL": """# wrong answer
refused(
    lambda: os.kill(os.getpid(), signal.SIGKILL),
    lambda: os.kill(0, signal.SIGKILL),
    lambda: os.killpg(0, signal.SIGKILL),
    lambda: signal.pthread_kill(threading.get_ident(), signal.SIGKILL),
)
""",
    "ending by its limit on CPU time": """# wrong answer
def system_call():
    if libc.setrlimit(0, (ctypes.c_ulong * 2)(1, 1)):
        raise OSError
refused(
    lambda: resource.setrlimit(resource.RLIMIT_CPU, (1, 1)),
    lambda: resource.prlimit(0, resource.RLIMIT_CPU, (1, 1)),
    system_call,
    errors=(OSError, ValueError),
)
""",
    "escapes in a reason": "# raised ValueError\nraise ValueError('\\x1b[2J\\x07\\ud800\\u202e')",
    "success by signal": "# killed by signal 15\nos.kill(os.getpid(), signal.SIGTERM)",
    "catching everything": """# time limit
def again(*_):
    pass
for number in range(1, 65):
    try:
        signal.signal(number, again)
    except (OSError, ValueError):
        pass
signal.setitimer(signal.ITIMER_PROF, 0)
def forever():
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass
forever()
""",
    "overwriting builtins": """# wrong answer
import builtins, io
class Equal(str):
    def __eq__(self, other):
        return True
    __hash__ = str.__hash__
    def split(self, *_):
        return [Equal()]
    strip = rstrip = splitlines = split
for name in ("print", "len", "all", "any", "zip", "map", "isinstance", "compile", "exec", "eval", "str", "bytes"):
    setattr(builtins, name, lambda *_, **__: Equal())
sys.stdout.write = sys.stdout.flush = lambda *_: 0
sys.stdout = sys.__stdout__ = io.StringIO("breach")
os.write = os._exit = os.wait4 = os.waitpid = os.pread = os.fstat = lambda *_: Equal()
""",
    "searching memory": """# wrong answer
import gc
frame = sys._getframe()
while frame:
    for name, value in list(frame.f_globals.items()) + list(frame.f_locals.items()):
        if isinstance(value, (str, bytes)) and "expected" in name:
            breach(name)
    frame.f_globals["report"] = frame.f_globals["judge"] = lambda *_: True
    frame.f_globals["source"] = b"print('breach')"
    frame = frame.f_back
for thing in gc.get_objects():
    if type(thing) is dict:
        for name in ("report", "serve", "receive", "passed", "status", "limits"):
            if name in thing:
                thing[name] = lambda *_: (True, 0)
for name, module in list(sys.modules.items()):
    if name in ("confine", "stdio", "os", "posix"):
        for key in list(vars(module)):
            if callable(getattr(module, key)) and key != "write":
                try:
                    setattr(module, key, lambda *_: 0)
                except (AttributeError, TypeError):
                    pass
""",
    "reading other tests": """# wrong answer
for number in range(256):
    for step in (lambda: os.lseek(number, 0, 0), lambda: None):
        try:
            step()
            data = os.read(number, 1 << 20) if number not in (1, 2) else b""
        except OSError:
            break
        if b"another test" in data:
            breach()
    if number > 2:
        try:
            os.fstat(number)
            breach()
        except OSError:
            pass
""",
    "fake marker": """# wrong answer
import json
for number in range(65):
    for marker in (
        struct.pack("<5q", 0, 0, 1, 6, 0) + b"breach",
        struct.pack("<q", 1) + b"\\1",
        b'{"passed": true, "status": 0, "reason": "passed"}\\n',
        b"passed\\nPASSED\\nOK\\nTrue\\n1\\n",
    ):
        try:
            os.write(number, marker)
        except OSError:
            pass
""",
    "fake marker and no end": """# time limit
for number in range(65):
    try:
        os.write(number, struct.pack("<5q", 0, 0, 1, 6, 0) + b"breach")
    except OSError:
        pass
while True:
    pass
""",
    "closing everything": "# wrong answer\nos.closerange(0, 256)",
    "closing everything and staying": "# time limit\nos.closerange(0, 256)\nwhile True: pass",
    "duplicating descriptors": """# raised OSError
for number in range(3, 64):
    try:
        os.dup2(1, number)
    except OSError:
        pass
os.close(0)
os.close(1)
while True:
    os.dup(2)
""",
    "output that is not text": "# wrong answer\nsys.stdout.buffer.write(bytes(range(256)) * 1000)",
    "empty": "# wrong answer\n",
    "zero byte": "# raised SyntaxError\n\0",
    "lone surrogate": "# raised SyntaxError\nprint('\ud800')",
    "prose instead of a program": "# raised SyntaxError\nSure! Here is the code you asked for.",
}

#: What stands in front of every attack; `refused` tries what must fail, with an error of these classes and this number.
PRELUDE = """
import ctypes, errno, fcntl, mmap, os, resource, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def refused(*attempts, errors=OSError, number=None):
    for attempt in attempts:
        try:
            attempt()
            breach(attempt)
        except errors as error:
            if number and error.errno != number:
                breach(error)
"""

_BREACH = """
def breach(*what, write=__import__("os").write, leave=__import__("os")._exit):
    write(1, b"breach")
    leave(0)
"""

#: With their verdicts.
PROGRAMS = {**ON_THE_MACHINE, **ON_THE_USER, **ON_THE_CHECKER}
HOSTILE = {
    name: source and _BREACH + PRELUDE + source
    for name, source in ((name, without_verdict(text)) for name, text in PROGRAMS.items())
}
