"""Runs programs that a model wrote, isolated from the user, and judges them by their tests.

Needs neither torch nor TROLL. `README.md` lists its guarantees.
"""

from troll_sandbox.bubblewrap import Bubblewrap
from troll_sandbox.cases import CodeTests, FunctionTests, StreamTests
from troll_sandbox.errors import SandboxError
from troll_sandbox.executor import Executor, Job, Sandbox
from troll_sandbox.fusion import SandboxFusion
from troll_sandbox.gvisor import GVisor
from troll_sandbox.limits import Limits, Outcome
from troll_sandbox.local import LocalSandbox

__all__ = [
    "Bubblewrap",
    "CodeTests",
    "Executor",
    "FunctionTests",
    "GVisor",
    "Job",
    "Limits",
    "LocalSandbox",
    "Outcome",
    "Sandbox",
    "SandboxError",
    "SandboxFusion",
    "StreamTests",
]
