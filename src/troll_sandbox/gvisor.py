"""Sandboxes made by gVisor: each program has its own kernel, which makes few system calls of the machine's."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from troll_sandbox.bubblewrap import NOBODY
from troll_sandbox.errors import SandboxError
from troll_sandbox.launch import ENVIRONMENT, INSIDE, INTERPRETER_FLAGS, OUT_OF_MEMORY_SCORE, Launcher, Process
from troll_sandbox.lifetime import temporary_folder
from troll_sandbox.limits import MEBIBYTE, Limits
from troll_sandbox.supervise import PATIENCE
from troll_sandbox.system import NEED_LIBRARIES, system

#: More threads than gVisor itself has ever had in our runs. It has one more for each thread of the program.
OWN_THREADS = 64

#: Limits that cannot be set inside; the same values as in `confine.confine`.
LIMITS = {"RLIMIT_MSGQUEUE": 0, "RLIMIT_SIGPENDING": 128}

INSTALL = "install it (Debian: apt install runsc; else see https://gvisor.dev/docs/user_guide/install)"


class GVisor(Launcher):
    """Starts scripts of `inside/`, each in a gVisor sandbox (`runsc`), as an OCI container.

    Programs see the same as with `Bubblewrap`, and gVisor's own /sys and /dev. The user is *nobody*, without
    capabilities. Limits and system call filter are the same, and gVisor's kernel enforces them, except those on CPU
    time (its clock also counts waiting for a CPU) and on threads: `Watch` enforces these from outside.

    Args:
        packages: Folders of Python packages that programs may import, e.g. a site-packages folder; read-only.

    Raises:
        SandboxError: `runsc` or `setpriv` is missing, or a trial container did not start.
    """

    own_bytes = 256 * MEBIBYTE

    def __init__(self, *, packages: Sequence[Path] = ()) -> None:
        super().__init__(packages)
        found = {name: shutil.which(name) for name in ("runsc", "setpriv")}
        if found["runsc"] is None:
            raise SandboxError(f"gVisor's program runsc is missing: {INSTALL}")
        if found["setpriv"] is None:
            raise SandboxError("gVisor's sandboxes need the program setpriv: install util-linux")
        # setpriv makes it end with the thread that starts it.
        self._command = [found["setpriv"], "--pdeathsig", "KILL", found["runsc"], "--network=none", "--ignore-cgroups"]
        if os.geteuid() != 0:
            self._command.append("--rootless")
        self._folder = temporary_folder(self, "troll-gvisor-")
        self._root = self._folder / "root"
        self._mounts = self._make_root()
        if refusal := self._trial(NEED_LIBRARIES):
            raise SandboxError(refusal)

    def _make_root(self) -> list[dict[str, Any]]:
        """Makes the root folder, which holds only mount points; returns what is mounted on them."""
        seen = system(self.interpreter, all_of_usr=False)
        shown = {str(path): path for path in seen.shown} | {"/inside": INSIDE, **self.packages}
        for place, path in shown.items():
            inside = self._root / place.lstrip("/")
            if path.is_dir():
                inside.mkdir(parents=True, exist_ok=True)
            else:
                inside.parent.mkdir(parents=True, exist_ok=True)
                inside.touch()
        for name in ("dev", "input", "proc", "sys", "tmp"):
            (self._root / name).mkdir()
        # In place of gVisor's own /proc, which has the pipes of the process that reports on the program: /dev/stdin.
        proc = self._folder / "proc"
        (proc / "self" / "fd").mkdir(parents=True)
        (proc / "self" / "fd" / "0").symlink_to("/input/input")
        for link, target in seen.links.items():
            (self._root / link.relative_to("/")).symlink_to(target)
        for folder in (self._root, *self._root.rglob("*"), proc, *proc.rglob("*")):
            if not folder.is_symlink():
                folder.chmod(0o755)  # so that nobody can read it under any umask
        mounts = [_mount("bind", place, "ro", source=path) for place, path in {**shown, "/proc": proc}.items()]
        return [*mounts, *(_mount("tmpfs", str(path), "ro", "mode=555") for path in seen.hidden)]

    def _launch(self, script: str, arguments: Sequence[str], limits: Limits, streams: dict[str, Any]) -> Process:
        longest = math.ceil(PATIENCE * limits.wall_seconds) * (limits.threads + 1)  # by gVisor's clock
        settings = self._settings(limits, cpu_seconds=longest, threads=0)
        command = [str(self.interpreter), *INTERPRETER_FLAGS, "/inside/enter.py", script, "0", "-1", "0", settings]
        folder = tempfile.mkdtemp(dir=self._folder, prefix="program-")
        try:
            Path(folder, "config.json").write_text(json.dumps(self._container([*command, *arguments], limits)))
            process = Process(  # the container's name has to be unique on this machine
                [*self._command, "--root", f"{folder}/state", "run", "--bundle", folder, Path(folder).name],
                **streams,
                cwd="/",
                env={"PATH": os.defpath},
                start_new_session=True,
            )
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise SandboxError(f"cannot start gVisor: {error.strerror}") from error
        process.folder, process.own_threads, process.exact = folder, OWN_THREADS, False
        self._bound(process, process.pid, script, limits)
        return process

    def _container(self, command: Sequence[str], limits: Limits) -> dict[str, Any]:
        """The container's `config.json`, see https://github.com/opencontainers/runtime-spec."""
        environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(self.packages)}
        owned = (f"uid={NOBODY}", f"gid={NOBODY}", "mode=700", "nosuid", "nodev")
        folders = [_mount("tmpfs", "/tmp", f"size={limits.disk_bytes}", *owned), _mount("tmpfs", "/input", *owned)]
        return {
            "ociVersion": "1.0.0",
            "process": {
                "user": {"uid": NOBODY, "gid": NOBODY},
                "args": list(command),
                "env": [f"{name}={value}" for name, value in environment.items()],
                "cwd": "/tmp",
                "rlimits": [{"type": name, "soft": value, "hard": value} for name, value in LIMITS.items()],
                "noNewPrivileges": True,
                "oomScoreAdj": OUT_OF_MEMORY_SCORE,
            },
            "root": {"path": str(self._root), "readonly": True},
            "hostname": "sandbox",
            "mounts": [*self._mounts, *folders],
            "linux": {"namespaces": [{"type": name} for name in ("pid", "network", "ipc", "uts", "mount")]},
        }

    def _refusal(self, errors: list[str]) -> str:
        return f"gVisor does not start ({errors[-1]}): see docs/sandbox.md"


def _mount(kind: str, place: str, *options: str, source: Path = Path("tmpfs")) -> dict[str, Any]:
    return {"type": kind, "destination": place, "source": str(source), "options": list(options)}
