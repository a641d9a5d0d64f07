"""The launch scripts: what they hand to verl composes, passes verl's own checks, and differs in the surrogate alone."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

ROOT = Path(__file__).parents[2]
SCRIPTS = ("gsm8k-1-gpu.sh", "gsm8k-8-gpus.sh", "gsm8k-nodes.sh")


def launched(script: str, folder: Path, *settings: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script with a `python` that prints its arguments, one a line."""
    python = folder / "python"
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    (folder / "train.parquet").touch()
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(ROOT / "examples" / "verl" / script), *settings],
        env=os.environ | {"PATH": path, "DATA": str(folder), "NODES": "4"} | environment,
        capture_output=True,
        text=True,
    )


def configuration(script: str, method: str, folder: Path) -> Any:
    done = launched(script, folder, METHOD=method)
    assert done.returncode == 0, done.stderr
    module, name, *overrides = done.stdout.splitlines()
    assert (module, name) == ("-m", "verl.trainer.main_ppo")
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=overrides)


@pytest.mark.parametrize("script", SCRIPTS)
def test_verl_accepts_both_methods_and_they_differ_in_the_surrogate_alone(script: str, tmp_path: Path) -> None:
    found = {}
    for method in ("troll", "clip"):
        config = configuration(script, method, tmp_path)
        validate_config(config, need_reference_policy(config), need_critic(config))
        found[method] = flat(OmegaConf.to_container(config, resolve=True))
    assert found["troll"]["actor_rollout_ref.actor.policy_loss.loss_mode"] == "troll"
    differing = {
        name
        for name in found["troll"].keys() | found["clip"].keys()
        if found["troll"].get(name) != found["clip"].get(name)
    }
    # Names of the run, and where it is written.
    named = ("experiment_name", "default_local_dir", "actor._target_")
    of_the_surrogate = ("actor_rollout_ref.actor.policy_loss.", "actor_rollout_ref.rollout.custom")
    assert all(name.endswith(named) or name.startswith(of_the_surrogate) for name in differing), differing


def flat(config: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(config, dict):
        return {name: config}
    return {k: v for key, value in config.items() for k, v in flat(value, f"{name}.{key}".lstrip(".")).items()}


def test_there_is_more_than_one_update_for_each_rollout(tmp_path: Path) -> None:
    for script in SCRIPTS:
        config = configuration(script, "troll", tmp_path)
        assert config.data.train_batch_size == 8 * config.actor_rollout_ref.actor.ppo_mini_batch_size


def test_settings_on_the_command_line_win(tmp_path: Path) -> None:
    done = launched("gsm8k-1-gpu.sh", tmp_path, "trainer.total_epochs=1", KL_BOUND="0.1")
    arguments = done.stdout.splitlines()
    assert arguments[-1] == "trainer.total_epochs=1"
    assert "actor_rollout_ref.actor.policy_loss.kl_bound=0.1" in arguments


def test_wrong_use_is_told_what_to_do(tmp_path: Path) -> None:
    done = launched("gsm8k-1-gpu.sh", tmp_path, METHOD="ppo")
    assert done.returncode == 2 and "troll or clip" in done.stderr
    done = launched("gsm8k-1-gpu.sh", tmp_path, DATA=str(tmp_path / "nothing"))
    assert done.returncode == 2 and "prepare.py gsm8k" in done.stderr
