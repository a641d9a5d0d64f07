"""The launch scripts: what they hand to verl composes, passes verl's own checks, and differs only in the surrogate."""

import json
import math
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from pyarrow.parquet import read_table
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.config import validate_config

from tests.troll.verl.actor import parsed_once
from troll_lab.rewards.mathematics import compute_score

FOLDER = Path(__file__).parents[3] / "examples" / "verl"
METHODS = ("troll", "penalty", "clip", "dppo_kl", "gspo", "cispo")

#: Those that start a run; the others are parts of them.
SCRIPTS = sorted(path.name for path in FOLDER.glob("*-*.sh"))

#: A script's configuration, with what is set in its environment.
Configure = Callable[..., Any]


def launched(script: str, folder: Path, *settings: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script with a `python` that prints its arguments, one a line."""
    program(folder / "python", "printf '%s\\n' \"$@\"")
    (folder / "rows.parquet").touch()
    machine = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "HOME": str(folder)}
    files = {"TRAIN_FILE": str(folder / "rows.parquet"), "TEST_FILE": str(folder / "rows.parquet")}
    nodes = {"NNODES": "4"} if script == "gsm8k-nodes.sh" else {}
    return subprocess.run(
        ["bash", str(FOLDER / script), *settings],
        env=machine | files | nodes | environment,
        cwd=folder,
        capture_output=True,
        text=True,
    )


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture(scope="module")
def configure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Configure]:
    """Composes what scripts hand to verl."""
    folder = tmp_path_factory.mktemp("launched")

    @cache
    def configuration(script: str, *settings: str, METHOD: str = "troll", **environment: str) -> Any:
        done = launched(script, folder, *settings, METHOD=METHOD, **environment)
        assert done.returncode == 0, done.stderr
        module, name, *overrides = done.stdout.splitlines()
        assert (module, name) == ("-m", "verl.trainer.main_ppo")
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose("ppo_trainer", overrides=overrides)

    with parsed_once():
        yield configuration


def check(config: Any) -> None:
    validate_config(config, need_reference_policy(config), need_critic(config))


def flat(config: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(config, dict):
        return {name: config}
    return {k: v for key, value in config.items() for k, v in flat(value, f"{name}.{key}".lstrip(".")).items()}


@pytest.mark.parametrize(
    ("script", "methods"), [("dapo-qwen3-4b.sh", METHODS), ("dapo-qwen3-30b-a3b.sh", ("troll", "clip"))]
)
def test_methods_differ_only_in_the_surrogate(script: str, methods: tuple[str, ...], configure: Configure) -> None:
    found = {}
    for method in methods:
        config = configure(script, METHOD=method)
        check(config)
        loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
        assert loss in POLICY_LOSS_REGISTRY and loss == {"penalty": "troll", "clip": "vanilla"}.get(method, method)
        found[method] = flat(OmegaConf.to_container(config, resolve=True))
    first = found["troll"]
    differing = {
        name for other in found.values() for name in first.keys() | other.keys() if first.get(name) != other.get(name)
    }
    # Names of the run, and where it is written.
    named = ("experiment_name", "default_local_dir", "actor._target_", "loss_agg_mode")
    of_the_surrogate = tuple(
        f"actor_rollout_ref.{name}" for name in ("actor.policy_loss.", "actor.clip_ratio_", "rollout.custom")
    )
    assert all(name.endswith(named) or name.startswith(of_the_surrogate) for name in differing), differing


@pytest.mark.parametrize("script", SCRIPTS)
def test_verl_accepts_every_script_and_all_gpus_are_used(script: str, configure: Configure) -> None:
    config = configure(script)
    check(config)
    actor, rollout, trainer = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.trainer
    updates, rest = divmod(config.data.train_batch_size, actor.ppo_mini_batch_size)
    assert updates == (4 if script == "dapo-async.sh" else 8) and rest == 0
    gpus = trainer.n_gpus_per_node * trainer.nnodes
    if actor.strategy == "megatron":
        megatron = actor.megatron
        assert gpus % (megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size) == 0
        assert gpus % (megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size) == 0
        sharing = megatron.context_parallel_size
    else:
        sharing = actor.ulysses_sequence_parallel_size
        assert gpus % sharing == 0
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert actor.ppo_max_token_len_per_gpu * sharing >= longest
    assert (rollout.nnodes * rollout.n_gpus_per_node or gpus) % rollout.tensor_model_parallel_size == 0
    assert actor.ppo_mini_batch_size * rollout.n % (gpus // sharing) == 0


def test_asynchronous_trainer_accepts_its_script(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    class CheckedIt(Exception):
        pass

    def begin(*_: Any) -> None:
        raise CheckedIt

    monkeypatch.setattr(PPOTrainer, "__init__", begin)
    config = configure("dapo-async.sh", "trainer.total_epochs=7")
    assert config.trainer.total_epochs == 7  # settings on the command line win
    trainer = get_trainer_cls(config.trainer.v1.trainer_mode)
    with pytest.raises(CheckedIt):
        trainer(config)
    with pytest.raises(AssertionError, match="parameter_sync_step"):
        trainer(configure("dapo-async.sh", "data.train_batch_size=96"))


ROLLOUT, POLICY_LOSS = "actor_rollout_ref.rollout", "actor_rollout_ref.actor.policy_loss"
REPLAY, UNITS = "actor_rollout_ref.actor.megatron.router_replay.mode", "SimpleStorage.num_data_storage_units"
FROM_ROLLOUT = f"{ROLLOUT}.enable_rollout_routing_replay"

#: What is set in the environment of a script, and where it arrives.
ENVIRONMENTS: list[tuple[str, dict[str, str], dict[str, Any]]] = [
    ("dapo-qwen3-4b.sh", {"METHOD": "clip", "ANCHOR": "rollout"}, {"algorithm.rollout_correction.bypass_mode": True}),
    (
        "dapo-qwen3-4b.sh",
        {"INFER_BACKEND": "sglang", "LOGGER": "console,trackio"},
        {f"{ROLLOUT}.name": "sglang", "trainer.logger": ["console", "trackio"]},
    ),
    (
        "gsm8k-1-gpu.sh",
        {"KL_BOUND": "0.1", "ANCHOR": "rollout"},
        {f"{POLICY_LOSS}.kl_bound": 0.1, f"{POLICY_LOSS}.anchor": "rollout"},
    ),
    (
        "gsm8k-1-gpu.sh",
        {"METHOD": "penalty", "KL_TARGET": "0.1"},
        {f"{POLICY_LOSS}.pull": "proximal", f"{POLICY_LOSS}.kl_bound": math.inf, f"{POLICY_LOSS}.kl_target": 0.1},
    ),
    ("gsm8k-nodes.sh", {"NNODES": "16"}, {f"transfer_queue.backend.{UNITS}": 32}),
    # Routes are replayed from the rollout or from the pass of the old policies.
    ("dapo-qwen3-30b-a3b.sh", {"ROUTING_REPLAY_MODE": "R2"}, {REPLAY: "R2", FROM_ROLLOUT: False}),
    (
        "dapo-qwen3-30b-a3b.sh",
        {"ROUTING_REPLAY_MODE": "disabled", "ANCHOR": "rollout"},
        {REPLAY: "disabled", FROM_ROLLOUT: False, f"{POLICY_LOSS}.anchor": "rollout"},
    ),
]


@pytest.mark.parametrize(("script", "environment", "wanted"), ENVIRONMENTS)
def test_settings_of_the_environment_arrive(
    script: str, environment: dict[str, str], wanted: dict[str, Any], configure: Configure
) -> None:
    config = configure(script, **environment)
    check(config)
    assert {name: OmegaConf.select(config, name) for name in wanted} == wanted


def test_verls_reward_for_dapo_punishes_long_answers(configure: Configure) -> None:
    filtered = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc")
    config = configure("dapo-qwen3-4b.sh", *filtered, MAX_RESPONSE_LENGTH="1024")
    check(config)
    manager = get_reward_manager_cls(config.reward.reward_manager.name)(config, None, None)
    assert manager.max_resp_len == 1024
    assert manager.overlong_buffer_cfg.enable and manager.overlong_buffer_cfg.len == 512


def test_comparison_makes_every_run_and_names_failures(tmp_path: Path) -> None:
    done = launched("compare.sh", tmp_path, "data.seed=7")
    assert done.returncode == 0, done.stderr
    runs = [run.splitlines() for run in done.stdout.split("-m\nverl.trainer.main_ppo\n")[1:]]
    names = [next(line for line in run if line.startswith("trainer.experiment_name=")) for run in runs]
    assert len(set(names)) == 6 and all(run[-1] == "data.seed=7" for run in runs)
    assert all("trainer.total_training_steps=100" in run for run in runs)
    targets = [f"{POLICY_LOSS}.kl_target=5" in run for run in runs]
    assert targets == [name.endswith("-kl5") for name in names] and sum(targets) == 2
    failed = launched("compare.sh", tmp_path, RUNS="ppo troll cispo:5")
    assert failed.returncode == 1 and failed.stderr.endswith("failed: ppo cispo:5\n")
    assert failed.stdout.count("verl.trainer.main_ppo") == 1


@pytest.mark.parametrize(
    ("script", "environment", "said"),
    [
        ("gsm8k-1-gpu.sh", {"METHOD": "ppo"}, "METHOD must be troll"),
        ("dapo-qwen3-4b.sh", {"METHOD": "cispo", "KL_TARGET": "0.1"}, "KL_TARGET goes with METHOD=troll"),
        ("dapo-async.sh", {"ANCHOR": "new"}, "ANCHOR must be old or rollout"),
        ("gsm8k-1-gpu.sh", {"TRAIN_FILE": "nothing"}, "prepare.py gsm8k"),
        ("dapo-qwen3-4b.sh", {"TEST_FILE": "nothing"}, "wget"),
        ("gsm8k-nodes.sh", {"NNODES": ""}, "how many machines"),
    ],
)
def test_wrong_use_is_told_what_to_do(script: str, environment: dict[str, str], said: str, tmp_path: Path) -> None:
    done = launched(script, tmp_path, **environment)
    assert done.returncode != 0 and done.stdout == "" and said in done.stderr


def test_slurm_starts_ray_on_all_machines(tmp_path: Path) -> None:
    program(tmp_path / "scontrol", "printf 'gpu07\\ngpu08\\ngpu09\\n'")
    # Slurm's own part is played by programs that note how they were called.
    program(tmp_path / "srun", f'echo "$*" >> {tmp_path}/calls; while [ "${{1#--}}" != "$1" ]; do shift; done; "$@"')
    program(tmp_path / "hostname", "echo '10.0.0.7 192.168.0.7'")
    program(tmp_path / "ray", 'while [ "$1" != -- ]; do shift; done; shift; "$@"')
    slurm = {"SLURM_JOB_NODELIST": "gpu[07-09]", "SLURM_NNODES": "3", "SLURM_GPUS_ON_NODE": "8"}
    script = str(FOLDER / "gsm8k-nodes.sh")
    done = launched("slurm.sh", tmp_path, script, "data.train_batch_size=64", METHOD="clip", **slurm)
    assert done.returncode == 0, done.stderr
    arguments = done.stdout.splitlines()
    assert {"trainer.nnodes=3", "trainer.n_gpus_per_node=8", "data.train_batch_size=64"} <= set(arguments)
    address, ray = (tmp_path / "calls").read_text().splitlines()
    assert address == "--nodes=1 --ntasks=1 --nodelist=gpu07 hostname -I"
    assert ray.startswith(
        "--ntasks-per-node=1 ray symmetric-run --address=10.0.0.7:6379 --min-nodes=3 --num-gpus=8 -- bash "
    )


def prepare(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Runs `prepare.py`."""
    monkeypatch.setattr(sys, "argv", ["prepare.py", *arguments])
    runpy.run_path(str(FOLDER / "prepare.py"), run_name="__main__")


def test_prepare_reads_local_data_in_place_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = tmp_path / "local.jsonl"
    rows = [{"question": f"What is {number} + 1?", "answer": f"Add. #### {number + 1}"} for number in range(8)]
    local.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--dataset_path", str(local), "--eval_size", "2"]
    prepare(monkeypatch, "gsm8k", str(tmp_path / "data"), *options)
    found = {name: read_table(tmp_path / "data" / f"{name}.parquet").to_pylist() for name in ("train", "test")}
    assert [row["reward_model"]["ground_truth"] for row in found["train"]] == [str(number + 1) for number in range(6)]
    assert len(found["test"]) == 2
    with pytest.raises(SystemExit, match=r"^prepare.py: .*none.jsonl"):
        prepare(monkeypatch, "gsm8k", str(tmp_path / "data"), "--dataset_path", str(tmp_path / "none.jsonl"))


def test_prepared_rows_are_verls_and_gold_answers_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `prepare.py` writes is graded by the rewards that the scripts name."""
    task = FOLDER.parent / "tasks" / "geometry.yaml"
    prepare(monkeypatch, str(task), str(tmp_path), "--eval_size", "2")
    assert "train.parquet" in capsys.readouterr().out
    for name in ("train", "test"):
        rows = read_table(tmp_path / f"{name}.parquet").to_pylist()
        assert rows
        for index, row in enumerate(rows):
            assert row.keys() == {"data_source", "ability", "prompt", "reward_model", "extra_info"}
            assert row["prompt"][0]["role"] == "user" and row["extra_info"] == {"index": index}
            gold = row["reward_model"]["ground_truth"]
            answer = rf"It is \boxed{{{gold}}}."
            assert compute_score(row["data_source"], answer, gold, row["extra_info"])["score"] == 1
            assert compute_score(row["data_source"], "", gold, row["extra_info"])["score"] == 0
