"""A run that is interrupted after half of its updates, and the same run without that."""

import json
import warnings
from pathlib import Path
from typing import Any

from torch.testing import assert_close

from tests.troll.trl import tiny
from tests.troll.trl.sharding import weights
from troll.trl.callback import STATE

#: Two rollouts of two updates, the second update with an old policy.
SETTINGS: dict[str, Any] = {
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 2,
    "kl_bound": 0.01,
    "learning_rate": 3e-3,
    "per_device_train_batch_size": 2,
    "ddp_backend": "gloo",
}

#: Settings with which a back end writes only shards.
SHARDS_ALONE = {
    "fsdp": {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"},
    "zero3": {"ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "false"},
}


def interrupted(make: tiny.Maker, folder: Path, **settings: Any) -> dict[str, Any]:
    """Weights and log of all updates, and of those after the first checkpoint again from there.

    The model that comes out is saved in `folder/model`.
    """
    results: dict[str, Any] = {}
    settings = {**SETTINGS, **settings}
    saved: int = settings["save_steps"]
    for name in ("without a break", "resumed"):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trainer = make(output_dir=str(folder), **settings)
        trainer.train(resume_from_checkpoint=None if name == "without a break" else str(folder / f"checkpoint-{saved}"))
        steps = [entry for entry in trainer.state.log_history if entry["step"] > saved and "loss" in entry]
        log = [{key: value for key, value in entry.items() if key != "step_time"} for entry in steps]
        results[name] = {"weights": weights(trainer.accelerator.unwrap_model(trainer.model_wrapped)), "log": log}
    trainer.save_model(str(folder / "model"))
    return results | {"warnings": [str(warning.message) for warning in said]}


def forget(checkpoint: Path) -> None:
    """Makes a checkpoint one of a trainer that keeps no settings and no counts, such as TRL's own."""
    path = checkpoint / "trainer_state.json"
    state = json.loads(path.read_text())
    del state["stateful_callbacks"][STATE]
    path.write_text(json.dumps(state))


def resumed_exactly(runs: dict[str, Any]) -> list[dict[str, Any]]:
    """The log since the interruption, which with the weights is bit by bit that of the run without a break."""
    expected, resumed = runs["without a break"], runs["resumed"]
    assert resumed["log"] == expected["log"]
    assert_close(resumed["weights"], expected["weights"], rtol=0, atol=0)
    return resumed["log"]
