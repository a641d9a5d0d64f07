"""What lets verl run on a CPU (examples/verl/cpu): its platform, its engines there, the rollout and the task."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from pyarrow.parquet import read_table
from torch import Tensor
from toy_data import demo_task, quickstart_task, write_questions
from transformers import AutoModelForCausalLM, PreTrainedModel
from verl.plugin.platform import get_platform
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import TokenOutput, get_rollout_replica_class
from verl_cpu.reward import compute_score
from verl_cpu.rollout import TransformersReplica, TransformersRollout, TransformersServer

import troll
from tests.troll.verl.actor import model_folder
from tests.troll.verl.reference import load
from troll.verl.records import from_records
from troll_lab.tasks.reasoning_gym import questions
from troll_lab.tasks.registry import TaskConfig

RESPONSE_LENGTH = 6
PROMPTS = [[5, 9, 3], [7], [11, 4, 8, 20, 6], [5, 9, 3], [30, 31]]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load(model_folder()).eval()


def launch(model: PreTrainedModel, max_num_seqs: int = 256, custom: Any = None) -> TransformersServer:
    config = SimpleNamespace(
        dtype="float32", seed=0, response_length=RESPONSE_LENGTH, max_num_seqs=max_num_seqs, custom=custom
    )
    model_config = OmegaConf.create(
        {"path": str(model_folder()), "override_config": {"attn_implementation": "sdpa"}, "load_tokenizer": True}
    )
    server = TransformersServer(config, model_config, replica_rank=0)
    asyncio.run(server.update_weights(model.state_dict(), global_steps=7))
    return server


def sampled(server: TransformersServer, prompts: list[list[int]], **params: Any) -> list[TokenOutput]:
    params = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "repetition_penalty": 1.0, "logprobs": True} | params

    async def all_at_once() -> list[TokenOutput]:
        return await asyncio.gather(*(server.generate(prompt, dict(params), "id") for prompt in prompts))

    return asyncio.run(all_at_once())


@torch.no_grad()
def logits_of(model: PreTrainedModel, prompt: list[int], completion: list[int]) -> Tensor:
    return model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]


def check_log_probs(model: PreTrainedModel, prompt: list[int], output: TokenOutput, temperature: float = 1.0) -> None:
    log_probs = (logits_of(model, prompt, output.token_ids) / temperature).log_softmax(-1)
    wanted = log_probs.gather(-1, torch.tensor(output.token_ids)[:, None]).squeeze(-1)
    torch.testing.assert_close(torch.tensor(output.log_probs), wanted, rtol=0, atol=2e-5)


def test_verl_finds_its_engines_and_the_rollout() -> None:
    assert get_device_name() == "cpu"
    assert torch.ones(1).to(get_device_id()).device.type == "cpu"
    assert get_platform().communication_backend_name() == "gloo"
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is FSDPEngineWithLMHead
    assert EngineRegistry.get_engine_cls("value_model", "fsdp2") is FSDPEngineWithValueHead

    assert get_rollout_class("transformers") is TransformersRollout
    assert get_rollout_replica_class("transformers") is TransformersReplica


def test_log_probs_are_those_of_the_model_in_any_batch(model: PreTrainedModel) -> None:
    outputs = sampled(launch(model, max_num_seqs=30), PROMPTS * 20, temperature=0.6)
    for prompt, output in zip(PROMPTS * 20, outputs, strict=True):
        check_log_probs(model, prompt, output, 0.6)
        assert output.extra_fields["global_steps"] == 7
    assert len({tuple(output.token_ids) for output in outputs[:: len(PROMPTS)]}) > 1
    ends = [output.token_ids.index(1) for output in outputs if 1 in output.token_ids]
    assert ends and min(ends) < RESPONSE_LENGTH - 1, "the model should end some of them early"
    for output in outputs:
        assert 1 not in output.token_ids[:-1]
        assert len(output.token_ids) == len(output.log_probs or []) <= RESPONSE_LENGTH
        assert output.token_ids[-1] == 1 or len(output.token_ids) == RESPONSE_LENGTH


def test_greedy_completions_are_those_of_new_weights(model: PreTrainedModel) -> None:
    server = launch(model)
    other = AutoModelForCausalLM.from_config(model.config).eval()
    asyncio.run(server.update_weights(other.state_dict(), global_steps=8))
    for prompt, output in zip(PROMPTS, sampled(server, PROMPTS, temperature=0.0), strict=True):
        assert output.token_ids == logits_of(other, prompt, output.token_ids).argmax(-1).tolist()
        assert output.extra_fields["global_steps"] == 8


def test_anchor_reports_what_it_sampled_from(model: PreTrainedModel) -> None:
    settings: dict[str, Any] = {"top_k": 5, "mass_threshold": 1e-3}
    custom = {"trust_region": {"anchor": "rollout"} | settings}
    server = launch(model, custom=custom)
    for prompt, output in zip(PROMPTS, sampled(server, PROMPTS), strict=True):
        reported = from_records([output.extra_fields["old_policies"]]).unpack()
        sampled_ids = torch.tensor(output.token_ids)
        expected = troll.capture(logits_of(model, prompt, output.token_ids), sampled_ids, **settings)
        assert torch.equal(reported.token_ids, expected.token_ids) and torch.equal(reported.slot, expected.slot)
        torch.testing.assert_close(reported.outcomes.exp(), expected.outcomes.exp(), rtol=0, atol=1e-5)
    custom["trust_region"]["anchor"] = "old"
    (output,) = sampled(launch(model, custom=custom), PROMPTS[:1])
    assert "old_policies" not in output.extra_fields


def test_request_that_fails_leaves_the_server_at_work(model: PreTrainedModel) -> None:
    server = launch(model)
    with pytest.raises(IndexError):
        sampled(server, [[10_000]])
    assert sampled(server, PROMPTS[:1])


def test_images_and_unmerged_adapters_are_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="takes only text, got image_data"):
        asyncio.run(launch(model).generate([5], {}, "id", image_data=["an image"], video_data=None))
    rollout = TransformersRollout.__new__(TransformersRollout)
    with pytest.raises(ValueError, match=r"lora.merge=true"):
        asyncio.run(rollout.update_weights(iter([]), peft_config={"r": 8}))


@pytest.mark.parametrize("make", [quickstart_task, demo_task])
def test_rows_are_verls_and_right_answers_score(tmp_path: Path, make: Callable[[], TaskConfig]) -> None:
    task = make()
    data_set = task.task.partition(":")[2]
    asked = questions(data_set, task.options, split="eval", size=3)
    write_questions(tmp_path / "rows.parquet", task, asked)
    for question, row in zip(asked, read_table(tmp_path / "rows.parquet").to_pylist(), strict=True):
        assert list(row["prompt"]) == [{"role": "user", "content": question.prompt}]
        truth = row["reward_model"]["ground_truth"]
        assert truth == task.options.get("answer_format", "{answer}").format(answer=question.answer)
        wrong = [f"{truth}0", "", *([question.answer] if truth != question.answer else [])]
        for answer, success in ((truth, 1.0), (f" {truth}\n", 1.0), *((text, 0.0) for text in wrong)):
            graded = compute_score(row["data_source"], answer, truth, row["extra_info"])
            assert graded == {"score": success, "acc": success}
