"""TrollConfig: what it accepts, refuses, warns about, and how it is read."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig, TrlParser

from tests.trl.tiny import no_warnings_about
from troll.trl import TrollConfig
from troll.trl.advantages.estimators import ESTIMATORS
from troll.trl.surrogates import SURROGATES, settings_read


def config(tmp_path: Path, **settings: object) -> TrollConfig:
    defaults = {"report_to": "none", "use_cpu": True, "bf16": False}
    return TrollConfig(str(tmp_path), **{**defaults, **settings})  # type: ignore[arg-type]


def copies(args: TrollConfig) -> list[TrollConfig]:
    """A configuration as it is read from its file, and with another learning rate."""
    stored = json.loads(args.to_json_string())
    again = TrollConfig(**{field.name: stored[field.name] for field in fields(TrollConfig) if field.init})
    return [again, dataclasses.replace(args, learning_rate=1e-5)]


def own(surrogate: str, **settings: Any) -> dict[str, Any]:
    return {"surrogate": surrogate, "surrogate_kwargs": settings}


def critic(**settings: Any) -> dict[str, Any]:
    return {"critic_kwargs": settings}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        # Values out of their range.
        ({"kl_bound": 0.0}, "kl_bound must be above 0, got 0.0"),
        ({"kl_bound": -0.1}, "kl_bound must be above 0, got -0.1"),
        ({"kl_bound": math.nan}, "kl_bound must be above 0, got nan"),
        ({"regression_weight": -1.0}, "regression_weight must be finite and at least 0, got -1.0"),
        ({"regression_weight": math.inf}, "regression_weight must be finite and at least 0, got inf"),
        ({"regression_weight": math.nan}, "regression_weight must be finite and at least 0, got nan"),
        ({"support_top_k": 0}, "support_top_k must be an integer, at least 1, got 0"),
        ({"mass_threshold": -1e-5}, r"mass_threshold must be in \[0, 1\), got -1e-05"),
        ({"mass_threshold": 1.0}, r"mass_threshold must be in \[0, 1\), got 1.0"),
        ({"tail": "cut"}, "tail must be one of bucket, floor, got 'cut'"),
        ({"solver": "secant"}, "solver must be one of newton, bracket, got 'secant'"),
        ({"generation_chunk_size": 0}, "generation_chunk_size must be at least 1, got 0"),
        ({"delta": 4.0}, "delta is a part of TRL's clip, which surrogate .troll. does not use"),
        # A surrogate's own.
        (own("kl_penalty", weight=0.0), "weight of surrogate 'kl_penalty' must be finite and above 0, got 0.0"),
        (own("kl_penalty", weight=math.inf), "surrogate_kwargs: weight of .* must be finite and above 0, got inf"),
        (own("kl_penalty", weight=True), "weight of .* must be finite and above 0, got True"),
        (own("kl_penalty", target=0.0), "target of .* must be finite and above 0, got 0.0"),
        (own("kl_penalty", clip=0.0), "clip of .* must be finite and above 0, got 0.0"),
        (own("kl_penalty", cap=1.0), "cap of .* must be above 1, got 1.0"),
        (own("kl_penalty", wieght=1.0), "surrogate 'kl_penalty' has no setting 'wieght', did you mean weight?"),
        (own("kl_penalty", beta=1.0), "has no setting 'beta'; it has weight, direction, target, clip, cap"),
        (own("troll", weight=1.0), "surrogate 'troll' has no setting 'weight', and none of its own"),
        ({"surrogate_kwargs": "0.3"}, "surrogate_kwargs must be a JSON object, got '0.3'"),
        (
            own("kl_penalty", cap=5.0) | {"importance_sampling_level": "sequence"},
            "set importance_sampling_level='token', got 'sequence'",
        ),
        ({"pull": "old"}, "pull must be one of projection, proximal, got 'old'"),
        ({"regression_target": 0.0}, "regression_target must be finite and above 0, got 0.0"),
        (
            {"regression_target": 0.01, "regression_weight": 0.0},
            "regression_target adapts a weight that must be above 0, got 0.0",
        ),
        (
            {"regression_target": 0.01, "updates_per_rollout": 1},
            "regression_target adapts .* set updates_per_rollout to 2 or more",
        ),
        (own("kl_penalty", direction="both"), "direction of .* must be one of old_new, new_old, got 'both'"),
        (own("drpo", threshold=0.0), "threshold of surrogate 'drpo' must be finite and above 0, got 0.0"),
        (own("ipo", threshold=-0.1), r"threshold of .* must be in \(0, 1\], got -0.1"),
        (own("ipo", threshold=1.1), r"threshold of .* must be in \(0, 1\], got 1.1"),
        (own("ipo", kl_weight=-1.0), "kl_weight of .* must be finite and at least 0, got -1.0"),
        (own("gmpo", range=math.nan), "range of .* must be finite and above 0, got nan"),
        ({"kl_bound_negative_ratio": 0.0}, "kl_bound_negative_ratio must be finite and above 0"),
        ({"kl_bound_negative_ratio": math.inf}, "kl_bound_negative_ratio must be finite and above 0"),
        (critic(learning_rate=math.inf), "critic_kwargs: learning_rate of the critic must be finite and above 0"),
        (critic(weight_decay=-0.1), "weight_decay of the critic must be finite and at least 0, got -0.1"),
        (critic(max_grad_norm=-1.0), "max_grad_norm of the critic must be finite and above 0, got -1.0"),
        (critic(warmup_steps=-1), "warmup_steps of the critic must be an integer, at least 0, got -1"),
        (critic(warmup_steps=1.5), r"warmup_steps of the critic must be an integer, at least 0, got 1\.5"),
        (critic(value_clip=math.nan), "value_clip of the critic must be finite and above 0, got nan"),
        (critic(gamma=1.1), r"gamma of the critic must be in \[0, 1\], got 1.1"),
        (critic(gae_lambda=-0.1), r"gae_lambda of the critic must be in \[0, 1\], got -0.1"),
        (critic(whiten_advantages=1), "whiten_advantages of the critic must be true or false, got 1"),
        (critic(lr=1e-4), "the critic has no setting 'lr'; it has gamma, gae_lambda, "),
        (own("dppo_kl", threshold=-1.0), "threshold of .* must be finite and above 0"),
        (own("dppo_tv", threshold=1.1), r"threshold of surrogate 'dppo_tv' must be in \(0, 1\], got 1.1"),
        (own("drpo", threshold=None), "threshold of .* must be finite and above 0, got None"),
        (own("kl_penalty", weight=None), "weight of .* must be finite and above 0, got None"),
        ({"kl_bound": None}, "kl_bound must be above 0, got None"),
        (own("ipo", kl_weight="0.1"), "kl_weight of .* must be finite and at least 0, got '0.1'"),
        (critic(gamma=None), r"gamma of .* must be in \[0, 1\], got None"),
        # TRL's, of the surrogate that is chosen.
        ({"surrogate": "clip", "epsilon": 0.0}, "epsilon must be above 0, got 0.0"),
        ({"surrogate": "clip", "epsilon": math.nan}, "epsilon must be above 0, got nan"),
        ({"surrogate": "clip", "epsilon_high": -0.1}, "epsilon_high must be above 0, got -0.1"),
        ({"surrogate": "clip", "delta": 1.0}, "delta must be above 1, got 1.0"),
        (
            {"surrogate": "sapo", "sapo_temperature_pos": 0.0},
            "sapo_temperature_pos must be finite and above 0, got 0.0",
        ),
        (
            {"surrogate": "sapo", "sapo_temperature_neg": None},
            "sapo_temperature_neg must be finite and above 0, got None",
        ),
        ({"surrogate": "vespo", "vespo_k_pos": -1.0}, "vespo_k_pos must be finite and at least 0, got -1.0"),
        (
            {"surrogate": "vespo", "vespo_lambda_neg": math.nan},
            "vespo_lambda_neg must be finite and at least 0, got nan",
        ),
        ({"support_top_k": 8.5}, "support_top_k must be an integer, at least 1, got 8.5"),
        ({"diagnostics_steps": 2.5}, "diagnostics_steps must be an integer, at least 0"),
        ({"constraint": "tokens"}, "constraint must be one of token, sequence, batch"),
        ({"constraint_reduction": "max"}, "constraint_reduction must be one of mean, sum"),
        ({"eval_temperature": -1.0}, "eval_temperature must be finite and at least 0, got -1.0"),
        ({"eval_temperature": 0.0}, "set num_generations_eval=1"),
        # The schedule of the bound.
        ({"kl_bound_schedule": "linear"}, "needs end"),
        ({"kl_bound_schedule": "linear", "kl_bound_schedule_kwargs": {"end": -1.0}}, "end must be above 0"),
        ({"kl_bound_schedule": "hold_kl", "kl_bound_schedule_kwargs": {"targt": 0.1}}, "targt"),
        ({"kl_bound_schedule": "square"}, "must be one of fixed, linear"),
        ({"kl_bound_schedule_kwargs": "end"}, "kl_bound_schedule_kwargs must be a JSON object"),
        # The updates of a rollout.
        ({"updates_per_rollout": 0}, "updates_per_rollout must be an integer, at least 1, got 0"),
        ({"updates_per_rollout": 1.5}, "updates_per_rollout must be an integer, at least 1, got 1.5"),
        ({"updates_per_rollout": 8, "steps_per_generation": 2}, "updates_per_rollout=8 .* steps_per_generation=2"),
        ({"updates_per_rollout": 8, "generation_batch_size": 32}, "updates_per_rollout=8 .* steps_per_generation=4"),
        (
            {"updates_per_rollout": 1, "steps_per_generation": 3, "gradient_accumulation_steps": 2},
            "updates_per_rollout=1 .* 3 passes a rollout and 2 an update",
        ),
        ({"updates_per_rollout": 3, "num_iterations": 2}, "takes 3 passes over a rollout, which num_iterations=2"),
        ({"steps_per_generation": 4, "generation_batch_size": 64}, "generation_batch_size=64 .* makes 32 completions"),
        # The reward.
        (
            {"advantage_estimator": "rloo", "multi_objective_aggregation": "normalize_then_sum"},
            "must be 'sum_then_normalize'",
        ),
        ({"kl_in_reward": True, "beta": 0.0, "advantage_estimator": "rloo"}, "beta, which must be above 0, got 0.0"),
        (
            {"kl_in_reward": True, "beta": 0.1},
            "needs advantage_estimator reinforce_plus_plus, .*_baseline or rloo, got 'group'",
        ),
        (
            {"kl_in_reward": True, "beta": 0.1, "advantage_estimator": "gae"},
            "needs advantage_estimator .* got 'gae'",
        ),
        # What needs a second update.
        (
            {"kl_in_reward": True, "beta": 0.1, "advantage_estimator": "rloo", "updates_per_rollout": 1},
            "kl_in_reward needs scores .* set updates_per_rollout to 2 or more",
        ),
        (
            own("kl_penalty", target=0.01) | {"updates_per_rollout": 1},
            "surrogate_kwargs.target adapts .* set updates_per_rollout to 2 or more",
        ),
        # And updates that belong to one rollout each.
        (
            own("kl_penalty", target=0.01) | {"steps_per_generation": 3, "gradient_accumulation_steps": 2},
            "gradient_accumulation_steps=2 does not divide the 3 passes of a rollout. Set updates_per_rollout",
        ),
        # Groups with equal rewards.
        ({"resampling_rounds": -1}, "resampling_rounds must be an integer, at least 0, got -1"),
        ({"resampling_rounds": 1.5}, r"resampling_rounds must be an integer, at least 0, got 1\.5"),
        (
            {"resampling_rounds": 1, "resampling_right_share": 1.5},
            r"resampling_right_share must be in \[0, 1\], got 1\.5",
        ),
        ({"resampling_right_share": 0.2}, "resampling_right_share=0.2 is of groups .* set resampling_rounds above 0"),
        (
            {"kl_in_reward": True, "beta": 0.1, "advantage_estimator": "rloo_tokens"},
            "needs advantage_estimator reinforce_plus_plus, .* or rloo, got 'rloo_tokens'",
        ),
        (
            {"resampling_rounds": 1, "advantage_estimator": "gae"},
            "'gae' learns: set it to 0, or use one of group, reinforce_plus_plus_base",
        ),
        (
            {"resampling_rounds": 1, "advantage_estimator": "reinforce_plus_plus", "num_generations": 1},
            "'reinforce_plus_plus' learns",
        ),
        (
            {"resampling_rounds": 1, "multi_objective_aggregation": "normalize_then_sum"},
            "must be 'sum_then_normalize', got 'normalize_then",
        ),
        (
            {"resampling_rounds": 1, "anchor": "rollout", "use_vllm": True},
            "set resampling_rounds to 0, or anchor='old'",
        ),
        # Rollouts of other weights.
        ({"rollout_delay": -1}, "rollout_delay must be an integer, at least 0, got -1"),
        ({"rollout_delay": 1, "rollout_dtype": "int8"}, "rollout_dtype must be 'bfloat16' or 'float16', got 'int8'"),
        ({"rollout_delay": 1, "rollout_correction": 0.0}, "rollout_correction must be finite and above 0, got 0.0"),
        (
            {"rollout_delay": 1, "rollout_correction": 2.0, "anchor": "rollout"},
            "set rollout_delay or rollout_dtype, and anchor='old'",
        ),
        ({"rollout_correction": 2.0, "rollout_delay": 0}, "set rollout_delay or rollout_dtype, and anchor='old'"),
        ({"rollout_delay": 1, "use_vllm": True}, "vLLM has its own weights: set use_vllm=False, or leave them out"),
        (
            {"rollout_delay": 1, "anchor": "rollout", "updates_per_rollout": 1},
            "has several updates: set updates_per_rollout to 2 or more",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_with_what_can(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **{"per_device_train_batch_size": 8, **settings})


@pytest.mark.parametrize(
    ("surrogate", "settings"),
    [
        ("troll", {"sapo_temperature_pos": 0.0, "vespo_k_pos": -1.0}),
        ("clip", {"epsilon": 1.5, "epsilon_high": None, "delta": 1.1}),
        ("vespo", {"vespo_k_pos": 0.0, "vespo_lambda_neg": 0}),
        ("ipo", {"surrogate_kwargs": {"threshold": 1}}),
        ("dppo_tv", {"surrogate_kwargs": {"threshold": 1.0}}),
        ("dppo_kl", {"surrogate_kwargs": {"threshold": 2.0}}),
    ],
)
def test_settings_that_are_not_read_or_at_their_limit_are_accepted(tmp_path, surrogate, settings):
    args = config(tmp_path, surrogate=surrogate, **settings)
    assert {name: getattr(args, name) for name in settings} == settings


#: Of each surrogate, what the table of docs/surrogates.md says about its settings.
ROWS: dict[str, str] = {
    surrogate: settings
    for names, settings in re.findall(
        r"^\| (`\w+`(?:, `\w+`)*) \|[^|]*\|([^|]*)\|",
        (Path(__file__).parents[2] / "docs" / "surrogates.md").read_text(),
        re.M,
    )
    for surrogate in re.findall(r"\w+", names)
}


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_defaults_are_those_of_the_page(tmp_path, surrogate):
    read, settings = settings_read(config(tmp_path, surrogate=surrogate)), ROWS[surrogate]
    if surrogate.startswith("dppo"):  # two defaults of one setting
        total_variation, kl = re.findall(r"([\d.]+) \((?:TV|KL)\)", settings)
        assert read["surrogate_kwargs.threshold"] == float(total_variation if surrogate == "dppo_tv" else kl)
        settings = settings.partition(";")[2]
    defaults = re.findall(r"`(\w+)` (`\w+`|none|[\d.]+)", settings)
    assert bool(defaults) == (surrogate not in ("regression", "none"))  # of which one has those of another
    for name, said in defaults:
        found = read[name if name in read else f"surrogate_kwargs.{name}"]
        assert said == ("none" if found is None else f"`{found}`" if isinstance(found, str) else f"{found:g}"), name


SURROGATE_LOSSES = ["cispo", "sapo", "vespo"]


@pytest.mark.parametrize("surrogate", [name for name in SURROGATES if name not in SURROGATE_LOSSES])
@pytest.mark.parametrize("loss_type", SURROGATE_LOSSES)
def test_a_loss_that_is_a_surrogate_is_refused_with_its_name(tmp_path, loss_type, surrogate):
    message = f"'{loss_type}' does not go with surrogate '{surrogate}': set surrogate='{loss_type}' and leave"
    with pytest.raises(ValueError, match=message):
        config(tmp_path, loss_type=loss_type, surrogate=surrogate)


@pytest.mark.parametrize("surrogate", [name for name in SURROGATES if name != "clip"])
def test_a_loss_of_the_clip_is_refused_with_what_works(tmp_path, surrogate):
    message = f"'luspo' does not go with surrogate '{surrogate}': use one of grpo, bnpo, dr_grpo, dapo, or surrogate="
    with pytest.raises(ValueError, match=message):
        config(tmp_path, loss_type="luspo", surrogate=surrogate)
    with pytest.raises(ValueError, match=f"which surrogate '{surrogate}' does not use"):
        config(tmp_path, delta=4.0, surrogate=surrogate)


def test_the_clip_takes_its_settings(tmp_path):
    args = config(tmp_path, loss_type="luspo", surrogate="clip", delta=4.0, epsilon_high=5.0)
    assert (args.loss_type, args.delta, args.epsilon_high) == ("luspo", 4.0, 5.0)


SET: list[tuple[str, str, str]] = [
    ("cispo", "cispo", "token"),
    ("sapo", "sapo", "token"),
    ("vespo", "vespo", "token"),
    ("gmpo", "grpo", "sequence"),
]


@pytest.mark.parametrize(("surrogate", "loss_type", "level"), SET)
def test_a_surrogate_sets_the_loss_it_needs(tmp_path, surrogate, loss_type, level):
    with no_warnings_about("is now"):
        args = config(tmp_path, surrogate=surrogate)
        assert (args.loss_type, args.importance_sampling_level) == (loss_type, level)
        for copy in copies(args):
            assert (copy.loss_type, copy.importance_sampling_level) == (loss_type, level)
            assert copy.epsilon_high == args.epsilon_high
    with pytest.warns(UserWarning, match=f"^loss_type='bnpo' is now '{loss_type}': surrogate '{surrogate}'") as caught:
        assert config(tmp_path, surrogate=surrogate, loss_type="bnpo").loss_type == loss_type
    assert [Path(warning.filename) for warning in caught if "is now" in str(warning.message)] == [Path(__file__)]


def test_cispo_bounds_the_ratio_itself(tmp_path):
    with no_warnings_about("ignored"):
        assert config(tmp_path, surrogate="cispo").epsilon_high == 5.0
        assert config(tmp_path, surrogate="cispo", epsilon_high=2.0).epsilon_high == 2.0
    with pytest.warns(UserWarning, match="^epsilon ignored: surrogate 'cispo'"):
        config(tmp_path, surrogate="cispo", epsilon=0.1)
    with pytest.raises(
        ValueError, match=r"epsilon_high is the largest ratio itself, and must be at least 1, got 0\.28"
    ):
        config(tmp_path, surrogate="cispo", epsilon_high=0.28)


def test_a_fixed_penalty_needs_nothing_to_adapt_to(tmp_path):
    assert config(tmp_path, surrogate="kl_penalty", updates_per_rollout=1).penalty_target is None


@pytest.mark.parametrize("surrogate", ["troll", "clip"])
def test_an_unknown_loss_is_refused(tmp_path, surrogate):
    with pytest.raises(ValueError, match=r"loss_type 'nonsense' .*: use one of grpo, bnpo, dr_grpo, dapo[a-z, ]*$"):
        config(tmp_path, loss_type="nonsense", surrogate=surrogate)


def test_defaults_are_those_of_the_paper_and_of_grpo(tmp_path):
    ours = config(tmp_path)
    assert (ours.kl_bound, ours.regression_weight, ours.support_top_k) == (0.05, 1.0, 64)
    assert (ours.mass_threshold, ours.tail, ours.solver) == (1e-5, "bucket", "newton")
    assert ours.disable_dropout
    changed = {"disable_dropout", "steps_per_generation", "generation_batch_size"}
    theirs = GRPOConfig(str(tmp_path), report_to="none", use_cpu=True, bf16=False)
    for name in GRPOConfig.__dataclass_fields__:
        if name not in changed and name != "logging_dir":
            assert getattr(ours, name) == getattr(theirs, name), name


def test_the_sampling_top_k_stays_the_sampling_top_k(tmp_path):
    both = config(tmp_path, top_k=5, support_top_k=9)
    assert (both.top_k, both.support_top_k) == (5, 9)


@pytest.mark.parametrize(
    ("ignored", "names"),
    [
        ({"epsilon": 0.1}, "epsilon ignored"),
        ({"epsilon_high": 0.28}, "epsilon_high ignored"),
        ({"epsilon": 0.1, "epsilon_high": 0.28}, "epsilon and epsilon_high ignored"),
    ],
)
def test_an_epsilon_is_ignored_with_a_warning(tmp_path, ignored, names):
    with pytest.warns(UserWarning, match=f"^{names}") as caught:
        config(tmp_path, **ignored)
    assert [Path(warning.filename) for warning in caught if "ignored" in str(warning.message)] == [Path(__file__)]


def test_the_default_epsilon_is_ignored_in_silence(tmp_path):
    with no_warnings_about("ignored"):
        config(tmp_path)


@pytest.mark.parametrize(
    ("accumulation", "per_generation", "iterations", "steps", "on_policy"),
    [
        (1, 1, 1, 1, True),  # TRL's defaults: one update a rollout
        (8, 8, 1, 8, True),
        (1, None, 1, 8, False),  # ours: eight
        (8, None, 1, 64, False),
        (8, 4, 1, 4, True),  # two rollouts an update
        (8, 4, 2, 8, True),
        (1, 8, 1, 8, False),
        (1, None, 2, 2, False),
        (2, 4, 1, 4, False),
        (2, 3, 1, 3, False),  # an update may straddle two rollouts
        (4, 4, 2, 8, False),
    ],
)
def test_always_on_policy(tmp_path, accumulation, per_generation, iterations, steps, on_policy):
    args = config(
        tmp_path,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=per_generation,
        num_iterations=iterations,
    )
    assert args.rollout_steps == steps
    assert args.always_on_policy is on_policy


@pytest.mark.parametrize(
    ("settings", "steps", "updates"),
    [
        ({}, 8, 8),
        ({"gradient_accumulation_steps": 4}, 32, 8),
        ({"updates_per_rollout": 2, "gradient_accumulation_steps": 4}, 8, 2),
        ({"updates_per_rollout": 1, "gradient_accumulation_steps": 4}, 4, 1),
        # An update goes over all of a rollout's passes, repeated ones too.
        ({"updates_per_rollout": 6, "gradient_accumulation_steps": 2, "num_iterations": 3}, 4, 6),
        # TRL's settings win over our default.
        ({"steps_per_generation": 4}, 4, 4),
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 4}, 4, 1),
        ({"generation_batch_size": 32}, 4, 4),
        ({"num_iterations": 3, "gradient_accumulation_steps": 2}, 2, 3),
        ({"steps_per_generation": 8, "updates_per_rollout": 8}, 8, 8),
        ({"generation_batch_size": 32, "updates_per_rollout": 4}, 4, 4),
        # Not a whole number of updates.
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, 3, None),
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 8}, 4, None),
    ],
)
def test_updates_per_rollout_sets_the_steps_of_a_rollout(tmp_path, settings, steps, updates):
    args = config(tmp_path, per_device_train_batch_size=8, **settings)
    assert (args.steps_per_generation, args.updates_per_rollout) == (steps, updates)
    assert args.generation_batch_size == 8 * steps


@pytest.mark.parametrize("settings", [{}, {"steps_per_generation": 3, "gradient_accumulation_steps": 2}])
def test_a_configuration_can_be_copied(tmp_path, settings):
    args = config(tmp_path, per_device_train_batch_size=8, **settings)
    for copy in copies(args):
        for name in ("steps_per_generation", "generation_batch_size", "updates_per_rollout"):
            assert getattr(copy, name) == getattr(args, name), name
    with pytest.raises(ValueError, match="disagree"):
        dataclasses.replace(args, updates_per_rollout=5)


SINGLE = {"advantage_estimator": "gae", "num_generations": 1, "per_device_train_batch_size": 3}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vllm_importance_sampling_clip_min": 3.0, "vllm_importance_sampling_clip_max": 2.0}, "must be less than"),
        ({"vllm_importance_sampling_clip_min": 2.0, "vllm_importance_sampling_cap": 2.0}, "must be less than"),
        (
            {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None},
            "At least one of `vllm_importance_sampling_clip_min`",
        ),
        # Checks before that of num_generations.
        ({"generation_batch_size": 4}, "must be divisible by the global batch size"),
        ({"eval_strategy": "steps", "num_generations_eval": 2, "per_device_eval_batch_size": 3}, "must be divisible"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size is not supported"),
    ],
)
def test_one_completion_of_a_prompt_skips_no_check_of_trl(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **SINGLE, **settings)


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
def test_one_completion_of_a_prompt_skips_no_setting_of_trl(tmp_path, estimator):
    """Every field is as with several completions of a prompt, where TRL's check passes by itself."""
    settings = {**SINGLE, "advantage_estimator": estimator, "gradient_accumulation_steps": 2, "scale_rewards": True}
    settings |= {"steps_per_generation": 6, "eval_strategy": "steps", "per_device_eval_batch_size": 3}
    with pytest.warns(FutureWarning, match="vllm_importance_sampling_cap"):
        one = config(tmp_path, **settings, vllm_importance_sampling_cap=1.5)
    with pytest.warns(FutureWarning, match="vllm_importance_sampling_cap"):
        three = config(tmp_path, **{**settings, "num_generations": 3}, vllm_importance_sampling_cap=1.5)
    assert one.vllm_importance_sampling_clip_max == 1.5
    assert (one.generation_batch_size, one.steps_per_generation, one.num_generations_eval) == (18, 6, None)
    assert type(one.num_generations) is int
    names = [field.name for field in fields(TrollConfig)]
    assert {name for name in names if getattr(one, name) != getattr(three, name)} == {"num_generations"}


@pytest.mark.parametrize("estimator", [name for name, each in ESTIMATORS.items() if each.needs_group])
def test_estimators_of_groups_take_no_single_completion(tmp_path, estimator):
    with pytest.raises(ValueError, match="at least 2 generations"):
        config(tmp_path, **{**SINGLE, "advantage_estimator": estimator})


def test_a_batch_of_one_completion_is_enough(tmp_path):
    args = config(tmp_path, **{**SINGLE, "per_device_train_batch_size": 1}, generation_batch_size=1)
    assert (args.generation_batch_size, args.steps_per_generation, args.num_generations) == (1, 1, 1)


@pytest.mark.parametrize("estimator", ["rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_the_reference_may_penalise_the_reward(tmp_path, estimator):
    assert config(tmp_path, kl_in_reward=True, beta=0.1, advantage_estimator=estimator).kl_in_reward


@pytest.mark.parametrize("precision", [{"bf16": True}, {"bf16": None}, {"fp16": True}])
def test_continuous_batching_may_not_cast_the_weights(tmp_path, precision):
    dtype = "fp16" if "fp16" in precision else "bf16"
    with pytest.raises(ValueError, match=f"with {dtype}=True casts the trained weights themselves to {dtype}"):
        config(tmp_path, use_transformers_continuous_batching=True, **precision)
    assert config(tmp_path, use_transformers_continuous_batching=True).use_transformers_continuous_batching


def test_the_configuration_is_valid_json(tmp_path):
    schedule = {"kl_bound_schedule": "cosine", "kl_bound_schedule_kwargs": {"end": 0.01}}
    args = config(tmp_path, kl_bound=0.02, tail="floor", solver="bracket", support_top_k=7, **schedule)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    stored = json.loads(args.to_json_string(), parse_constant=refuse)
    ours = {field.name for field in fields(TrollConfig)} - {field.name for field in fields(GRPOConfig)}
    assert ours >= {"kl_bound", "regression_weight", "support_top_k", "mass_threshold", "tail", "solver", "surrogate"}
    again = config(tmp_path, **{name: stored[name] for name in ours})
    assert all(getattr(again, name) == getattr(args, name) for name in ours)


def parse(words: list[str]) -> TrollConfig:
    parser: Any = TrlParser
    (args,) = parser(TrollConfig).parse_args_and_config(words)
    assert isinstance(args, TrollConfig)
    return args


def test_the_command_line_sets_every_field(tmp_path):
    words = (
        f"--output_dir {tmp_path} --kl_bound 0.02 --regression_weight 0.5 --support_top_k 32 --mass_threshold 1e-4 "
        "--tail floor --solver bracket --disable_dropout false --loss_type grpo --steps_per_generation 8 "
        "--num_generations 4 --report_to none --use_cpu true --bf16 false"
    )
    args = parse(words.split())
    assert (args.kl_bound, args.regression_weight, args.support_top_k) == (0.02, 0.5, 32)
    assert (args.mass_threshold, args.tail, args.solver) == (1e-4, "floor", "bracket")
    assert args.disable_dropout is False
    assert args.rollout_steps == 8


@pytest.mark.parametrize(("option", "value"), [("--tail", "cut"), ("--solver", "secant")])
def test_the_command_line_offers_the_choices(tmp_path, capsys, option, value):
    with pytest.raises(SystemExit):
        parse(["--output_dir", str(tmp_path), option, value])
    assert f"invalid choice: '{value}'" in capsys.readouterr().err


def test_every_field_has_its_entry_of_the_docstring_as_help():
    own = {field.name: field.metadata.get("help", "") for field in fields(TrollConfig)}
    assert [name for name in TrollConfig.__annotations__ if not own[name]] == []
    assert own["kl_bound"] == "ε, the largest KL divergence (nats) of a token's distribution from the old policy's."
    assert own["tail"].startswith('How the tokens that are not kept count: "bucket"')
    assert own["tail"].endswith("as the paper's code does.")


def test_a_yaml_file_sets_fields_and_the_command_line_wins(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"output_dir: {tmp_path}\nkl_bound: 0.02\ntail: floor\nsupport_top_k: 16\nreport_to: none\nuse_cpu: true\n"
        "bf16: false\n"
    )
    args = parse(["--config", str(path), "--kl_bound", "0.1"])
    assert (args.kl_bound, args.tail, args.support_top_k) == (0.1, "floor", 16)


def test_a_missing_trl_is_named_with_what_to_install():
    script = "import sys; sys.modules['trl'] = None; import troll.trl"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == 'ImportError: troll.trl needs TRL: pip install "troll-rl[trl]"'
