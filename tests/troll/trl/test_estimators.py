"""Advantage estimators against closed forms on small batches made by hand."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import HfArgumentParser

from tests.troll.trl import estimators_contract, tiny
from troll.trl import Estimator, TrollConfig, estimators, register_estimator

NAN = math.nan
ONES = torch.ones(6, dtype=torch.long)

OF_SEQUENCES = {
    name: estimator.of_sequences for name, estimator in estimators.ESTIMATORS.items() if estimator.of_sequences
}


def float64(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(actual: Tensor, expected: Tensor | list | float) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=1e-12, atol=1e-12)


def test_rewards_are_weighted_over_the_functions_that_scored():
    rewards = float64([[1, 2], [NAN, 3], [4, NAN], [NAN, NAN]])
    combined = estimators.combine_rewards(rewards, torch.tensor([1.0, 0.5]))
    torch.testing.assert_close(combined, float64([2, 1.5, 4, NAN]), equal_nan=True)


def test_rloo_is_the_distance_from_the_mean_of_the_others():
    # The first group: 1 − 5/2, 2 − 4/2, 3 − 3/2. The second has a completion without a reward.
    close(estimators.rloo(float64([1, 2, 3, 4, NAN, 10]), 3, ONES), [-1.5, 0, 1.5, -6, 0, 6])


def test_rloo_of_a_completion_without_others_is_zero():
    close(estimators.rloo(float64([NAN, 5, NAN, NAN]), 2, ONES[:4]), [0, 0, 0, 0])


def test_reinforce_plus_plus_counts_tokens_not_completions():
    rewards, counts = float64([0, 1, 5, NAN]), torch.tensor([3, 1, 0, 7])
    tokens = float64([0, 0, 0, 1])
    mean, std = tokens.mean(), tokens.std(correction=0)
    # No tokens, or no reward: no part in the mean, and no advantage.
    close(estimators.reinforce_plus_plus(rewards, 2, counts), [-mean / std, (1 - mean) / std, 0, 0])


def test_reinforce_plus_plus_baseline_subtracts_the_group_first():
    # Differences from the group's mean: −1, 1, −3, 3, and 0 without a comparison; their mean is 0, their variance 20/5.
    advantages = estimators.reinforce_plus_plus_baseline(float64([1, 3, 4, 10, 7, NAN]), 2, ONES)
    close(advantages, [-0.5, 0.5, -1.5, 1.5, 0, 0])


@pytest.mark.parametrize("estimator", OF_SEQUENCES)
def test_equal_rewards_or_none_have_no_advantage(estimator):
    advantages = OF_SEQUENCES[estimator](torch.full((6,), 0.7), 3, torch.arange(1, 7))
    assert advantages.abs().max() < 2**-20 * 0.7  # what a KL target calls equal
    assert OF_SEQUENCES[estimator](torch.full((6,), NAN), 3, ONES).tolist() == [0.0] * 6


def test_whiten_in_float32_keeps_a_variance_below_the_mean():
    values = 1000 + 0.1 * torch.arange(64.0)
    expected = (values.double() - values.double().mean()) / values.double().std(correction=0)
    torch.testing.assert_close(estimators.whiten(values, torch.ones(64)).double(), expected, rtol=1e-3, atol=1e-3)


def test_advantages_are_the_estimators_of_the_rewards(make):
    """The table of completions has them, too."""
    trainer = make(advantage_estimator="reinforce_plus_plus_baseline")
    output = tiny.rolled_out(trainer)
    rewards = torch.tensor(tiny.reward(tiny.unpadded(output))).double()
    expected = estimators.reinforce_plus_plus_baseline(rewards, 4, output["completion_mask"].sum(-1))
    assert output["advantages"].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert list(trainer._logs["advantages"]) == pytest.approx(output["advantages"].tolist())


@pytest.mark.parametrize("estimator", ["group", "reinforce_plus_plus"])
def test_one_completion_per_prompt_is_enough_without_groups(make, estimator):
    estimators_contract.one_completion_is_enough_without_groups(make, estimator)


def test_estimators_train_and_evaluate(make):
    estimators_contract.trains(make, "rloo")


def furthest(rewards: Tensor, num_generations: int, token_counts: Tensor) -> Tensor:
    """The distance from the largest reward of all."""
    return rewards - rewards.max()


@pytest.fixture
def registered() -> Iterator[str]:
    """The name of an estimator that a user has registered."""
    register_estimator("furthest", Estimator(furthest))
    yield "furthest"
    del estimators.ESTIMATORS["furthest"]


def test_register_estimator_makes_a_function_an_estimator(make, registered):
    output = tiny.rolled_out(make(advantage_estimator=registered))
    rewards = torch.tensor(tiny.reward(tiny.unpadded(output)))
    torch.testing.assert_close(output["advantages"], rewards - rewards.max())


def test_register_estimator_takes_a_new_function_of_the_same_module(registered):
    """As when a cell of a notebook runs again, and makes a new function."""

    def again(rewards: Tensor, num_generations: int, token_counts: Tensor) -> Tensor:
        return rewards

    register_estimator(registered, Estimator(again))
    assert estimators.ESTIMATORS[registered].of_sequences is again


@pytest.mark.parametrize("another", [Estimator(estimators.rloo), Estimator()], ids=["function", "none"])
def test_register_estimator_refuses_a_name_that_another_module_has(registered, another):
    for taken in (registered, "group"):
        with pytest.raises(ValueError, match=f"estimator '{taken}' is registered already: choose another name"):
            register_estimator(taken, another)


def test_the_command_line_takes_estimators_that_are_registered(registered, tmp_path, capsys):
    given = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "False", "--advantage_estimator"]
    parser = HfArgumentParser(TrollConfig)  # type: ignore[arg-type]  # it wants a NewType
    (config,) = parser.parse_args_into_dataclasses([*given, registered])
    assert config.advantage_estimator == registered
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses([*given, "nearest"])
    assert "'furthest'" in capsys.readouterr().err


@pytest.mark.parametrize("estimator", ["best", "gae"])
def test_estimators_unknown_or_of_the_laboratory_are_refused(config, estimator):
    """Whether the laboratory is imported or not."""
    with pytest.raises(ValueError, match=f"group, [a-z_, ]*rloo.* got '{estimator}'; LabConfig .* of troll_lab.trl"):
        config(advantage_estimator=estimator)
