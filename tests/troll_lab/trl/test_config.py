"""LabConfig: what it accepts and refuses in addition to TrollConfig, and how it is read."""

import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from trl import TrlParser

from tests.troll.trl.test_config import KL_IN_REWARD, SECOND_UPDATE
from troll_lab.trl import LabConfig


def config(tmp_path: Path, **settings: object) -> LabConfig:
    defaults = {"report_to": "none", "use_cpu": True, "bf16": False}
    return LabConfig(str(tmp_path), **{**defaults, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "takes", "value", "settings"),
    [
        # Each with a value that the next wider range would take; the ranges themselves: test_own_settings.
        ("generation_chunk_size", "an integer, at least 1", 2.5, {}),
        ("eval_temperature", "finite and at least 0", -1.0, {}),
        ("resampling_rounds", "an integer, at least 0", -1, {}),
        ("rollout_delay", "an integer, at least 0", -1, {}),
        ("multi_objective_aggregation", "'sum_then_normalize'", "normalize_then_sum", {"resampling_rounds": 1}),
    ],
)
def test_config_refuses_a_value_that_a_setting_does_not_take(tmp_path, name, takes, value, settings):
    with pytest.raises(ValueError, match=re.escape(f"{name} must be {takes}, got {value!r}")):
        config(tmp_path, **{name: value}, **settings)


@pytest.mark.parametrize(
    ("name", "takes", "value"),
    [
        ("learning_rate", "finite and above 0", math.inf),
        ("weight_decay", "finite and at least 0", -0.1),
        ("max_grad_norm", "finite and above 0", -1.0),
        ("warmup_steps", "an integer, at least 0", 1.5),
        ("value_clip", "finite and above 0", math.nan),
        ("gamma", "in [0, 1]", 1.1),
        ("gae_lambda", "in [0, 1]", -0.1),
        ("whiten_advantages", "true or false", 1),
    ],
)
def test_config_refuses_a_value_that_the_critic_does_not_take(tmp_path, name, takes, value):
    with pytest.raises(ValueError, match=re.escape(f"{name} of the critic must be {takes}, got {value!r}")):
        config(tmp_path, critic_kwargs={name: value})


VLLM_TEMPERATURE = {"eval_temperature": 0.5, "use_vllm": True, "generation_kwargs": {"temperature": 2.0}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"advantage_estimator": "best"},
            "advantage_estimator must be one of group, .*, rloo_tokens, gae",
        ),
        (
            {"generation_chunk_size": 4, "use_transformers_continuous_batching": True},
            "generation_chunk_size does not act on use_transformers_continuous_batching",
        ),
        ({"save_on_each_node": True, "advantage_estimator": "gae"}, "save_on_each_node does not act on the critic"),
        ({"critic_kwargs": {"lr": 1e-4}}, "critic_kwargs: the critic has no setting 'lr'; it has gamma, gae_lambda, "),
        ({"eval_temperature": 0.0}, "set num_generations_eval=1"),
        ({"load_best_model_at_end": True, "eval_strategy": "steps"}, "evaluations of LabTrainer have no loss"),
        ({"metric_for_best_model": "eval_pass@8", "num_generations_eval": 2}, "one of maj@2, mean@2, pass@1, pass@2$"),
        ({"metric_for_best_model": "maj@1", "num_generations_eval": 1}, "one of mean@1, pass@1$"),
        ({**VLLM_TEMPERATURE, "surrogate": "clip"}, "temperature of generation_kwargs would replace eval_temperature"),
        (KL_IN_REWARD | {"advantage_estimator": "gae"}, "needs advantage_estimator .* got 'gae'"),
        (KL_IN_REWARD | {"advantage_estimator": "rloo_tokens"}, "needs .* or rloo, got 'rloo_tokens'"),
        # Groups with equal rewards.
        (
            {"resampling_rounds": 1, "advantage_estimator": "gae"},
            "'gae' learns: set it to 0, or use one of group",
        ),
        ({"resampling_rounds": 1, "anchor": "rollout", "use_vllm": True}, "resampling_rounds to 0, or anchor='old'"),
        # Rollouts of other weights.
        ({"rollout_delay": 1, "use_vllm": True}, "vLLM has its own weights: set use_vllm=False, or leave it out"),
        ({"rollout_delay": 1, "anchor": "rollout", "updates_per_rollout": 1}, f"has several updates: {SECOND_UPDATE}"),
    ],
)
def test_config_refuses_settings_that_do_not_go_together(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **{"per_device_train_batch_size": 8, **settings})


def test_a_configuration_can_be_copied(tmp_path):
    args = config(tmp_path, critic_kwargs={"gamma": 0.9}, resampling_rounds=1, eval_temperature=0.5)
    copy = replace(args, learning_rate=1e-5)
    for name in LabConfig.__annotations__:
        assert getattr(copy, name) == getattr(args, name), name


def test_the_command_line_sets_fields_of_both_classes(tmp_path):
    words = f"--output_dir {tmp_path} --use_cpu true --bf16 false --report_to none --kl_bound 0.1 --rollout_delay 2"
    parser: Any = TrlParser
    critic = ["--advantage_estimator", "gae", "--critic_kwargs", '{"gamma": 0.9}']
    (args,) = parser(LabConfig).parse_args_and_config([*words.split(), *critic])
    assert (args.kl_bound, args.rollout_delay, args.critic_settings.gamma) == (0.1, 2, 0.9)


def test_a_warning_names_the_line_that_made_the_configuration(tmp_path):
    with pytest.warns(UserWarning, match="^critic_kwargs ignored: advantage_estimator 'rloo' has no critic") as caught:
        ignored: dict[str, Any] = {"epsilon": 0.1, "critic_kwargs": {"gamma": 0.9}, "scale_rewards": "batch"}
        config(tmp_path, advantage_estimator="rloo", **ignored)
    named = {str(w.message).split()[0]: Path(w.filename) for w in caught if "ignored" in str(w.message)}
    assert named == dict.fromkeys(ignored, Path(__file__))


def test_every_field_has_its_entry_of_the_docstring_as_help():
    own = {field.name: field.metadata.get("help", "") for field in fields(LabConfig)}
    assert [name for name in LabConfig.__annotations__ if not own[name]] == []
    assert "rloo_tokens" in own["advantage_estimator"]
    assert own["kl_bound"] == "ε, the largest KL divergence (nats) of a token's distribution from the old policy's."
