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


#: verl lacks something that our rollouts need, and its own servers and agent loops know their configuration.
LACKING = """
import sys
from types import SimpleNamespace
import verl.workers.rollout.replica as replica
class Own:
    def __init__(self, config):
        self.config = self.rollout_config = config
# The loader that ours was put before, without vLLM.
from troll.verl import plugin
replica.RolloutReplicaRegistry._registry["vllm"] = lambda: Own
plugin._report(replica)
import verl.experimental.agent_loop.agent_loop as loop
del replica.TokenOutput.model_fields["extra_fields"]
for name in [name for name in sys.modules if name.startswith("troll.verl") and name != "troll.verl.plugin"]:
    del sys.modules[name]
class Loop(Own): ...
plugin._carry(SimpleNamespace(AgentLoopBase=Loop))
Server = replica.RolloutReplicaRegistry.get("vllm")
old, rollout = (SimpleNamespace(custom={"trust_region": {"anchor": anchor}}) for anchor in ("old", "rollout"))
"""


def test_plugin_leaves_verls_own_servers_where_it_cannot_be_used() -> None:
    program = """
assert issubclass(Server, Own) and Server.__name__ == "Own"
for config in (old, SimpleNamespace(custom=None), SimpleNamespace()):
    assert Server(config).config is Loop(config).config is config
print("as without TROLL")
"""
    assert run(LACKING + program) == "as without TROLL"


@pytest.mark.parametrize("which", ["Server", "Loop"])
def test_plugin_raises_the_first_cause_where_a_rollout_needs_it(which: str) -> None:
    program = f"""
try:
    {which}(rollout)
except RuntimeError as error:
    print(error, type(error.__cause__).__name__)
"""
    said = run(LACKING + program)
    assert "anchor=rollout needs" in said and "extra_fields of TokenOutput" in said and said.endswith("ImportError")


@pytest.mark.parametrize("policy", ["none", "another"])
def test_switched_off_it_is_not_loaded(policy: str) -> None:
    program = "import sys, verl; print('troll.verl.plugin' in sys.modules)"
    assert run(program, VERL_USE_EXTERNAL_PLUGINS=policy) == "False"
