"""What verl loads of the plug-in by itself, and what is said where verl lacks something."""

import pytest
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from tests.troll.verl.fresh import Fresh
from troll.needed import Needed
from troll.verl.seam import check, training


def test_all_that_is_missing_is_named() -> None:
    first, second = Needed(FSDPEngineWithLMHead, "gone", "one thing"), Needed(FSDPEngineWithLMHead, "lost", "another")
    with pytest.raises(ImportError, match=r"\.gone \(one thing\) is missing; .*\.lost \(another\) is"):
        check([first, training.NEEDED[0], second])


#: A change of verl, what is imported of it and goes on without TROLL, the import that is refused, and the reason.
LACKING = {
    "a method": (
        "import verl.workers.engine.fsdp.transformer_impl as x; del x.FSDPEngineWithLMHead.prepare_model_outputs",
        "from troll.verl import TrollPolicyLossConfig",
        "FSDPEngineWithLMHead.prepare_model_outputs (what was",
    ),
    "a function": (
        "import verl.workers.engine.utils as x; del x.pad_packed_inputs",
        "from troll.verl import TrollPolicyLossConfig",
        "cannot import name 'pad_packed_inputs'",
    ),
    "a field": (
        "import verl.workers.rollout.replica as x; del x.TokenOutput.model_fields['extra_fields']\n"
        "import verl.experimental.agent_loop.agent_loop",
        "import troll.verl.agent_loop",
        "extra_fields of TokenOutput",
    ),
}


@pytest.mark.parametrize(("change", "refused", "message"), LACKING.values(), ids=LACKING)
def test_verl_that_lacks_something_is_refused_at_import(fresh: Fresh, change: str, refused: str, message: str) -> None:
    done = fresh(f"{change}\nprint('verl itself goes on')\n{refused}")
    assert done.code == 1 and "verl itself goes on" in done.said
    last = done.said[-1]
    assert message in last and "troll.verl does not work with verl" in last and "verified with verl 0.9" in last


def said(fresh: Fresh, program: str, **environment: str) -> str:
    done = fresh(program, **environment)
    assert done.code == 0, "\n".join(done.said)
    return done.said[-1]


@pytest.mark.parametrize(("plugins", "loaded"), [("auto", "troll.verl troll.verl.plugin"), ("none", "")])
def test_importing_verl_loads_only_what_is_needed(fresh: Fresh, plugins: str, loaded: str) -> None:
    """Of the package; and of the platform for a CPU, which has engines and a rollout as well."""
    program = """
import sys, verl
print("loaded", *sorted(x for x in sys.modules if x.startswith(("troll.verl", "verl_cpu", "verl.workers"))))
"""
    found = said(fresh, program, VERL_USE_EXTERNAL_PLUGINS=plugins)
    assert found.split() == ["loaded", *loaded.split(), "verl_cpu", "verl_cpu.platform", "verl_cpu.vllm_build"]


def test_servers_and_agent_loops_load_no_engines(fresh: Fresh) -> None:
    program = """
import sys
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from troll.verl.agent_loop import begin_sample
begin_sample()
begin_sample()
print(
    RolloutReplicaRegistry._registry["vllm"].__module__,
    *(x.__wrapped__.__module__ for x in (AgentLoopBase.__init__, AgentLoopOutput.as_dict)),
    hasattr(AgentLoopOutput.as_dict.__wrapped__, "__wrapped__"),  # a second sample changes nothing
    "troll.verl.seam.training" in sys.modules,
)
"""
    loop = "verl.experimental.agent_loop.agent_loop"
    assert said(fresh, program) == f"troll.verl.plugin {loop} {loop} False False"


#: verl lacks something that our rollouts need; its own servers and agent loops know their configuration.
WITHOUT_A_FIELD = """
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

assert issubclass(Server, Own) and Server.__name__ == "Own"
for config in (old, SimpleNamespace(custom=None), SimpleNamespace()):
    assert Server(config).config is Loop(config).config is config
for needs in (Server, Loop):
    try:
        needs(rollout)
    except RuntimeError as error:
        print("raised", error, type(error.__cause__).__name__)
"""


def test_plugin_raises_only_where_a_rollout_needs_it(fresh: Fresh) -> None:
    done = fresh(WITHOUT_A_FIELD)
    assert done.code == 0, "\n".join(done.said)
    server, loop = (line for line in done.said if line.startswith("raised"))
    for error in (server, loop):
        assert "anchor=rollout needs" in error and "extra_fields of TokenOutput" in error
        assert error.endswith("ImportError")
