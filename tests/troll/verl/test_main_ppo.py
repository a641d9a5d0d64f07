"""An unmodified `main_ppo` with two Ray workers on a CPU: TROLL, its anchors and its KL target. Minutes each."""

import math
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from demo import Run
from toy_data import prepare

from tests.tolerance import within

pytestmark = pytest.mark.slow

#: Two updates a rollout of 16 completions, and nothing held out.
SMALL = (
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=4",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=1",
)

TROLL = "actor_rollout_ref.actor.policy_loss"
REPORTED = (f"{TROLL}.anchor=rollout", "algorithm.rollout_correction.bypass_mode=true")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    prepare(folder)
    return folder


def steps_of(run: Run, data: Path, *settings: str) -> dict[int, dict[str, float]]:
    """Runs verl, which has to end well; the metrics of its steps."""
    run.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="troll-ray-", ignore_cleanup_errors=True) as ray_folder:
        done = subprocess.run(
            run.command(data, Path(ray_folder), [*SMALL, *settings]),
            env=run.environment() | {"RAY_worker_niceness": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=580,
        )
    assert done.returncode == 0, done.stdout[-9000:]
    return run.metrics()


def test_anchor_at_the_rollout(data: Path, tmp_path: Path) -> None:
    steps = steps_of(Run("troll", tmp_path, 2), data, *REPORTED, "actor_rollout_ref.actor.optim.lr=1e-3")
    assert set(steps) == {1, 2}
    for metrics in steps.values():
        assert "timing_s/old_log_prob" not in metrics or metrics["timing_s/old_log_prob"] < 0.2, "there was a pass"
        # Half of the updates are the first of their rollout, where rollout and network agree.
        assert 0 < metrics["actor/trust_region/kl_before_mean"] < 1
        assert metrics["actor/trust_region/kl_after_max"] <= 0.05 * (1 + within(1e-3))
        assert metrics["actor/trust_region/old_policy_bytes"] > 16


MEMORY_AGENT = Path(__file__).resolve().parents[3] / "examples" / "verl" / "memagent"

#: vLLM's build for CPUs next to verl: docs/verl.md.
VLLM = (
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.enforce_eager=true",
    "actor_rollout_ref.rollout.free_cache_engine=false",
    "+actor_rollout_ref.rollout.enable_sleep_mode=false",
)


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM next to verl")
@pytest.mark.parametrize("top_k", [-1, 5], ids=["whole", "truncated"])
def test_real_vllm_samples_from_the_last_updates_weights(data: Path, tmp_path: Path, top_k: int) -> None:
    """With one update a rollout, at which the network still is what sampled the tokens."""
    steps = steps_of(
        Run("troll", tmp_path, 3),
        data,
        *(*VLLM, *REPORTED),
        f"actor_rollout_ref.rollout.top_k={top_k}",
        "data.train_batch_size=8",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "trainer.n_gpus_per_node=1",
    )
    assert set(steps) == {1, 2, 3}
    for metrics in steps.values():
        assert metrics["actor/trust_region/kl_before_max"] <= within(1e-6)
        assert metrics["actor/trust_region/unreported_fraction"] == 0
        assert metrics["actor/trust_region/support_size"] == (5 if top_k == 5 else 64)
        assert metrics["actor/grad_norm"] > 0


def test_agent_with_a_memory_trains_on_its_conversations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(MEMORY_AGENT), prepend=os.pathsep)
    subprocess.run([sys.executable, MEMORY_AGENT / "documents.py", tmp_path / "data"], check=True)
    agent = "actor_rollout_ref.rollout.agent"
    agents = f"{agent}.agent_loop_config_path={MEMORY_AGENT / 'agent.yaml'}", f"{agent}.default_agent_loop=memory_agent"
    steps = steps_of(Run("troll", tmp_path / "run", 2), tmp_path / "data", *agents, *REPORTED)
    assert set(steps) == {1, 2}
    for metrics in steps.values():
        assert metrics["actor/trust_region/unreported_fraction"] == 0
        assert metrics["actor/trust_region/kl_after_max"] <= 0.05 * (1 + within(1e-3))


#: Different texts have different rewards: the toy model's sums may all be wrong in two rollouts.
VARIED_REWARD = """
from zlib import crc32

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return crc32(solution_str.encode()) / 2**32
"""


def test_learning_rate_follows_the_kl(data: Path, tmp_path: Path) -> None:
    """verl logs the rate that was used, and its batches have the rewards."""
    (tmp_path / "varied.py").write_text(VARIED_REWARD)
    run, rate = Run("troll", tmp_path, 2), "actor_rollout_ref.actor.optim.lr=1e-2"
    reward = f"reward.custom_reward_function.path={tmp_path / 'varied.py'}"
    steps = steps_of(run, data, f"{TROLL}.kl_target=0.1", f"{TROLL}.kl_bound=1e-6", rate, reward)
    bound, last = 1e-6 * (1 + within(1e-3)), steps[2]
    assert last["actor/trust_region/projected_fraction"] > 0 and last["actor/trust_region/nonfinite"] == 0
    assert last["actor/trust_region/kl_after_max"] <= bound < last["actor/trust_region/kl_before_max"]
    states = [
        torch.load(file, weights_only=False)["lr_scheduler"]["kl_target"]
        for file in sorted((run.folder / "checkpoints" / "global_step_2" / "actor").glob("extra_state_*"))
    ]
    assert len(states) == 2 and states[0] == states[1]
    assert {name: level[2] for name, level in states[0]["levels"].items()} == {"entropy": 4, "success": 4}
    # Of an update without an advantage, only a part of the rate is walked: what Adam's momentum does.
    walked = states[0]["walked"]
    assert len(walked) == 4 and any(walked)
    for number, metrics in enumerate(steps.values()):
        rates = walked[2 * number :][:2]
        part = rates[1] / metrics["actor/lr"]
        assert any(part == pytest.approx(each) for each in (0, 1, 0.9, 0.81, 0.729)), (walked, metrics)
        assert metrics["actor/trust_region/kl_target/rate"] >= sum(rates) / 2 * (1 - 1e-9)
        assert metrics["actor/trust_region/kl_target/wanted"] == pytest.approx(0.1 / math.sqrt(7) / 2)
