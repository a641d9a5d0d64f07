"""The parts of verl's rollouts that we build on: servers, the clients that call them, and the agent loops."""
# ruff: noqa: F401 (the rest of the plug-in imports verl's names from here)

from __future__ import annotations

from troll.needed import Needed
from troll.verl.seam import check, lacking

try:
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
    from verl.utils.rollout_trace import rollout_trace_op
    from verl.utils.tokenizer import normalize_token_ids
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.replica import RolloutReplicaRegistry, TokenOutput
except ImportError as error:
    raise lacking(error) from error

NEEDED: tuple[Needed, ...] = (
    Needed(RolloutReplicaRegistry, "register", "a server that reports its distributions", ("name", "loader")),
    Needed(AgentLoopBase, "__init__", "where a sample begins"),
    Needed(LLMServerClient, "generate", "taking records out of completions", ("request_id", "prompt_ids")),
    Needed(AgentLoopOutput, "as_dict", "putting a sample's record into the batch"),
)

check(NEEDED)

if "extra_fields" not in TokenOutput.model_fields:
    raise lacking("extra_fields of TokenOutput (records of a completion)")
