"""The rollout as anchor: how far a rounded or older engine is from the network, and whether the bound holds.

It measures no times, but KL(p̃ ‖ p) at the first update of a rollout: the network has not moved yet, so all of the KL is
the engine's. The model is tiny and random, and the engine a stand-in for vLLM with its output format.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import PrinterCallback

from tests.troll.trl import tiny
from tests.troll.trl.engine import Engine, RolloutFunc
from troll.trl import TrollConfig, TrollTrainer

KL_BOUND, TOP_K, UPDATES, ROLLOUTS = 0.02, 8, 2, 8
ENGINES: dict[str, tuple[Engine, float]] = {
    "exact": (Engine(), KL_BOUND),
    "bf16 weights, kl_bound 1e-6": (Engine(rounded=True), 1e-6),
    "bf16 weights": (Engine(rounded=True), KL_BOUND),
    "1 rollout old": (Engine(steps_old=1), KL_BOUND),
    "2 rollouts old": (Engine(steps_old=2), KL_BOUND),
    "4 rollouts old": (Engine(steps_old=4), KL_BOUND),
}


def main(device: str, repeats: int) -> list[dict[str, Any]]:
    """Prints the table with one run for each engine, always on the CPU, and returns its rows."""
    table = Table("engine", "KL before, first updates", "largest KL after / bound", title="anchor='rollout'")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        tiny.make_model("llama").save_pretrained(model)
        for name, (engine, kl_bound) in ENGINES.items():
            row = {"engine": name, **_train(model, folder, engine, kl_bound)}
            rows.append(row)
            table.add_row(name, f"{row['kl_before']:.2g}", f"{row['kl_after_over_bound']:.5f}")
    Console().print(table)
    return rows


def _train(model: Path, folder: str, engine: Engine, kl_bound: float) -> dict[str, float]:
    settings: dict[str, Any] = tiny.DEFAULTS | {
        "output_dir": folder,
        "anchor": "rollout",
        "support_top_k": TOP_K,
        "kl_bound": kl_bound,
        "learning_rate": 3e-3,
        "steps_per_generation": UPDATES,
        "max_steps": ROLLOUTS * UPDATES,
    }
    trainer = TrollTrainer(
        model=str(model),
        reward_funcs=tiny.reward,
        args=TrollConfig(**settings),
        train_dataset=tiny.make_dataset(),
        processing_class=tiny.make_tokenizer(),
        rollout_func=RolloutFunc(engine, TOP_K),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    before = tiny.logged(trainer, "trust_region/kl_before_mean")
    after = tiny.logged(trainer, "trust_region/kl_after_max")
    # The mean over the last rollouts, when the engine's weights are as old as intended.
    return {
        "kl_before": mean(before[::UPDATES][-ROLLOUTS // 2 :]),
        "kl_after_over_bound": max(after) / kl_bound,
    }
