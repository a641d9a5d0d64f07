"""TrollConfig: what it accepts, refuses, warns about, and how it is read."""

import dataclasses
import json
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from trl import GRPOConfig, TrlParser

from tests.troll.trl import tiny
from tests.troll.trl.surrogates.contract import (
    LOSSES,
    OWN,
    assert_defaults_are_those_of_the_page,
    assert_refuses_losses,
)
from tests.troll.trl.tiny import no_warnings_about
from troll import Truncation
from troll.trl import TrollConfig
from troll.trl.surrogates import SURROGATES, Surrogate, Terms


def copies(args: TrollConfig) -> list[TrollConfig]:
    """A configuration as it is read from its file, and with another learning rate."""

    stored = json.loads(args.to_json_string(), parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    again = TrollConfig(**{field.name: stored[field.name] for field in fields(TrollConfig) if field.init})
    return [again, dataclasses.replace(args, learning_rate=1e-5)]


def own(owner: str, **settings: Any) -> dict[str, Any]:
    """Settings of a surrogate."""
    return {"surrogate": owner, "surrogate_kwargs": settings}


KL_IN_REWARD: dict[str, Any] = {"kl_in_reward": True, "beta": 0.1}
ONE_PASS_IN_TWO: dict[str, Any] = {"steps_per_generation": 3, "gradient_accumulation_steps": 2}
SECOND_UPDATE = "set updates_per_rollout to 2 or more"


@pytest.mark.parametrize(
    ("name", "takes", "value", "settings"),
    [
        # Each with a value that the next wider range would take; the ranges themselves: test_own_settings.
        ("kl_bound", "above 0", 0.0, {}),
        ("kl_bound", "above 0", None, {}),
        ("regression_weight", "finite and at least 0", math.inf, {}),
        ("support_top_k", "an integer, at least 1", 0, {}),
        ("mass_threshold", "in [0, 1)", 1.0, {}),
        ("diagnostics_steps", "an integer, at least 0", 2.5, {}),
        ("updates_per_rollout", "an integer, at least 1", 0, {}),
        # TRL's, of the surrogate that is chosen.
        ("epsilon", "above 0", 0.0, {"surrogate": "clip"}),
        ("epsilon_high", "above 0", -0.1, {"surrogate": "clip"}),
        ("delta", "above 1", 1.0, {"surrogate": "clip"}),
        ("sapo_temperature_pos", "finite and above 0", 0.0, {"surrogate": "sapo"}),
        ("sapo_temperature_neg", "finite and above 0", None, {"surrogate": "sapo"}),
        *((f"vespo_{x}", "finite and at least 0", -1.0, {"surrogate": "vespo"}) for x in ("k_pos", "k_neg")),
        *((f"vespo_lambda_{x}", "finite and at least 0", -1.0, {"surrogate": "vespo"}) for x in ("pos", "neg")),
        # Words.
        ("pull", "one of projection, proximal", "old", {}),
        ("constraint", "one of token, sequence", "tokens", {}),
        ("constraint_reduction", "one of mean, sum", "max", {}),
        ("surrogate_kwargs", "a JSON object", "0.3", {}),
        ("multi_objective_aggregation", "'sum_then_normalize'", "normalize_then_sum", {"advantage_estimator": "rloo"}),
        # Those that TRL would find only after the first rollout.
        ("multi_objective_aggregation", "one of sum_then_normalize, normalize_then_sum", "sum", {}),
        ("importance_sampling_level", "one of token, sequence", "sequences", {}),
        ("scale_rewards", "one of group, batch, none, True, False", "groups", {}),
        ("vllm_importance_sampling_mode", "one of token_truncate, token_mask, sequence_truncate, ", "mask", {}),
        ("max_grad_norm", "at least 0", None, {}),
    ],
)
def test_a_value_that_a_setting_does_not_take_is_refused(config, name, takes, value, settings):
    with pytest.raises(ValueError, match=f"{re.escape(f'{name} must be {takes}')}.*{re.escape(f'got {value!r}')}"):
        config(**{name: value}, **settings)


@pytest.mark.parametrize(
    ("name", "takes", "value"),
    [("weight", "finite and above 0", 0.0), ("direction", "one of old_new, new_old", "both")],
)
def test_a_value_out_of_range_of_a_surrogate_is_refused(config, name, takes, value):
    with pytest.raises(ValueError, match=re.escape(f"{name} of surrogate 'kl_penalty' must be {takes}, got {value!r}")):
        config(**own("kl_penalty", **{name: value}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        # A surrogate's own.
        (own("kl_penalty", wieght=1.0), "surrogate_kwargs: surrogate 'kl_penalty' has no .* did you mean weight?"),
        (own("troll", weight=1.0), "surrogate 'troll' has no setting 'weight', and none of its own"),
        ({"surrogate": "nonsense"}, "surrogate must be one of troll, .*, got 'nonsense': another one is known once"),
        ({"surrogate": "cispo", "epsilon_high": 0.28}, r"the largest ratio itself, and must be at least 1, got 0\.28"),
        ({"loss_type": "nonsense"}, r"loss_type 'nonsense' .*: use one of grpo, bnpo, dr_grpo, dapo[a-z, ]*$"),
        # Generation.
        (KL_IN_REWARD | {"advantage_estimator": "rloo", "top_k": 3}, "kl_in_reward compares whole policies"),
        ({"use_vllm": True, "top_k": 3, "updates_per_rollout": 1}, "with one update per rollout TRL scores whole pol"),
        ({"use_transformers_continuous_batching": True, "eval_strategy": "steps"}, "set eval_strategy='no'"),
        ({"use_transformers_continuous_batching": True, "eval_on_start": True}, "set .*eval_on_start=False"),
        ({"use_vllm": True, "generation_kwargs": {"logprobs": 5}}, "leave it out of generation_kwargs"),
        ({"loss_type": "dr_grpo", "max_completion_length": None}, "divides by max_completion_length"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha .* leave it out"),
        ({"neftune_noise_alpha": 5.0, "surrogate": "clip", "kl_target": 0.1}, "neftune_noise_alpha .* leave it out"),
        *(({"use_transformers_continuous_batching": True, x: True}, f"set {x}=False") for x in ("bf16", "fp16")),
        ({"use_transformers_continuous_batching": True, "bf16": None}, "set bf16=False"),  # which TRL makes true
        # The updates of a rollout.
        ({"updates_per_rollout": 8, "steps_per_generation": 2}, "updates_per_rollout=8 .* steps_per_generation=2"),
        ({"updates_per_rollout": 8, "generation_batch_size": 32}, "updates_per_rollout=8 .* steps_per_generation=4"),
        ({"updates_per_rollout": 1, **ONE_PASS_IN_TWO}, "=1 .* 3 passes a rollout and 2 an update"),
        (
            {"updates_per_rollout": 2, "num_iterations": 4, "gradient_accumulation_steps": 4},
            "updates_per_rollout must be at least num_iterations=4",
        ),
        ({"updates_per_rollout": 3, "num_iterations": 2}, "takes 3 passes over a rollout, which num_iterations=2"),
        ({"steps_per_generation": 4, "generation_batch_size": 64}, "generation_batch_size=64 .* makes 32 completions"),
        ({"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}}, "set gradient_accumulation_steps"),
        # The reward.
        (KL_IN_REWARD | {"beta": 0.0, "advantage_estimator": "rloo"}, "beta, which must be above 0, got 0.0"),
        (KL_IN_REWARD, "needs advantage_estimator reinforce_plus_plus, .*_baseline or rloo, got 'group'"),
        (KL_IN_REWARD | {"advantage_estimator": "rloo", "updates_per_rollout": 1}, f"needs scores .* {SECOND_UPDATE}"),
        # Truncated sampling.
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"generation_kwargs": {"min_p": -1.0}}, r"min_p must be in \[0, 1\], got -1.0"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(config, settings, message):
    with pytest.raises(ValueError, match=message):
        config(**{"per_device_train_batch_size": 8, **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {"sapo_temperature_pos": 0.0, "vespo_k_pos": -1.0},  # which "troll" does not read
        {"surrogate": "clip", "loss_type": "luspo", "epsilon": 1.5, "epsilon_high": None, "delta": 1.1},
        {"use_transformers_continuous_batching": True},
    ],
)
def test_settings_that_are_not_read_or_valid_are_accepted(config, settings):
    """What the ranges take: test_own_settings."""
    args = config(**settings)
    assert {name: getattr(args, name) for name in settings} == settings


@pytest.mark.parametrize("surrogate", OWN)
def test_defaults_are_those_of_the_page(config, surrogate):
    assert_defaults_are_those_of_the_page(config(surrogate=surrogate))


@pytest.mark.parametrize("surrogate", [name for name in OWN if name not in LOSSES])
def test_a_loss_that_a_surrogate_does_not_take_is_refused(config, surrogate):
    assert_refuses_losses(config, surrogate)


@pytest.mark.parametrize("surrogate", LOSSES)
def test_a_surrogate_sets_the_loss_it_needs(config, surrogate):
    with no_warnings_about("is now"):
        args = config(surrogate=surrogate)
        for each in (args, *copies(args)):
            assert (each.loss_type, each.importance_sampling_level) == (surrogate, "token")
            assert each.epsilon_high == args.epsilon_high
    with pytest.warns(UserWarning, match=f"^loss_type='bnpo' is now '{surrogate}': surrogate '{surrogate}'"):
        assert config(surrogate=surrogate, loss_type="bnpo").loss_type == surrogate


def test_cispo_bounds_the_ratio_itself(config):
    assert config(surrogate="cispo", epsilon_high=2.0).epsilon_high == 2.0
    with pytest.warns(UserWarning, match="^epsilon ignored: surrogate 'cispo'"):
        config(surrogate="cispo", epsilon=0.1)


def test_defaults_are_those_of_the_paper_and_of_grpo(config, tmp_path):
    ours = config()
    assert (ours.kl_bound, ours.regression_weight, ours.support_top_k, ours.mass_threshold) == (0.05, 1.0, 64, 1e-5)
    changed = {"disable_dropout", "steps_per_generation", "generation_batch_size", "epsilon", "logging_dir"}
    theirs = GRPOConfig(str(tmp_path), report_to="none", use_cpu=True, bf16=False)
    names = GRPOConfig.__dataclass_fields__.keys()
    assert {name for name in names if getattr(ours, name) != getattr(theirs, name)} <= changed
    assert ours.disable_dropout
    for args in (config(surrogate="clip"), dataclasses.replace(ours, surrogate="clip")):
        assert (args.epsilon, args.epsilon_high) == (theirs.epsilon, theirs.epsilon_high)


@pytest.mark.parametrize("names", ["epsilon", "epsilon_high", "epsilon and epsilon_high"])
def test_an_epsilon_is_ignored_with_a_warning(config, names):
    with pytest.warns(UserWarning, match=f"^{names} ignored") as caught:
        config(**dict.fromkeys(names.split(" and "), 0.1))
    # The line that makes the configuration.
    assert [Path(warning.filename) for warning in caught if "ignored" in str(warning.message)] == [Path(tiny.__file__)]


@pytest.mark.parametrize(
    "settings", [{"surrogate": name} for name in OWN] + [{"beta": 0.1, "loss_type": "dapo"}], ids=str
)
def test_only_the_clip_has_a_range(config, settings):
    """A GRPOTrainer, which would clip, fails with the others: test_trainer."""
    with no_warnings_about("ignored"):
        args = config(**settings)
        for each in (args, *copies(args)):
            assert (each.epsilon is not None) == (args.surrogate == "clip")
            assert each.epsilon_high == (5.0 if args.surrogate == "cispo" else None)


@pytest.mark.parametrize(
    ("settings", "steps", "updates", "on_policy"),
    [
        ({}, 8, 8, False),
        ({"gradient_accumulation_steps": 4}, 32, 8, False),
        ({"updates_per_rollout": 2, "gradient_accumulation_steps": 4}, 8, 2, False),
        ({"updates_per_rollout": 1, "gradient_accumulation_steps": 4}, 4, 1, True),
        # An update goes over all of a rollout's passes, repeated ones too.
        ({"updates_per_rollout": 6, "gradient_accumulation_steps": 2, "num_iterations": 3}, 4, 6, False),
        # TRL's settings win over our default.
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 4}, 4, 1, True),
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 4, "num_iterations": 2}, 4, 2, False),
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 8, "num_iterations": 2}, 4, 1, True),
        ({"generation_batch_size": 32}, 4, 4, False),
        ({"num_iterations": 3, "gradient_accumulation_steps": 2}, 2, 3, False),
        ({"steps_per_generation": 8, "updates_per_rollout": 8}, 8, 8, False),
        ({"generation_batch_size": 32, "updates_per_rollout": 4}, 4, 4, False),
        # Not a whole number of updates: one straddles two rollouts, or takes two.
        (ONE_PASS_IN_TWO, 3, None, False),
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 8}, 4, None, True),
    ],
)
def test_updates_per_rollout_and_the_steps_of_a_rollout(config, settings, steps, updates, on_policy):
    args = config(per_device_train_batch_size=8, **settings)
    assert (args.steps_per_generation, args.updates_per_rollout) == (steps, updates)
    assert args.generation_batch_size == 8 * steps
    assert args.rollout_steps == steps * args.num_iterations
    assert args.always_on_policy is on_policy


@pytest.mark.parametrize(
    "settings",
    [{}, ONE_PASS_IN_TWO, {"generation_kwargs": {"min_p": 0.1}}, own("kl_penalty", weight=3.0)],
)
def test_a_configuration_can_be_copied(config, settings):
    args = config(per_device_train_batch_size=8, **settings)
    for copy in copies(args):
        for name in {*TrollConfig.__annotations__, "steps_per_generation", "generation_batch_size"}:
            assert getattr(copy, name) == getattr(args, name), name
    with pytest.raises(ValueError, match="disagree"):
        dataclasses.replace(args, updates_per_rollout=5)


SINGLE = {"advantage_estimator": "reinforce_plus_plus", "num_generations": 1, "per_device_train_batch_size": 3}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vllm_importance_sampling_clip_min": 3.0, "vllm_importance_sampling_clip_max": 2.0}, "must be less than"),
        # Checks before that of num_generations.
        ({"generation_batch_size": 4}, "must be divisible by the global batch size"),
        ({"eval_strategy": "steps", "num_generations_eval": 2, "per_device_eval_batch_size": 3}, "must be divisible"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size is not supported"),
    ],
)
def test_one_completion_of_a_prompt_skips_no_check_of_trl(config, settings, message):
    with pytest.raises(ValueError, match=message):
        config(**SINGLE, **settings)


def test_one_completion_of_a_prompt_skips_no_setting_of_trl(config):
    """Every field is as with several completions of a prompt, where TRL's check passes by itself."""
    settings = {**SINGLE, "gradient_accumulation_steps": 2, "scale_rewards": True, "steps_per_generation": 6}
    settings |= {"eval_strategy": "steps", "per_device_eval_batch_size": 3, "vllm_importance_sampling_cap": 1.5}
    with pytest.warns(FutureWarning, match="vllm_importance_sampling_cap"):
        one, three = (config(**{**settings, "num_generations": number}) for number in (1, 3))
    assert type(one.num_generations) is int
    names = [field.name for field in fields(TrollConfig)]
    assert {name for name in names if getattr(one, name) != getattr(three, name)} == {"num_generations"}


def test_the_command_line_sets_fields_and_wins_over_a_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"output_dir: {tmp_path}\nkl_bound: 0.02\npull: proximal\nsupport_top_k: 16\nreport_to: none\n")
    words = "--kl_bound 0.1 --mass_threshold 1e-4 --disable_dropout false --steps_per_generation 4"
    words += " --use_cpu true --bf16 false"
    parser: Any = TrlParser
    (args,) = parser(TrollConfig).parse_args_and_config(["--config", str(path), *words.split()])
    assert (args.kl_bound, args.pull, args.support_top_k) == (0.1, "proximal", 16)
    assert (args.mass_threshold, args.disable_dropout, args.rollout_steps) == (1e-4, False, 4)


def test_every_field_has_its_entry_of_the_docstring_as_help():
    own = {field.name: field.metadata.get("help", "") for field in fields(TrollConfig)}
    assert [name for name in TrollConfig.__annotations__ if not own[name]] == []
    assert own["mass_threshold"].startswith("δ: fewer than `support_top_k`") and own["mass_threshold"].endswith("mass.")


@pytest.mark.parametrize("use_vllm", [False, True])
@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": -1, "top_p": 1.0, "min_p": 0.0}, None),
        ({"top_p": 0.9, "truncated_ratio": False}, None),
        ({"top_p": 0.9, "surrogate": "clip"}, None),
        ({"top_p": 0.9, "min_p": 0.1}, Truncation(top_p=0.9, min_p=0.1)),
        ({"top_p": 0.9, "generation_kwargs": {"top_k": 7, "top_p": 0.5}}, Truncation(top_k=7, top_p=0.5)),
    ],
    ids=str,
)
def test_truncation_follows_the_sampler_and_the_surrogate(config, settings, kept, use_vllm):
    """Its order, too."""
    expected = kept and dataclasses.replace(kept, min_p_first=use_vllm)
    assert config(use_vllm=use_vllm, **settings).truncation == expected


def test_a_surrogate_with_terms_of_its_own_follows_the_sampler(config):
    """Also if it keeps TRL's clip."""
    mine = Surrogate(lambda tokens, args, own: Terms(), fields=("epsilon", "epsilon_high", "delta"), clips=True)
    with mock.patch.dict(SURROGATES, mine=mine):
        assert config(surrogate="mine", generation_kwargs={"top_p": 0.7}).top_p == 0.7
        with pytest.raises(ValueError, match="loss_type 'luspo' does not go with surrogate 'mine'"):
            config(surrogate="mine", loss_type="luspo")
    assert config(surrogate="clip", generation_kwargs={"top_p": 0.7}).top_p == 1.0
