"""A real vLLM server behind TRL's client: what it answers, what is refused, and training on its rollouts.

Slow. The trainer is in this process and the server in others; all is TRL's and vLLM's own but the hand-over of weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.tolerance import within
from tests.troll.trl import tiny
from tests.troll.trl.tiny import logged
from tests.troll_lab.trl.test_resampling import SETTINGS, dataset, reward
from tests.vllm.test_engine import FLOAT32_ERROR, save

if find_spec("vllm") is not None:
    from tests.vllm.server import FileClient, Server, serving
from troll_lab.trl import LabTrainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-vllm"),
]

#: Log-probabilities a token that the server gives at most: half of the vocabulary, and more than vLLM's own cap.
CAP = 24


def serve(folder: Path) -> Any:
    return serving(folder, "--max-model-len", "32", "--max-logprobs", str(CAP))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("server") / "model")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with serve(model) as started:
        yield started


@pytest.fixture
def served(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LabTrainer]:
    """Builds a trainer whose rollouts a server makes."""

    def build(server: Server, *, by_file: bool = True, own: Path = model, **settings: Any) -> LabTrainer:
        if by_file:
            monkeypatch.setattr("trl.generation.vllm_generation.VLLMClient", FileClient)
            monkeypatch.setattr(FileClient, "folder", tmp_path, raising=False)
        make = tiny.Maker(lambda _: own, tmp_path, LabTrainer)
        options: dict[str, Any] = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url}
        return make(**options | {"anchor": "rollout", "support_top_k": CAP} | settings)

    return build


def test_weights_that_trl_cannot_hand_over_are_refused_before_training(server, served):
    """TRL's transport is NCCL's, which no CPU has."""
    with pytest.raises(NotImplementedError, match="needs a CUDA device, got 'cpu'"):
        served(server, by_file=False)


def test_a_server_refuses_to_give_more_log_probs_than_it_may(server, served):
    trainer = served(server, support_top_k=CAP + 1)
    with pytest.raises(Exception, match=f"logprobs of {CAP + 1}, .* max allowed: {CAP}"):  # the server's words
        trainer.train()


@pytest.mark.parametrize(
    ("anchor", "truncation"), [("rollout", {}), ("old", {"top_p": 0.8}), ("rollout", {"top_k": 5})]
)
def test_first_update_sees_the_sampler_in_the_old_policy(server, served, anchor, truncation):
    """In both rollouts, of which the second comes after updates: so the server got the weights."""
    trainer = served(server, anchor=anchor, **truncation)
    before = tiny.parameters(trainer.model)
    trainer.train()
    assert len(tiny.changed(before, trainer.model)) == len(before)
    at_first = logged(trainer, "trust_region/kl_before_mean")[::2]
    # Of near equal policies the KL divergence is at most half of the square of the largest difference of log-probs.
    assert len(at_first) == 2 and max(at_first) <= max(within(FLOAT32_ERROR**2 / 2), 1e-6)
    assert max(logged(trainer, "trust_region/kl_before_mean")[1::2]) > 1e-4, "the updates moved the policy"
    assert all(math.isfinite(loss) for loss in logged(trainer, "loss"))
    if anchor == "old":
        assert max(logged(trainer, "sampling/mismatch_kl_max")) <= max(within(FLOAT32_ERROR**2 / 2), 1e-6)
    elif not truncation:
        assert min(logged(trainer, "trust_region/support_size")) > 20


def test_groups_with_equal_rewards_are_sampled_again(server, served):
    trainer = served(server, anchor="old", reward_funcs=reward, train_dataset=dataset(), **SETTINGS)
    trainer.train()
    first, left = (logged(trainer, f"resampling/equal_groups{part}") for part in ("", "_left"))
    assert sum(left) < sum(first) and all(math.isfinite(loss) for loss in logged(trainer, "loss"))


def fails(trainer: LabTrainer, error: type[Exception], message: str) -> None:
    before = tiny.parameters(trainer.model)
    with pytest.raises(error, match=message):
        trainer.train()
    assert not tiny.changed(before, trainer.model)


def test_another_vocabulary_ends_training_before_an_update(tmp_path, server, served):
    smaller = save(tmp_path / "smaller", vocab_size=len(tiny.VOCABULARY) - 1)
    fails(served(server, own=smaller), Exception, "Request failed: 500|Max retries exceeded")


def test_a_server_that_dies_ends_training_before_an_update(tmp_path, served):
    own = save(tmp_path / "model")
    with serve(own) as dying:
        trainer = served(dying, own=own)
        sync = trainer.vllm_generation.sync_weights

        def sync_and_die() -> None:
            sync()
            dying.kill()

        trainer.vllm_generation.sync_weights = sync_and_die
        fails(trainer, Exception, "Connection refused|Max retries exceeded|Connection aborted")
