"""Sandboxes made by gVisor: a kernel of its own for each program, which talks to the machine's very little."""

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
from troll_sandbox.launch import (
    ENVIRONMENT,
    INSIDE,
    INTERPRETER_FLAGS,
    OUT_OF_MEMORY_SCORE,
    Launcher,
    Process,
)
from troll_sandbox.lifetime import temporary_folder
from troll_sandbox.limits import MEBIBYTE, Limits
from troll_sandbox.supervise import PATIENCE
from troll_sandbox.system import NEED_LIBRARIES, system

#: Of gVisor itself, more than it has ever had; it has one more for each of the program's.
OWN_THREADS = 64

#: Limits that programs inside cannot set. `confine.confine` asks for the same.
LIMITS = {"RLIMIT_MSGQUEUE": 0, "RLIMIT_SIGPENDING": 128}

INSTALL = "install it (Debian: apt install runsc; else see https://gvisor.dev/docs/user_guide/install)"


class GVisor(Launcher):
    """Starts scripts of `inside/`, each in a gVisor sandbox (`runsc`), as an OCI container.

    Programs see what they see with `Bubblewrap`, and gVisor's own /proc, /sys and /dev. The user is nobody, without
    capabilities. Scripts confine themselves with the same limits and system call filter, which gVisor's kernel enforces
    but for CPU time and the number of threads: its clock counts waiting for a CPU as well. `Watch` sees to these.

    Args:
        packages: Folders of Python packages that programs may import, e.g. a site-packages folder; read-only.

    Raises:
        SandboxError: `runsc` or `setpriv` is missing, or a container does not start. Found out by one real run.
    """

    own_bytes = 256 * MEBIBYTE

    def __init__(self, *, packages: Sequence[Path] = ()) -> None:
        super().__init__(packages)
        found = {name: shutil.which(name) for name in ("runsc", "setpriv")}
        if found["runsc"] is None:
            raise SandboxError(f"gVisor's program runsc is missing: {INSTALL}")
        if found["setpriv"] is None:
            raise SandboxError("gVisor's sandboxes need the program setpriv: install util-linux")
        # It ends with the thread that starts it.
        self._command = [found["setpriv"], "--pdeathsig", "KILL", found["runsc"], "--network=none", "--ignore-cgroups"]
        if os.geteuid() != 0:
            self._command.append("--rootless")
        self._folder = temporary_folder(self, "troll-gvisor-")
        self._root = self._folder / "root"
        self._mounts = self._make_root()
        if refusal := self._trial(NEED_LIBRARIES):
            raise SandboxError(refusal)

    def _make_root(self) -> list[dict[str, Any]]:
        """Makes the root folder, which holds no more than places to mount to, and returns what is mounted there."""
        seen = system(self.interpreter, all_of_usr=False)
        shown = {path: path for path in seen.shown} | {Path("/inside"): INSIDE}
        shown |= {Path(f"/packages/{index}"): folder for index, folder in enumerate(self.packages)}
        for place, path in shown.items():
            inside = self._root / place.relative_to("/")
            (inside if path.is_dir() else inside.parent).mkdir(parents=True, exist_ok=True)
            if not path.is_dir():
                inside.touch()
        for name in ("dev", "input", "proc", "sys", "tmp"):
            (self._root / name).mkdir()
        for link, target in seen.links.items():
            (self._root / link.relative_to("/")).symlink_to(target)
        for folder in (self._root, *self._root.rglob("*")):
            if not folder.is_symlink():
                folder.chmod(0o755)  # the umask may be stricter, and programs are somebody else
        mounts = [_mount("bind", place, "ro", source=path) for place, path in shown.items()]
        return [*mounts, *(_mount("tmpfs", path, "ro", "mode=555") for path in seen.hidden)]

    def _launch(self, script: str, arguments: Sequence[str], limits: Limits, streams: tuple[int, ...]) -> Process:
        longest = math.ceil(PATIENCE * limits.wall_seconds) * (limits.threads + 1)  # by gVisor's clock
        settings = self._settings(limits, cpu_seconds=longest, threads=0)
        command = [str(self.interpreter), *INTERPRETER_FLAGS, "/inside/enter.py", script, "0", "-1", settings]
        folder = tempfile.mkdtemp(dir=self._folder, prefix="program-")
        try:
            Path(folder, "config.json").write_text(json.dumps(self._container([*command, *arguments], limits)))
            process = Process(  # the name has to be the only one of its kind on this machine
                [*self._command, "--root", f"{folder}/state", "run", "--bundle", folder, Path(folder).name],
                stdin=streams[0],
                stdout=streams[1],
                stderr=streams[2],
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
        packages = os.pathsep.join(f"/packages/{index}" for index in range(len(self.packages)))
        mine = (f"uid={NOBODY}", f"gid={NOBODY}", "mode=700", "nosuid", "nodev")
        folders = [
            _mount("tmpfs", Path("/tmp"), f"size={limits.disk_bytes}", *mine),
            _mount("tmpfs", Path("/input"), *mine),
        ]
        return {
            "ociVersion": "1.0.0",
            "process": {
                "user": {"uid": NOBODY, "gid": NOBODY},
                "args": list(command),
                "env": [f"{name}={value}" for name, value in {**ENVIRONMENT, "PYTHONPATH": packages}.items()],
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


def _mount(kind: str, place: Path, *options: str, source: Path = Path("tmpfs")) -> dict[str, Any]:
    return {"type": kind, "destination": str(place), "source": str(source), "options": list(options)}
