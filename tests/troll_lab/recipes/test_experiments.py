"""The recipes for real models: that they can learn, and that they describe the experiment that they say they do."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from trl import get_peft_config

from troll.huggingface.precision import unresolved_share
from troll_lab import recipes
from troll_lab.recipes import Recipe

SCRIPTS = Path(__file__).parents[3] / "examples" / "verl"
ON_GPU = [name for name in recipes.names() if recipes.read(name)[0].get("bf16")]
STEPS = 200


def load(name: str) -> Recipe:
    """A recipe for a GPU, as a machine with vLLM reads it but for the autocast, which a CPU refuses."""
    return recipes.load(name, ["--use_cpu", "--bf16", "false"], vllm=True)


def trained_model(recipe: Recipe) -> nn.Module:
    """A matrix of N(0, 0.03), loaded and adapted as the recipe says."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False)
    nn.init.normal_(layer.weight, std=0.03)
    model: Any = nn.Sequential(layer).to(getattr(torch, str(recipe.model.dtype)))
    config: Any = get_peft_config(recipe.model)
    if config is not None:
        model = get_peft_model(model, LoraConfig(r=config.r, lora_dropout=config.lora_dropout, target_modules=["0"]))
    return model


def share_moved(model: nn.Module, learning_rate: float) -> float:
    """The share of the trained weights that AdamW has moved after some steps on random gradients."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in trained]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for parameter in trained:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()
    moved = sum(int((now != then).sum()) for now, then in zip(trained, before, strict=True))
    return moved / sum(parameter.numel() for parameter in trained)


@pytest.mark.parametrize("name", ON_GPU)
def test_the_weights_of_every_recipe_move(name: str) -> None:
    recipe = load(name)
    model = trained_model(recipe)
    assert unresolved_share(model, recipe.training.learning_rate) == 0
    assert share_moved(model, recipe.training.learning_rate) > 0.999
    assert recipe.model.dtype == "float32"
    assert recipes.read(name)[0]["bf16"] is True, "computing in bf16 all the same"


@pytest.mark.parametrize("name", ON_GPU)
def test_evaluations_are_few_calls_and_rollouts_fit_vllm(name: str) -> None:
    training = load(name).training
    assert training.per_device_eval_batch_size >= 64
    assert (training.eval_temperature, training.num_generations_eval) == (0, 1)
    assert training.use_vllm and training.vllm_mode == "colocate"
    assert training.generation_chunk_size is not None
    assert training.max_completion_length is not None
    if training.vllm_max_model_length is not None:
        assert training.vllm_max_model_length >= training.max_completion_length + 512


def test_both_sizes_are_one_experiment() -> None:
    small, large = load("gsm8k-qwen3-24gb"), load("gsm8k-qwen3-80gb")
    names = small.settings.keys() | large.settings.keys()
    assert {name for name in names if small.settings.get(name) != large.settings.get(name)} == {
        *("use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "learning_rate", "output_dir"),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "generation_chunk_size"),
        "per_device_eval_batch_size",
    }
    assert small.training.generation_batch_size == large.training.generation_batch_size


def verl_settings(script: str, folder: Path) -> dict[str, str]:
    """What a launch script hands to verl by default: it runs with a `python` that prints its arguments."""
    python, rows = folder / "python", folder / "rows.parquet"
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    rows.touch()
    nodes = {"NNODES": "4"} if script == "gsm8k-nodes.sh" else {}
    done = subprocess.run(
        ["bash", str(SCRIPTS / script)],
        env={"PATH": f"{folder}:{os.environ['PATH']}", "TRAIN_FILE": str(rows), "TEST_FILE": str(rows)} | nodes,
        capture_output=True,
        text=True,
        check=True,
    )
    settings = (line.lstrip("+").partition("=") for line in done.stdout.splitlines() if "=" in line)
    return {name: value for name, _, value in settings}


def test_verls_scripts_describe_the_same_experiment(tmp_path: Path) -> None:
    verl, recipe = verl_settings("gsm8k-1-gpu.sh", tmp_path), load("gsm8k-qwen3-80gb")
    training = recipe.training
    rollout, actor = "actor_rollout_ref.rollout.", "actor_rollout_ref.actor."
    prompts = int(verl["data.train_batch_size"])
    update = training.per_device_train_batch_size * training.gradient_accumulation_steps
    policy_loss = f"{actor}policy_loss."
    assert training.generation_batch_size is not None and training.max_completion_length is not None
    assert training.vllm_max_model_length is not None
    same: dict[str, tuple[object, object]] = {
        "model": (verl["actor_rollout_ref.model.path"], recipe.model.model_name_or_path),
        "completions of a prompt": (int(verl[f"{rollout}n"]), training.num_generations),
        "completions of a rollout": (prompts * int(verl[f"{rollout}n"]), training.generation_batch_size),
        "completions of an update": (int(verl[f"{actor}ppo_mini_batch_size"]) * int(verl[f"{rollout}n"]), update),
        "updates": (prompts // int(verl[f"{actor}ppo_mini_batch_size"]), training.updates_per_rollout),
        # GSM8K has 7473 problems to train on; both leave out the rest of an epoch.
        "rollouts": (int(verl["trainer.total_epochs"]) * (7473 // prompts), training.max_steps // 8),
        "learning rate": (float(verl[f"{actor}optim.lr"]), training.learning_rate),
        "schedule": (verl[f"{actor}optim.lr_scheduler_type"], recipes.plain(recipe)["lr_scheduler_type"]),
        "weight decay": (float(verl[f"{actor}optim.weight_decay"]), training.weight_decay),
        "ε": (float(verl[f"{policy_loss}kl_bound"]), training.kl_bound),
        "α": (float(verl[f"{policy_loss}regression_weight"]), training.regression_weight),
        "K": (int(verl[f"{policy_loss}top_k"]), training.support_top_k),
        "δ": (float(verl[f"{policy_loss}mass_threshold"]), training.mass_threshold),
        "tokens of a completion": (int(verl["data.max_response_length"]), training.max_completion_length),
        "tokens of a prompt": (
            int(verl["data.max_prompt_length"]),
            training.vllm_max_model_length - training.max_completion_length,
        ),
        "thinking": (
            verl["data.apply_chat_template_kwargs.enable_thinking"],
            str(recipe.settings["chat_template_kwargs"]["enable_thinking"]),
        ),
        "greedy evaluation": (float(verl[f"{rollout}val_kwargs.temperature"]), training.eval_temperature),
        "evaluated completions": (int(verl[f"{rollout}val_kwargs.n"]), training.num_generations_eval),
        "evaluated before": (verl["trainer.val_before_train"], str(training.eval_on_start)),
        "evaluated every": (int(verl["trainer.test_freq"]) * 8, training.eval_steps),
        "saved every": (int(verl["trainer.save_freq"]) * 8, training.save_steps),
        "all of the test set": (None, recipe.task.eval_size),
    }
    assert {name: pair for name, pair in same.items() if pair[0] != pair[1]} == {}


@pytest.mark.parametrize("script", ["gsm8k-8-gpus.sh", "gsm8k-nodes.sh"])
def test_more_gpus_change_the_model_and_how_it_is_spread(script: str, tmp_path: Path) -> None:
    one, more = verl_settings("gsm8k-1-gpu.sh", tmp_path), verl_settings(script, tmp_path)
    spread = ("parallel_size", "model.path", "n_gpus_per_node", "nnodes", "experiment_name")
    differing = {name for name in one.keys() | more.keys() if one.get(name) != more.get(name)}
    assert "actor_rollout_ref.model.path" in differing and all(name.endswith(spread) for name in differing)
