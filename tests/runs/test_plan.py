from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from rich.console import Console
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForSequenceClassification

from tests.runs.test_memory import peak_of_one
from troll import cli, recipes
from troll.recipes import Recipe, RecipeError
from troll.runs import budget, build, memory, plan
from troll.runs.budget import PHASES, changes, optimiser_bytes, phases, rollout_bytes
from troll.runs.memory import Parameters
from troll.runs.plan import GIB, Machine, Plan, longest_prompt
from troll.runs.shapes import model_shape, shape_file
from troll.runs.toy_model import character_tokenizer
from troll.runs.toy_network import TOY, TOY_MODELS, TOY_MOE, model_config
from troll.runs.train import train
from troll.runs.without_data import Network, UnknownMemory
from troll.tasks import Task, TaskConfig

CPU = ["--use_cpu", "true"]
SMALL = [*CPU, "--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "8"]
SMALL += ["--max_completion_length", "32"]


def machine(gib: float, on_gpu: bool = True, gpus: int = 1) -> Machine:
    return Machine(gib * GIB, f"a GPU of {gib:g} GiB", on_gpu, gpus, gpus > 1)


def planned(*fields: str, gib: float = 1.0, name: str = "quickstart", gpus: int = 1, vllm: bool = True) -> Plan:
    return plan.plan(recipes.load(name, [*SMALL, *fields], vllm=vllm), machine(gib, gpus=gpus), prompt_tokens=16)


def test_the_shape_of_every_model_of_a_recipe_ships() -> None:
    fields = [recipes.read(name)[0] for name in recipes.names()]
    named = {each.get(field) for each in fields for field in ("model_name_or_path", "reward_model")} - {
        None,
        *TOY_MODELS,
    }
    assert len(named) >= 3
    assert [name for name in sorted(map(str, named)) if not shape_file(name).is_file()] == []


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
    assert memory.parameters(Network(model_shape(name, TaskConfig()))).numbers == count


def test_the_shape_of_the_toy_model_needs_no_model() -> None:
    sums, text = (model_shape(TOY, TaskConfig(task=task)) for task in ("reasoning_gym:chain_sum", "free_text"))
    assert sums.vocab_size == len(character_tokenizer())
    assert text.vocab_size == 4096
    assert model_shape(TOY_MOE, TaskConfig()).architectures == ["Qwen3MoeForCausalLM"]


def test_an_unknown_model_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RecipeError, match=r"configuration of 'nobody/nothing': there is none on the hub"):
        model_shape("nobody/nothing", TaskConfig())


def test_the_table_adds_up() -> None:
    found = planned()
    weights = memory.parameters(found.settings.policy)
    assert found.table["weights"] == (weights.weights,) * 3
    assert found.table["gradients"] == (0, 0, weights.weights)
    assert found.table["optimiser"] == (2 * weights.weights,) * 3
    assert found.table["rollout and old policies"][0] == 64 * rollout_bytes(16, 32, 64)
    assert found.table["keys and values"][0] > 0
    assert found.totals == tuple(sum(row[phase] for row in found.table.values()) for phase in range(len(PHASES)))


def test_references_critics_and_reward_models_are_counted(tmp_path: Path) -> None:
    plain, more = planned(), planned("--beta", "0.1", "--advantage_estimator", "gae")
    weights = plain.table["weights"][0]
    assert more.table["reference model"] == (weights,) * 3
    critic = more.table["critic"]
    assert critic[2] - critic[1] == pytest.approx(critic[1] / 3)  # weights and two moments, and then gradients
    assert "reference model" not in planned("--beta", "0.1", "--use_peft", "true").table
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
    assert "keys and values" not in planned(*here).table
    assert planned("--use_vllm", "true", "--vllm_mode", "server").table["vLLM's share"] == (0, 0, 0)


def test_gpus_share_the_model_out_but_not_the_completions() -> None:
    one, four = planned(), planned(gpus=4)
    for name in ("weights", "gradients", "optimiser"):
        assert four.table[name][2] == one.table[name][2] / 4
    assert four.table["gathered layers"][2] > 0
    assert four.table["keys and values"] == one.table["keys and values"]
    assert (one.work.completions, four.work.completions) == (64, 256)


def test_chunks_bound_the_cache() -> None:
    whole, chunks = planned(), planned("--generation_chunk_size", "16")
    assert (whole.settings.at_once, chunks.settings.at_once) == (64, 16)
    assert whole.table["keys and values"][0] == pytest.approx(4 * chunks.table["keys and values"][0], rel=0.01)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adamw_torch_fused", 8000),
        ("adamw_8bit", 2000),
        ("lion_32bit", 4000),
        ("sgd", 0),
        ("adafactor", 400),
        ("a new one", 8000),  # as AdamW, to be on the safe side
    ],
)
def test_optimisers(name: str, expected: int) -> None:
    assert optimiser_bytes(name, Parameters(4000, 4000, 1000, 1000, 100, 0)) == expected


def test_moments_have_the_dtype_of_the_weights() -> None:
    assert optimiser_bytes("adamw_torch", Parameters(2000, 2000, 1000, 1000, 100, 0)) == 4000


def test_a_rollout_without_old_policies_is_its_tokens() -> None:
    assert rollout_bytes(prompt=10, completion=5, top_k=0) == 16 * 15 + 12 * 5
    assert rollout_bytes(10, 5, 64) - rollout_bytes(10, 5, 0) == 5 * (12 + 8 * 64)


def test_the_work() -> None:
    found = plan.plan(recipes.load("quickstart", CPU), machine(64), prompt_tokens=16)
    assert found.work.lines() == [
        "rollouts    280: 64 prompts, 512 completions, 8 updates of 64 completions each; 2240 updates in all",
        "tokens      at most 1.1 million generated and 1.1 million trained on (8 a completion)",
        "evaluation  11 times: 512 problems, 512 completions, 1 generate calls of at most 512",
    ]


def test_work_that_the_data_set_decides_is_not_made_up() -> None:
    lines = planned("--max_steps", "-1", "--eval_strategy", "epoch").work.lines()
    assert lines[0].startswith("rollouts    as many as the data set fills: 8 prompts, 64 completions")
    assert lines[1].startswith("evaluation  after every epoch")
    assert len(lines) == 2
    assert planned("--eval_strategy", "no", "--eval_on_start", "false").work.lines()[-1] == "evaluation  none"


def test_it_says_what_it_assumes() -> None:
    recipe = recipes.load("quickstart", CPU)
    assert "prompts of 512 (assumed: --prompt_tokens)" in plan.plan(recipe, machine(64)).lines()[0]
    assert plan.plan(recipe, machine(64), prompt_tokens=9).lines()[0].endswith("prompts of 9")


def needs(recipe: Recipe, gib: float) -> Plan:
    return plan.plan(recipe, machine(gib), prompt_tokens=16)


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
def test_what_is_suggested_fits(fields: tuple[str, ...], part: float, expected: str) -> None:
    recipe = recipes.load("quickstart", [*SMALL, *fields])
    gib = part * max(needs(recipe, 64).totals) / GIB
    found = needs(recipe, gib)
    assert not found.fits
    remedy = found.remedy()
    assert f"takes up to {plan._gib(max(found.totals))} GiB" in remedy
    arguments = shlex.split(remedy.split(": add ")[1].split(" (then ")[0])
    assert f"--{expected}" in arguments
    assert needs(recipes.load("quickstart", [*SMALL, *fields, *arguments]), gib).fits


def test_a_share_of_vllm_is_lowered_or_put_to_sleep() -> None:
    fields = ("--use_vllm", "true", "--vllm_gpu_memory_utilization", "0.95", "--max_completion_length", "128")
    found = planned(*fields, gib=1)
    lowered = changes(found.settings, GIB)[1]
    assert max(phases(found.settings, GIB)) > GIB >= max(phases(lowered, GIB))
    assert lowered.sleeps or (lowered.vllm is not None and lowered.vllm < 0.95)
    assert lowered.rows == found.settings.rows


def test_where_no_setting_helps_a_smaller_model_is_named() -> None:
    remedy = planned(gib=1e-4).remedy()
    assert " even with --generation_chunk_size 1 " in remedy
    assert remedy.endswith("take a smaller model, or shorter completions (--max_completion_length)")


def test_where_more_gpus_help_their_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned()
    monkeypatch.setattr(plan, "changes", lambda settings, limit: ({}, settings))
    monkeypatch.setattr(plan, "phases", lambda settings, limit: (0, 0, 3.5 * GIB / settings.sharded_over))
    assert found.remedy().endswith("share the model over 4 such GPUs with FSDP2 or ZeRO-3 (see --gpus 4)")


@pytest.mark.parametrize("name", [name for name in recipes.names() if not recipes.read(name)[1]])
def test_every_recipe_has_settings_and_work(name: str) -> None:
    recipe = recipes.load(name, CPU, vllm=True)
    settings, work = plan.settings_of(recipe, machine(80), None, None), plan.work_of(recipe, 1)
    assert settings.rows * settings.accumulation * settings.updates == settings.rollout == work.completions
    assert settings.updates >= 2
    assert work.evaluations


def test_the_longest_prompt_is_counted_in_tokens() -> None:
    rows = Dataset.from_dict({"prompt": ["1 + 2 =", "1 + 22 ="]})
    task = Task(name="t", train_dataset=rows, eval_dataset=rows, reward_funcs=[])
    assert longest_prompt([task], character_tokenizer(), {}) == 8
    pictures = replace(task, train_dataset=rows.add_column("images", [[], []]))
    assert longest_prompt([pictures], character_tokenizer(), {}) is None


@pytest.mark.parametrize("on_gpu", [True, False])
def test_training_refuses_what_a_gpu_cannot_hold_before_it_loads_the_model(
    short_run: list[str], monkeypatch: pytest.MonkeyPatch, on_gpu: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    class Loaded(Exception):
        pass

    def load(*_: Any) -> None:
        raise Loaded

    monkeypatch.setattr(build, "_trainer", load)
    monkeypatch.setattr(build, "machine_of_run", lambda args: machine(1e-5, on_gpu))
    recipe = recipes.load("quickstart", short_run)
    if on_gpu:
        with pytest.raises(RecipeError, match=r"takes up to .* GiB, and a GPU of 1e-05 GiB is all there is"):
            train(recipe, Console())
    else:
        with pytest.warns(UserWarning, match="is all there is"), pytest.raises(Loaded):
            train(recipe, Console())
    printed = capsys.readouterr().out
    assert printed.startswith("memory      at most ")
    assert "rollouts    2: 4 prompts, 16 completions, 2 updates" in printed


def test_a_model_that_cannot_be_estimated_is_trained_all_the_same(
    short_run: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unknown(*_: Any) -> None:
        raise UnknownMemory("the memory of a strange model cannot be estimated")

    monkeypatch.setattr(budget.memory, "parameters", unknown)
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
def test_a_whole_run_takes_what_was_planned(
    fields: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        "generation_kwargs": '{"min_new_tokens": 96}',
        "per_device_train_batch_size": 16,
        "max_completion_length": 96,
        "eval_strategy": "no",
        "eval_on_start": False,
        "save_strategy": "no",
    }
    overrides = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    recipe = recipes.load("quickstart", [*CPU, *overrides, *fields])
    found: list[Plan] = []

    def keep(*given: Any) -> Plan:
        found.append(plan.plan(*given))
        return found[-1]

    monkeypatch.setattr(build, "plan", keep)
    measured = peak_of_one(lambda: train(recipe, Console(quiet=True)))
    assert max(found[0].totals) == pytest.approx(measured, rel=0.15)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
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
