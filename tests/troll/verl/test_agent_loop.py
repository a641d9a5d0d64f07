"""From a server's answers to the batch, through verl's own client, agent-loop worker, reward manager and queue rows."""

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    AgentLoopWorker,
    _agent_loop_registry,
)
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.utils import rollout_trace
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from tests.troll.verl.test_reported import SETTINGS, check_slots, engine_rows
from troll.verl.old_policies import OLD_POLICIES
from troll.verl.records import from_records
from troll.verl.reported import old_policy_record
from troll_lab.runs.toy_model import character_tokenizer

PROMPT, TOOL = [1, 2, 3], [5, 6]
MEMORY_AGENT = Path(__file__).resolve().parents[3] / "examples" / "verl" / "memagent"


class Server:
    """As verl's server actor; answers with 4 tokens, and reports their old policies unless told not to."""

    def __init__(self, reports: bool = True, interrupted: bool = False) -> None:
        self.generate = SimpleNamespace(remote=self._generate)
        self.records: list[Tensor] = []
        self._reports, self._interrupted = reports, interrupted

    async def _generate(self, *, request_id: str, prompt_ids: list[int], **_: Any) -> TokenOutput:
        ids, log_probs = engine_rows(4, seed=len(prompt_ids))
        record = old_policy_record(ids, log_probs, **SETTINGS)
        self.records.append(record)
        extra_fields: dict[str, Any] = {"global_steps": 1}
        if self._reports:
            extra_fields[OLD_POLICIES] = record
        aborted = self._interrupted and len(self.records) == 1
        return TokenOutput(
            token_ids=ids[:, 0].tolist(),
            log_probs=log_probs[:, 0].tolist(),
            stop_reason="aborted" if aborted else "completed",
            extra_fields=extra_fields,
        )


class Loop(AgentLoopBase):
    """A user's agent loop: it calls the engine, hands on what it got, and calls again after a tool's answer."""

    turns = 1
    as_prompt: Any = list

    async def run(self, sampling_params: dict[str, Any], **_: Any) -> AgentLoopOutput:
        response: list[int] = []
        mask: list[int] = []
        fields: dict[str, Any] = {}
        for turn in range(self.turns):
            if turn:
                response, mask = response + TOOL, mask + [0] * len(TOOL)
            prompt_ids = self.as_prompt(PROMPT + response)
            output = await self.server_manager.generate("a", prompt_ids=prompt_ids, sampling_params={})
            assert OLD_POLICIES not in output.extra_fields
            response, mask = response + output.token_ids, mask + [1] * len(output.token_ids)
            fields = fields or output.extra_fields
        sequence = {"prompt_ids": PROMPT, "response_ids": response, "response_mask": mask}
        return AgentLoopOutput(**sequence, metrics=AgentLoopMetrics(), extra_fields=fields)


_agent_loop_registry["loop"] = {"_target_": f"{__name__}.Loop"}


def client_class(base: type[LLMServerClient], server: Server) -> type[LLMServerClient]:
    class Client(base):
        async def _acquire_server(self, request_id: str, **_: Any) -> tuple[str, Server]:
            return "server", server

        def _release_server(self, *_: Any, **__: Any) -> None:
            pass

    return Client


class Rewards:
    """verl's reward worker with a user's function that writes JSON, as a remote reward server needs it."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.compute_score = SimpleNamespace(remote=self._score)

    async def _score(self, data: Any) -> dict[str, Any]:
        manager = NaiveRewardManager(OmegaConf.create(), character_tokenizer(), self._user)
        return dict(await manager.run_single(data))

    def _user(self, *, extra_info: dict[str, Any], **_: Any) -> float:
        self.seen.append(json.dumps(extra_info, default=lambda value: value.item()))
        return 1.0


def sampled(
    monkeypatch: pytest.MonkeyPatch,
    server: Server,
    *,
    base: type[LLMServerClient] = LLMServerClient,
    samples: int = 1,
    trace: bool = False,
    agent_name: str = "loop",
    **columns: Any,
) -> tuple[list[TensorDict], Rewards]:
    """The rows that verl's agent-loop worker puts into the transfer queue for samples at the same time.

    `columns` are of the data.
    """
    put: list[TensorDict] = []

    async def batch_put(*, fields: TensorDict, **_: Any) -> None:
        put.append(fields)

    monkeypatch.setattr(agent_loop_tq.tq, "async_kv_batch_put", batch_put)
    worker_class: type[AgentLoopWorker] = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class
    worker = object.__new__(worker_class)
    rewards = Rewards()
    rollout = {"name": "vllm", "response_length": 32, "custom": {"trust_region": {"anchor": "rollout"}}}
    data = {"continuous_token": {"enable": False}}  # of verl 0.9.0
    worker.config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": data})
    worker.llm_client = client_class(base, server)(worker.config)
    worker.tokenizer, worker.processor, worker.hf_model_type = character_tokenizer(), None, None
    worker.tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"  # for verl 0.9.0
    worker.dataset_cls, worker.tools, worker.distillation_enabled = None, [], False
    worker.mm_processor_kwargs = {}
    worker.reward_loop_worker_handles = [rewards]
    sample = {"uid": "u", "session_id": 0, "global_steps": 0, "data_source": "d"}
    sample |= {"reward_model": {"ground_truth": "g"}, "extra_info": {"split": "train"}, **columns}
    trajectory = {"step": 0, "sample_index": 0, "rollout_n": 0, "validate": False}

    async def run() -> None:
        tasks = (
            worker._run_agent_loop({}, trajectory, agent_name=agent_name, trace=trace, **sample) for _ in range(samples)
        )
        await asyncio.gather(*tasks)

    asyncio.run(run())
    return put, rewards


def field(row: TensorDict) -> Tensor:
    (record,) = row[OLD_POLICIES].unbind()
    return record


def test_records_are_a_column_that_rewards_never_see(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    (row,), rewards = sampled(monkeypatch, server)
    assert torch.equal(field(row), server.records[0])
    extra_fields = next(iter(row["extra_fields"]))
    assert OLD_POLICIES not in extra_fields and extra_fields["global_steps"] == 1
    (seen,) = rewards.seen
    assert OLD_POLICIES not in seen and json.loads(seen)["split"] == "train"
    assert row["rm_scores"].sum() == 1


def test_interrupted_completion_has_policies_of_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of verl's asynchronous trainer, which makes one answer of several and drops their extra fields."""
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda _: sleep(0))
    server = Server(interrupted=True)
    (row,), _ = sampled(monkeypatch, server, base=FullyAsyncLLMServerClient)
    assert len(server.records) == 2 and row["responses"].numel() == 8
    check_slots(field(row), [from_records([record]) for record in server.records])


def test_rollout_that_does_not_report_makes_no_column(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,), _ = sampled(monkeypatch, Server(reports=False))
    assert OLD_POLICIES not in row and OLD_POLICIES not in next(iter(row["extra_fields"]))


def test_turns_make_one_record_of_each_concurrent_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "turns", 2)
    server = Server()
    rows, _ = sampled(monkeypatch, server, samples=3)
    assert len(rows) == 3 and len(server.records) == 6
    for row in rows:
        check_slots(field(row), [from_records([server.records[0]]), len(TOOL), from_records([server.records[-1]])])
        assert row["response_mask"][0].tolist() == [1] * 4 + [0] * 2 + [1] * 4


def test_tasks_share_a_sample_and_prompts_may_be_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Parallel(LLMServerClient):
        async def generate(self, *args: Any, **inputs: Any) -> TokenOutput:
            return await asyncio.create_task(super().generate(*args, **inputs))

    monkeypatch.setattr(Loop, "as_prompt", np.array)  # the same prompts
    server = Server()
    (row,), _ = sampled(monkeypatch, server, base=Parallel)
    assert torch.equal(field(row), server.records[0])


def test_verls_trace_sees_what_an_agent_loop_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[list[str]] = []
    monkeypatch.setattr(rollout_trace.RolloutTraceConfig, "get_backend", lambda: "trackio")
    monkeypatch.setattr(
        rollout_trace, "_log_trackio_trace", lambda op, inputs, output: logged.append(sorted(output.extra_fields))
    )
    (row,), _ = sampled(monkeypatch, Server(), trace=True)
    assert OLD_POLICIES in row
    (seen,) = logged
    assert "global_steps" in seen and OLD_POLICIES not in seen


def test_every_conversation_is_a_row_with_its_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an agent with several conversations a sample: `examples/verl/memagent`."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(MEMORY_AGENT)])
    (agent,) = yaml.safe_load((MEMORY_AGENT / "agent.yaml").read_text())
    monkeypatch.setitem(_agent_loop_registry, agent.pop("name"), agent)
    server, tokenizer = Server(), character_tokenizer()
    document = [{"role": "user", "content": "7 - 6 + 8 - 2 + 5 ="}]
    (rows,), rewards = sampled(monkeypatch, server, agent_name="memory_agent", raw_prompt=document)
    assert len(rows) == len(server.records) == 2 and len(rewards.seen) == 1
    first, second = rows["prompts"].unbind()
    assert tokenizer.decode(first) == "7 - 6 + 8 ="
    memory = str(tokenizer.decode(rows["responses"][0], skip_special_tokens=True)).strip()
    assert tokenizer.decode(second) == f"{memory} - 2 + 5 ="
    for row, record, scores in zip(
        rows[OLD_POLICIES].unbind(), server.records, rows["rm_scores"].unbind(), strict=True
    ):
        assert torch.equal(row, record) and scores.sum() == 1
