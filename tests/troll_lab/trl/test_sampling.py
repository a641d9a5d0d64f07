"""The laboratory's ways to generate draw from what the old policy is, too."""

from typing import Any

import pytest
import torch

from tests.troll.trl.test_sampling import SIZE, WHOLE, Recorder, assert_drawn_from_old_policy, model_with
from troll_lab.trl.eval_metrics import sampling_temperature

DOORS: dict[str, dict[str, Any]] = {
    "chunks": {"generation_chunk_size": 3},
    "old weights": {"rollout_delay": 1, "anchor": "rollout"},
}


@pytest.mark.parametrize("door", DOORS)
def test_every_way_to_generate_draws_from_the_old_policy(make, door):
    file = {"min_p": 0.1, "typical_p": 0.5, "no_repeat_ngram_size": 1, "num_beams": 2}
    settings = {"top_p": 0.9, "temperature": 0.8} | DOORS[door]
    assert_drawn_from_old_policy(make(model=model_with(file), **WHOLE, **settings))


def test_evaluation_samples_without_what_the_file_sets(make):
    file = {"no_repeat_ngram_size": 1, "typical_p": 0.3, "penalty_alpha": 0.6}
    trainer = make(model=model_with(file), eval_temperature=0.5, top_k=3)
    recorder = Recorder()
    recorder.watch(trainer.model)
    for temperature, kept in ((0.5, 3), (0.0, SIZE)):
        recorder.calls.clear()
        with sampling_temperature(trainer, temperature):
            trainer._generate_single_turn([[1, 5, 9]], None, {}, 1)
        assert {int((row > -torch.inf).sum()) for row in recorder.rows()[0]} == {kept}
