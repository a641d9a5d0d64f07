"""A resumed run says which of its settings are not those of its checkpoint."""

import json
import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.troll.trl import tiny
from tests.troll.trl.resuming import forget
from troll.trl import TrollConfig, resumed_settings
from troll.trl.resumed_settings import changed_settings, settings

SAVED: dict[str, Any] = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}


def change(config: Any, before: dict[str, Any], after: dict[str, Any]) -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        there = json.dumps(settings(config(**before)), allow_nan=False)  # as in a checkpoint
        return changed_settings(json.loads(there), settings(config(**after)))


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ({}, {"kl_bound": 0.1}, "kl_bound was 0.05 and is 0.1"),
        ({"kl_bound": math.inf}, {}, 'kl_bound was "Infinity" and is 0.05'),
        ({}, {"pull": "proximal"}, 'pull was "projection" and is "proximal"'),
        ({}, {"truncated_ratio": False}, "truncated_ratio was null and is false"),
        ({}, {"surrogate": "clip"}, "epsilon was null and is 0.2"),
        ({}, {"updates_per_rollout": 4}, "updates_per_rollout was 8 and is 4"),
        (
            {"surrogate": "kl_penalty", "surrogate_kwargs": {"weight": 0.3}},
            {"surrogate": "kl_penalty", "surrogate_kwargs": {"weight": 0.5}},
            "surrogate_kwargs.weight was 0.3 and is 0.5",
        ),
        ({}, {"temperature": 0.7}, "temperature was 1.0 and is 0.7"),
        ({}, {"generation_kwargs": {"min_p": 0.1}}, "min_p was null and is 0.1"),
        ({}, {"generation_kwargs": {"max_new_tokens": 4}}, 'generation_kwargs was null and is {"max_new_tokens": 4}'),
        *(
            ({"model_init_kwargs": {"x": before}}, {"model_init_kwargs": {"x": after}}, "model_init_kwargs was ")
            for before, after in (
                (torch.bfloat16, torch.float32),
                ({"a", "b"}, {"a", "c"}),
                (Path("one"), Path("two")),
                ({0: 1}, {0: 2}),
            )
        ),
        ({}, {"seed": 1}, "seed was 42 and is 1"),
        ({}, {"lr_scheduler_type": "constant"}, 'lr_scheduler_type was "linear" and is "constant"'),
        (
            {},
            {"learning_rate": 1e-5, "adam_beta2": 0.9},
            ". The optimizer keeps the learning_rate and the adam_beta2 of",
        ),
    ],
)
def test_changed_settings_names_each_with_both_values(config, before, after, says):
    found = change(config, before, after)
    assert found is not None and says in found and "\n" not in found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"kl_bound": 1}, {"kl_bound": 1.0}),
        ({"kl_bound": math.inf}, {"kl_bound": math.inf}),
        ({"surrogate_kwargs": "{}"}, {"surrogate_kwargs": {}}),
        ({"adam_beta1": 0.9, "optim_target_modules": ("a", "b")}, {"optim_target_modules": ["a", "b"]}),
        ({"model_init_kwargs": {"x": {"a", "b", "c"}}}, {"model_init_kwargs": {"x": {"c", "b", "a"}}}),
        ({"model_init_kwargs": {"x": print, "y": object()}}, {"model_init_kwargs": {"x": print, "y": object()}}),
        ({}, {"output_dir": "elsewhere", "run_name": "second", "project": "other"}),
        ({}, {"logging_steps": 7, "log_completions": True, "report_to": "none", "disable_tqdm": True}),
        ({}, {"save_steps": 3, "save_total_limit": 2, "save_strategy": "epoch"}),
        ({}, {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 16}),
        ({}, {"max_steps": 7, "num_train_epochs": 9, "max_grad_norm": 0.1}),
        ({}, {"hub_model_id": "mine", "hub_strategy": "end", "dataloader_num_workers": 2, "vllm_server_port": 8001}),
    ],
)
def test_changed_settings_is_silent_about_output_and_length(config, before, after):
    assert change(config, before, after) is None


def test_settings_hold_every_field_and_no_secret(config):
    held = settings(config(hub_token="hf_secret", model_init_kwargs={"dtype": torch.float32, "map": object()}))
    assert "secret" not in json.dumps(held)
    known = {name.partition(".")[0] for name in held}
    own = {name for name in TrollConfig.__annotations__ if not name.startswith("_")}
    assert own - known == {"surrogate_kwargs"}, "a dictionary, of which every entry is a setting"
    assert held["model_init_kwargs"]["map"] == "object", "no address, which would differ in every run"


def test_resumed_training_says_what_differs_without_unpickling(make, tmp_path, monkeypatch):
    make(**SAVED).train()
    checkpoint = tmp_path / "checkpoint-2"
    (checkpoint / "training_args.bin").write_bytes(pickle.dumps(print))  # not to be read
    resumed = make(**{**SAVED, "max_steps": 3, "kl_bound": 0.2, "learning_rate": 3e-3, "weight_decay": 0.1})
    with pytest.warns(UserWarning, match="^resuming from checkpoint-2 with other settings: ") as caught:
        resumed.train(resume_from_checkpoint=str(checkpoint))
    (line,) = [text for warning in caught if "with other settings" in (text := str(warning.message))]
    assert "kl_bound was 0.05 and is 0.2" in line
    assert line.endswith(". The optimizer keeps the learning_rate and the weight_decay of the checkpoint")
    groups = resumed.optimizer.param_groups
    assert {group["lr"] for group in groups} == {1e-2} and {group["weight_decay"] for group in groups} == {0.0}


@pytest.mark.parametrize("without", [False, True], ids=["same settings", "checkpoint without them"])
def test_resumed_training_is_silent_where_nothing_differs(make, tmp_path, without):
    make(beta=0.1, **SAVED).train()
    if without:  # one of TRL's own
        forget(tmp_path / "checkpoint-2")
    with tiny.no_warnings_about("with other settings"):
        make(beta=0.1, **{**SAVED, "max_steps": 3}).train(resume_from_checkpoint=True)


def test_may_change_knows_fields_only():
    """A name that no configuration has any more would be forgotten here."""
    known = TrollConfig.__dataclass_fields__.keys()
    named = resumed_settings._MAY_CHANGE | resumed_settings._OPTIMIZER
    assert {name for name in named if "." not in name} <= known
    prefixes = resumed_settings._MAY_CHANGE_PREFIXES
    assert [prefix for prefix in prefixes if not any(name.startswith(prefix) for name in known)] == []
