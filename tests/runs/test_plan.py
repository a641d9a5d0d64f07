import shlex
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForSequenceClassification

from tests.runs.conftest import overrides
from tests.runs.test_memory import ACCURACY, peak_of_one
from troll import cli, recipes
from troll.recipes import RecipeError
from troll.runs import build, memory, plan
from troll.runs.memory import Network, UnknownMemory
from troll.runs.plan import GIB, PHASES, Machine, Plan, model_shape
from troll.runs.toy_model import character_tokenizer
from troll.runs.toy_network import TOY, TOY_MOE, model_config
from troll.runs.train import train

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

    monkeypatch.setattr(plan, "model_config", small)


def machine(gib: float, on_gpu: bool = True, gpus: int = 1) -> Machine:
    return Machine(gib * GIB, f"a GPU of {gib:g} GiB", on_gpu, gpus, gpus > 1)


def planned(*fields: str, gib: float = 1.0, name: str = "quickstart", gpus: int = 1) -> Plan:
    return Plan(recipes.load(name, [*SMALL, *fields], vllm=True), machine(gib, gpus=gpus), longest_prompt=16)


def shape(name: str, *fields: str) -> Any:
    return model_shape(name, recipes.load("quickstart", [*CPU, *fields]))


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
    assert memory.parameters(Network(shape(name))).numbers == count


def test_model_shape_of_the_toy_model_needs_no_model() -> None:
    sums, text = (shape(TOY, "--task", task) for task in ("reasoning_gym:chain_sum", "free_text"))
    assert sums.vocab_size == len(character_tokenizer())
    assert text.vocab_size == 4096
    assert shape(TOY_MOE).model_type == "qwen3_moe"


def test_model_shape_of_an_unknown_model_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RecipeError, match=r"no configuration of 'nobody/nothing' in a folder or on the hub"):
        shape("nobody/nothing")


def test_table_adds_up() -> None:
    found = planned()
    weights = memory.parameters(found.policy)
    assert found.table["weights"] == (weights.weights,) * 3
    assert found.table["gradients"] == (0, 0, weights.weights)
    assert found.table["optimiser"] == (2 * weights.weights,) * 3
    # 64 completions: ids, masks and log-probabilities, and the old policies with K = 64.
    assert found.table["rollout and old policies"][0] == 64 * (16 * 48 + 32 * (12 + 12 + 8 * 64))
    assert found.table["keys and values"][0] > 0
    assert found.totals == tuple(sum(row[phase] for row in found.table.values()) for phase in range(len(PHASES)))


def test_table_of_a_surrogate_without_old_policies_has_only_tokens() -> None:
    assert planned("--surrogate", "clip").table["rollout and old policies"][0] == 64 * (16 * 48 + 12 * 32)


def test_table_has_references_critics_and_reward_models(tmp_path: Path) -> None:
    plain, more = planned(), planned("--beta", "0.1", "--advantage_estimator", "gae")
    weights = plain.table["weights"][0]
    assert more.table["reference model"] == (weights,) * 3
    critic = more.table["critic"]
    assert critic[2] - critic[1] == pytest.approx(critic[1] / 3)  # weights and two moments, and then gradients
    assert planned("--beta", "0.1", "--use_peft", "true").table["reference model"] == (0, 0, 0)
    config = Qwen3Config(vocab_size=99, hidden_size=64, intermediate_size=8192, num_hidden_layers=1)
    config.num_labels = 1
    classifier: Any = Qwen3ForSequenceClassification(config)
    classifier.to(torch.bfloat16).save_pretrained(tmp_path)
    scored = planned("--reward_model", str(tmp_path))
    assert scored.table["reward model"] == (2 * sum(p.numel() for p in classifier.parameters()),) * 3
    assert scored.table["activations"][1] > plain.table["activations"][1]  # it reads the whole rollout at once


def test_vllm_takes_its_share_and_may_give_it_back() -> None:
    here = ("--use_vllm", "true", "--vllm_mode", "colocate", "--vllm_gpu_memory_utilization", "0.5")
    assert planned(*here, gib=8).table["vLLM's share"] == (4 * GIB,) * 3
    assert planned(*here, "--vllm_enable_sleep_mode", "true", gib=8).table["vLLM's share"] == (4 * GIB, 0, 0)
    assert planned(*here).table["keys and values"] == (0, 0, 0)
    assert planned("--use_vllm", "true", "--vllm_mode", "server").table["vLLM's share"] == (0, 0, 0)


def test_gpus_share_the_model_out_but_not_the_completions() -> None:
    one, four = planned(), planned(gpus=4)
    for name in ("weights", "gradients", "optimiser"):
        assert four.table[name][2] == one.table[name][2] / 4
    assert four.table["gathered layers"][2] > 0
    assert four.table["keys and values"] == one.table["keys and values"]
    assert "64 completions, " in one.lines()[1]
    assert "256 completions, " in four.lines()[1]


def test_chunks_bound_the_cache() -> None:
    whole, chunks = planned(), planned("--generation_chunk_size", "16")
    assert whole.table["keys and values"][0] == 4 * chunks.table["keys and values"][0]


def test_lines_say_the_work_and_what_is_assumed() -> None:
    recipe = recipes.load("quickstart", CPU)
    found = Plan(recipe, machine(64))
    assert "prompts of 512 (assumed: --prompt_tokens)" in found.lines()[0]
    assert Plan(recipe, machine(64), longest_prompt=9).lines()[0].endswith("prompts of 9")
    assert found.lines()[1:] == [
        "rollouts    280: 64 prompts, 512 completions, 8 updates of 64 completions each",
        "tokens      at most 1,146,880 generated and 1,146,880 trained on",
    ]


def test_lines_make_up_no_work_that_the_data_set_decides() -> None:
    lines = planned("--max_steps", "-1", "--eval_strategy", "epoch").lines()
    assert lines[1].startswith("rollouts    as many as the data set fills: 8 prompts, 64 completions")
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("fields", "part", "expected"),
    [
        (("--max_completion_length", "256"), 0.5, "generation_chunk_size"),
        (("--generation_chunk_size", "1", "--per_device_train_batch_size", "32"), 0.7, "gradient_checkpointing"),
        (
            ("--generation_chunk_size", "1", "--gradient_checkpointing", "true", "--max_completion_length", "128"),
            0.7,
            "per_device_train_batch_size",
        ),
    ],
)
def test_remedy_fits(fields: tuple[str, ...], part: float, expected: str) -> None:
    gib = part * max(planned(*fields, gib=64).totals) / GIB
    found = planned(*fields, gib=gib)
    assert not found.fits
    remedy = found.remedy()
    assert f"takes up to {plan._gib(max(found.totals))} GiB" in remedy
    arguments = shlex.split(remedy.split(": add ")[1].split(" (then ")[0])
    assert f"--{expected}" in arguments
    assert planned(*fields, *arguments, gib=gib).fits


def test_remedy_halves_the_rollout_that_a_reward_model_reads(tmp_path: Path) -> None:
    config = Qwen3Config(hidden_size=1024, num_hidden_layers=1, intermediate_size=64, vocab_size=64)
    config.num_labels = 1
    Qwen3ForSequenceClassification(config).save_pretrained(tmp_path)
    fields = ("--reward_model", str(tmp_path), "--updates_per_rollout", "8", "--use_peft", "true")
    gib = 0.7 * max(planned(*fields).totals) / GIB
    remedy = planned(*fields, gib=gib).remedy()
    assert "--updates_per_rollout 4 " in remedy
    assert "steps_per_generation" not in remedy  # it follows
    assert planned(*fields, "--updates_per_rollout", "4", gib=gib).fits
    # A rollout of two updates is not cut: its ratios would all be 1.
    assert "updates_per_rollout" not in planned(*fields, "--updates_per_rollout", "2", gib=gib / 4).remedy()


def test_remedy_lowers_the_share_of_vllm_or_lets_it_sleep() -> None:
    fields = ("--use_vllm", "true", "--vllm_gpu_memory_utilization", "0.95", "--max_completion_length", "128")
    found = planned(*fields, gib=0.5)
    assert not found.fits
    remedy = found.remedy()
    assert "--vllm_enable_sleep_mode true" in remedy or "--vllm_gpu_memory_utilization" in remedy
    assert "(then " in remedy
    assert "per_device_train_batch_size" not in remedy


def test_remedy_names_a_smaller_model_where_no_setting_helps() -> None:
    remedy = planned(gib=1e-4).remedy()
    assert " even with --" in remedy
    assert "--generation_chunk_size " in remedy
    assert remedy.endswith("take a smaller model, shorter completions (--max_completion_length), or more GPUs")


def test_remedy_for_a_model_without_default_layers_for_adapters() -> None:
    """peft has no mapping for a mixture of experts, so that adapters are no remedy."""
    remedy = planned("--model_name_or_path", TOY_MOE, gib=1e-4).remedy()
    assert " even with --" in remedy and "use_peft" not in remedy


@pytest.mark.parametrize("name", [name for name in recipes.names() if not recipes.read(name)[1]])
def test_every_recipe_has_a_shape_and_at_least_two_updates_a_rollout(name: str) -> None:
    recipe = recipes.load(name, CPU, vllm=True)
    assert Plan(recipe, machine(80)).policy.config.get_text_config().vocab_size
    assert recipe.training.rollout_steps // recipe.training.gradient_accumulation_steps >= 2


@pytest.mark.parametrize("on_gpu", [True, False])
def test_train_warns_of_a_large_estimate_and_goes_on(short_run, monkeypatch, on_gpu, capsys):
    monkeypatch.setattr(build, "_trainer", Mock(side_effect=ZeroDivisionError))
    monkeypatch.setattr(build, "this_machine", lambda args: machine(1e-5, on_gpu))
    recipe = recipes.load("quickstart", short_run)
    with pytest.warns(UserWarning, match="a GPU of 1e-05 GiB is all there is"), pytest.raises(ZeroDivisionError):
        train(recipe, Console())
    printed = capsys.readouterr().out
    assert printed.startswith("memory      at most ")
    assert "rollouts    2: 4 prompts, 16 completions, 2 updates" in printed


def test_train_goes_on_with_a_model_that_cannot_be_estimated(short_run, monkeypatch):
    unknown = UnknownMemory("the memory of a strange model cannot be estimated")
    monkeypatch.setattr(memory, "parameters", Mock(side_effect=unknown))
    monkeypatch.setattr(build, "_trainer", lambda *_: pytest.skip("reached"))
    with pytest.warns(UserWarning, match="strange model cannot be estimated"), pytest.raises(pytest.skip.Exception):
        train(recipes.load("quickstart", short_run), Console(quiet=True))


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
def test_whole_run_takes_what_was_planned(fields, tmp_path, monkeypatch):
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
        "max_completion_length": 96,
        "eval_strategy": "no",
        "eval_on_start": False,
        "save_strategy": "no",
    }
    recipe = recipes.load("quickstart", [*CPU, *overrides(settings), *fields])
    found: list[Plan] = []

    def keep(*given: Any) -> Plan:
        found.append(Plan(*given))
        return found[-1]

    monkeypatch.setattr(build, "Plan", keep)
    measured = peak_of_one(lambda: train(recipe, Console(quiet=True)))
    assert max(found[0].totals) == pytest.approx(measured, rel=ACCURACY)


def test_plan_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    fields = ["--per_device_train_batch_size", "8", "--prompt_tokens", "16"]
    assert cli.main(["plan", "quickstart", "--gpu_memory", "24", *fields]) == 0
    printed = capsys.readouterr()
    assert "quickstart: toy" in printed.out
    assert "a GPU of 24 GiB; with completions of 8 tokens and prompts of 16" in printed.out
    assert printed.err == ""
    assert cli.main(["plan", "quickstart", "--gpu_memory", "0.01", *fields]) == 2
    assert "takes up to" in capsys.readouterr().err
    assert cli.main(["plan", "quickstart", "--gpus", "0"]) == 2
    assert "gpus must be above 0, got 0" in capsys.readouterr().err
