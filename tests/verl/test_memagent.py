"""`examples/verl/memagent`: an agent with several conversations a sample, and what verl makes of them."""

import sys
from pathlib import Path

import pytest
import torch
import yaml
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

from tests.verl.test_agent_loop import Server, carry_old_policies, sampled
from troll.runs.toy_model import character_tokenizer
from troll.verl.old_policies import OLD_POLICIES

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "verl" / "memagent"
carry_old_policies()


def test_every_conversation_is_a_row_with_its_own_policies_and_the_last_ones_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])
    (agent,) = yaml.safe_load((FOLDER / "agent.yaml").read_text())
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
