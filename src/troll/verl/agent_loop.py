"""Brings a rollout's records of old policies into the field `OLD_POLICIES` of the batch, past agent loops and rewards.

The extra fields of a completion reach users' agent loops, reward functions and the JSON of reward servers. verl keeps
those of the first turn only, and none of an interrupted completion. So the records are removed from a completion when
it arrives, and put into the sample when it is sent to the transfer queue: as a separate tensor, which only updates
fetch.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any

from troll.verl.old_policies import OLD_POLICIES
from troll.verl.reported import Turn, response_record
from troll.verl.seam.rollout import (
    AgentLoopOutput,
    LLMServerClient,
    normalize_token_ids,
    rollout_trace_op,
)

#: The engine's answers for the current sample: verl runs one task for each sample, and its subtasks share the list.
_turns: ContextVar[list[Turn]] = ContextVar("turns")


def begin_sample() -> None:
    """Begins a sample in the current task; in the first, makes verl's client and samples of this process carry records.

    Ray sends verl's agent-loop workers by value, with the methods of the time when verl was imported. So this changes
    only classes that a worker imports.
    """
    if _turns.get(None) is None:  # a loop within a loop belongs to its sample
        _turns.set([])
    _carry_old_policies()


@cache
def _carry_old_policies() -> None:
    generate, as_dict = inspect.unwrap(LLMServerClient.generate), AgentLoopOutput.as_dict

    @wraps(generate)
    async def take(self: Any, request_id: str, *, prompt_ids: Any, **inputs: Any) -> Any:
        output = await generate(self, request_id, prompt_ids=prompt_ids, **inputs)
        record, turns = output.extra_fields.pop(OLD_POLICIES, None), _turns.get(None)
        if record is not None and turns is not None:
            turns.append(Turn(normalize_token_ids(prompt_ids), list(output.token_ids), record))
        return output

    @wraps(as_dict)
    def with_field(self: AgentLoopOutput) -> dict[str, Any]:
        fields = as_dict(self)
        # A rollout without reports leaves the field out; an update that needs it refuses the batch.
        if turns := _turns.get([]):
            fields[OLD_POLICIES] = response_record(self.prompt_ids, self.response_ids, turns)
        return fields

    LLMServerClient.generate = rollout_trace_op(take)  # below verl's trace of it, which would log the records
    AgentLoopOutput.as_dict = with_field
