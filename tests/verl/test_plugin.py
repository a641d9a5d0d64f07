"""What verl loads of the plug-in by itself, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def run(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_importing_verl_loads_nothing_that_is_not_needed() -> None:
    loaded = "print(sorted(name for name in sys.modules if name.startswith('troll.verl')))"
    assert run(f"import sys, verl\n{loaded}") == "['troll.verl', 'troll.verl.plugin']"


def test_servers_and_agent_loops_get_what_they_need_without_the_engines() -> None:
    program = """
import sys
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
print(
    RolloutReplicaRegistry._registry["vllm"].__module__,
    AgentLoopOutput.as_dict.__wrapped__.__module__,
    "troll.verl.seam.training" in sys.modules,
)
"""
    assert run(program) == "troll.verl.plugin verl.experimental.agent_loop.agent_loop False"


def test_a_verl_that_lacks_something_goes_on_without_troll() -> None:
    program = """
import verl.workers.rollout.replica as replica
del replica.TokenOutput.model_fields["extra_fields"]
import verl.experimental.agent_loop.agent_loop
try:
    import troll.verl.agent_loop
except ImportError as error:
    print(error)
"""
    assert "troll.verl does not work with verl" in run(program)


def test_a_verl_that_lacks_something_has_its_own_servers() -> None:
    program = """
import sys
import verl.workers.rollout.replica as replica
class Own: ...
# The loader that ours was put before, without vLLM.
from troll.verl import plugin
replica.RolloutReplicaRegistry._registry["vllm"] = lambda: Own
plugin._report(replica)
import verl.experimental.agent_loop.agent_loop as loop
del replica.TokenOutput.model_fields["extra_fields"]
for name in [name for name in sys.modules if name.startswith("troll.verl") and name != "troll.verl.plugin"]:
    del sys.modules[name]
print(replica.RolloutReplicaRegistry.get("vllm") is Own)
"""
    assert run(program) == "True"


@pytest.mark.parametrize("policy", ["none", "another"])
def test_switched_off_it_is_not_loaded(policy: str) -> None:
    program = "import sys, verl; print('troll.verl.plugin' in sys.modules)"
    assert run(program, VERL_USE_EXTERNAL_PLUGINS=policy) == "False"
