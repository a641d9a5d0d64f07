"""The example of a bound that adapts: its rule, and that a resumed run goes on with it."""

import math
import runpy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from tests.troll.trl import tiny
from tests.troll.trl.tiny import logged
from troll.trl import TrollTrainer

EXAMPLE = Path(__file__).parents[2] / "examples" / "hold_kl.py"
TARGET, RATE, SMOOTHING = 1e-3, 0.3, 0.5


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.make_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def make(model_path, tmp_path) -> Any:
    """Builds a trainer whose bound adapts."""
    hold_kl = runpy.run_path(str(EXAMPLE))["HoldKL"]

    def made(target: float = TARGET, **settings: Any) -> TrollTrainer:
        trainer = tiny.Maker(lambda _: model_path, tmp_path)(kl_bound=0.01, learning_rate=3e-3, **settings)
        trainer.add_callback(hold_kl(trainer, target, RATE, SMOOTHING))
        return trainer

    return made


def test_bound_follows_the_measured_kl(make) -> None:
    trainer = make(max_steps=6, eval_strategy="steps", eval_steps=1, eval_dataset=tiny.make_dataset(4))
    trainer.train()
    kls, bounds = (logged(trainer, f"trust_region/{name}") for name in ("kl_before_mean", "kl_bound"))
    expected, mean, weight = 0.01, 0.0, 0.0
    for kl, bound in zip(kls, bounds, strict=True):
        assert bound == pytest.approx(expected)
        mean, weight = SMOOTHING * mean + (1 - SMOOTHING) * kl, SMOOTHING * weight + (1 - SMOOTHING)
        expected *= math.exp(-RATE * max(-1, min(1, mean / weight / TARGET - 1)))
    assert trainer.kl_bound == pytest.approx(expected)
    assert max(bounds) > 0.01 > min(bounds), "up after a first update, which measures 0, and down"


@pytest.mark.parametrize(("target", "limit"), [(1e3, 1.0), (1e-9, 1e-3)])
def test_bound_stays_within_its_limits(make, target, limit) -> None:
    trainer = make(target, max_steps=1)
    callback = trainer.callback_handler.callbacks[-1]
    for _ in range(30):
        callback.on_log(trainer.args, trainer.state, trainer.control, {"trust_region/kl_before_mean": 0.1})
    assert trainer.kl_bound == limit


@pytest.mark.parametrize("restored", [False, True])
def test_bound_of_a_resumed_run_is_the_same(make, tmp_path, restored) -> None:
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    settings["restore_callback_states_from_checkpoint"] = restored
    whole, resumed = make(**settings), make(**settings)
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(resumed, "trust_region/kl_bound")[2:] == logged(whole, "trust_region/kl_bound")[2:]
    assert resumed.kl_bound == whole.kl_bound != 0.01
