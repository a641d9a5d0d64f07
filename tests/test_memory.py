"""The memory that `python -m benchmarks memory` computes, part by part, and against whole runs on a CPU."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForSequenceClassification

from benchmarks import memory, memory_without_data
from benchmarks.memory import GIB, PHASES, RECIPES, Estimate, Machine, model_shape
from benchmarks.memory_runs import longest_prompt
from benchmarks.memory_without_data import Network
from tests.test_memory_without_data import ACCURACY, peak_of_one
from tests.troll_lab.runs.conftest import overrides
from troll_lab import recipes
from troll_lab.runs.toy_model import character_tokenizer
from troll_lab.runs.toy_network import TOY_MOE, model_config
from troll_lab.runs.train import train

CPU = ["--use_cpu", "true"]
SMALL = [*CPU, "--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "8"]
SMALL += ["--max_completion_length", "32"]


@pytest.fixture(autouse=True)
def one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy model is estimated with one layer: an estimate takes as long as its layers."""

    def small(*arguments: Any) -> Any:
        config: Any = model_config(*arguments)
        config.num_hidden_layers = 1
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:1]
        return config

    monkeypatch.setattr(memory, "model_config", small)


@functools.cache
def estimated(*fields: str, gib: float = 1.0, gpus: int = 1) -> Estimate:
    recipe = recipes.load("quickstart", [*SMALL, *fields], vllm=True)
    return Estimate(recipe, Machine(gib * GIB, gpus=gpus), longest_prompt=16)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
        ("Qwen/Qwen2.5-VL-3B-Instruct", 3_754_622_976),
        ("Skywork/Skywork-Reward-V2-Qwen3-0.6B", 596_049_920 + 1024),  # a head of one number, no LM head
    ],
)
def test_shapes_have_the_published_numbers_of_parameters(name: str, count: int) -> None:
    assert memory_without_data.parameters(Network(model_shape(name))).numbers == count
    assert model_shape(TOY_MOE).model_type == "qwen3_moe"  # without a model


def test_every_recipe_that_names_a_gpu_has_a_shape() -> None:
    in_bf16 = {name for name in recipes.names() if recipes.read(name)[0].get("bf16")}
    assert in_bf16 | {"smollm2-gsm8k"} == RECIPES.keys()  # which computes in float32
    for name, machine in RECIPES.items():
        found = Estimate(recipes.load(name, CPU, vllm=True), machine)
        assert found.policy.config.get_text_config().vocab_size


def test_table_adds_up() -> None:
    found = estimated()
    weights = memory_without_data.parameters(found.policy)
    assert found.table["weights"] == (weights.weights,) * 3
    assert found.table["gradients"] == (0, 0, weights.weights)
    assert found.table["optimiser"] == (2 * weights.weights,) * 3
    # 64 completions: ids, masks and log-probabilities, and the old policies with K = 64.
    assert found.table["rollout and old policies"][0] == 64 * (16 * 48 + 32 * (12 + 12 + 8 * 64))
    # The clip keeps none, unless a target measures its KL.
    clip = [estimated("--surrogate", "clip", *rate).table for rate in ((), ("--learning_rate", "1e-4"))]
    assert clip[0]["rollout and old policies"] == found.table["rollout and old policies"]
    assert clip[1]["rollout and old policies"][0] == 64 * (16 * 48 + 12 * 32)
    assert found.table["keys and values"][0] > 0
    assert (
        found.table["keys and values"][0] == 4 * estimated("--generation_chunk_size", "16").table["keys and values"][0]
    )
    assert found.totals == tuple(sum(row[phase] for row in found.table.values()) for phase in range(len(PHASES)))


def test_table_has_reference_critic_and_reward_model(tmp_path: Path) -> None:
    plain, more = estimated(), estimated("--beta", "0.1", "--advantage_estimator", "gae")
    weights = plain.table["weights"][0]
    assert more.table["reference model"] == (weights,) * 3
    critic = more.table["critic"]
    assert critic[2] - critic[1] == pytest.approx(critic[1] / 3)  # weights and two moments, and then gradients
    assert estimated("--beta", "0.1", "--use_peft", "true").table["reference model"] == (0, 0, 0)
    config = Qwen3Config(vocab_size=99, hidden_size=64, intermediate_size=8192, num_hidden_layers=1)
    config.num_labels = 1
    classifier: Any = Qwen3ForSequenceClassification(config)
    classifier.to(torch.bfloat16).save_pretrained(tmp_path)
    scored = estimated("--reward_model", str(tmp_path))
    assert scored.table["reward model"] == (2 * sum(p.numel() for p in classifier.parameters()),) * 3
    assert scored.table["activations"][1] > plain.table["activations"][1]  # it reads the whole rollout at once


def test_table_has_the_share_of_vllm_unless_it_sleeps() -> None:
    here = ("--use_vllm", "true", "--vllm_mode", "colocate", "--vllm_gpu_memory_utilization", "0.5")
    assert estimated(*here, gib=8).table["vLLM's share"] == (4 * GIB,) * 3
    assert estimated(*here, "--vllm_enable_sleep_mode", "true", gib=8).table["vLLM's share"] == (4 * GIB, 0, 0)
    assert estimated(*here).table["keys and values"] == (0, 0, 0)
    assert estimated("--use_vllm", "true", "--vllm_mode", "server").table["vLLM's share"] == (0, 0, 0)


def test_table_of_gpus_shares_the_model_only() -> None:
    one, four = estimated(), estimated(gpus=4)
    for name in ("weights", "gradients", "optimiser"):
        assert four.table[name][2] == one.table[name][2] / 4
    assert four.table["gathered layers"][2] > 0
    assert four.table["keys and values"] == one.table["keys and values"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        (),
        ("--bf16", "true"),
        ("--bf16", "true", "--gradient_checkpointing", "true"),
        ("--use_peft", "true", "--beta", "0.01"),
        ("--advantage_estimator", "gae", "--beta", "0.01"),
    ],
    ids=["full", "bf16", "bf16, checkpointing", "lora", "critic"],
)
def test_whole_run_takes_what_was_estimated(fields, tmp_path):
    tokenizer = character_tokenizer()
    config = model_config(tokenizer)
    config.vocab_size, config.hidden_size, config.intermediate_size = 4000, 256, 768
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    settings = {
        "model_name_or_path": tmp_path / "model",
        "output_dir": tmp_path / "run",
        "max_steps": 4,  # two rollouts: in the first, the optimiser has no state yet
        "updates_per_rollout": 2,
        "per_device_train_batch_size": 16,
        "max_completion_length": 96,  # as long as the longest of a batch is: one token of 4,000 ends a completion
        "eval_strategy": "no",
        "eval_on_start": False,
        "save_strategy": "no",
    }
    recipe = recipes.load("quickstart", [*CPU, *overrides(settings), *fields])
    found = Estimate(recipe, Machine(GIB, on_gpu=False), longest_prompt(recipe, tokenizer))
    measured = peak_of_one(lambda: train(recipe, Console(quiet=True)))
    assert max(found.totals) == pytest.approx(measured, rel=ACCURACY)


@pytest.mark.slow
def test_docs_have_the_table_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    memory.main("cpu", 1)
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == len(RECIPES)
    published = (Path(__file__).parents[1] / "docs" / "performance.md").read_text().splitlines()
    assert set(rows) <= set(published), "run: python -m benchmarks memory"
