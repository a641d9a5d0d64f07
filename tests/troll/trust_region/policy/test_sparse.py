"""SparsePolicy and the other public types as values: parts, moves, files, comparison."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import troll
from tests.troll.trust_region.policy.policies import (
    FIELDS,
    assert_identical,
    by_pickle,
    by_torch,
    random_policy,
)
from troll import PackedPolicy


def test_to_moves_sparse_policy():
    policy = random_policy()
    double = policy.to(torch.float64)
    assert double.log_probs.dtype == double.tail_log_prob.dtype == torch.float64
    assert double.token_ids.dtype == double.slot.dtype == torch.int64
    assert double.vocab_size == policy.vocab_size and double.mass_threshold == policy.mass_threshold
    assert double.temperature == policy.temperature == 1.0
    assert_identical(double.to(torch.float32), policy)
    assert_identical(policy.to("cpu"), policy)
    assert_identical(policy.to(torch.device("cpu")), policy)


def test_to_moves_all_tensors():
    moved = random_policy().to("meta")
    assert {getattr(moved, name).device.type for name in FIELDS} == {"meta"}


@pytest.mark.parametrize("shape", [(12,), (2, 6), (1, 3, 4), (-1,), (-1, 2), (3, 4)])
def test_view_keeps_slots(shape):
    policy = random_policy((3, 4))
    viewed = policy.view(shape)
    assert viewed.shape == policy.tail_log_prob.view(shape).shape
    assert viewed.token_ids.shape == viewed.log_probs.shape == (*viewed.shape, 8)
    assert viewed.slot.shape == viewed.shape
    assert torch.equal(viewed.log_prob.flatten(), policy.log_prob.flatten())
    assert viewed.temperature == policy.temperature
    assert_identical(viewed.view((3, 4)), policy)


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        slice(1, 3),
        (slice(None), slice(1, 4)),
        (1, 2),
        (slice(None), 0),
        (..., slice(1, 3)),  # the last batch dimension, never the slots
        torch.tensor([2, 0, 0]),
        torch.tensor([[True, False, True, True]] * 3),
        torch.zeros(3, 4, dtype=torch.bool),
    ],
    ids=str,
)
def test_index_is_along_the_batch(index):
    policy = random_policy((3, 4))
    part = policy[index]
    rows = torch.arange(12).view(3, 4)[index]
    assert part.shape == rows.shape
    assert_identical(part[None][0], part)
    for name in FIELDS:
        tensor = getattr(policy, name)
        assert torch.equal(getattr(part, name), tensor.view(12, *tensor.shape[2:])[rows]), name
    for name in ("vocab_size", "mass_threshold", "temperature"):
        assert getattr(part, name) == getattr(policy, name), name
    assert torch.equal(part.log_prob, policy.log_prob[index])


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_sparse_policy_of_no_positions(shape):
    policy = random_policy(shape)
    assert policy.shape == policy.slot.shape == policy.log_prob.shape == shape
    assert policy.token_ids.shape == policy.used.shape == (*shape, 8)
    assert policy.outcomes.shape == (*shape, 9)
    assert policy.view((0,)).shape == (0,)
    assert_identical(policy.view((0,)).view(shape), policy)
    assert_identical(policy[...], policy)


def test_check_positions_refuses_others():
    random_policy((3, 4)).check_positions((3, 4))
    for shape in ((3, 5), (12,), (4, 3), ()):
        with pytest.raises(ValueError, match=r"old must hold the positions \(.*\), got \(3, 4\)"):
            random_policy((3, 4)).check_positions(shape)


def public_values() -> dict[str, Any]:
    """One of each public type, with gradients where a training has them."""
    generator = torch.Generator().manual_seed(3)
    old_logits = torch.randn(2, 3, 20, generator=generator)
    logits = (old_logits + torch.randn(2, 3, 20, generator=generator)).requires_grad_()
    hidden, weight = torch.randn(2, 3, 5, generator=generator), torch.randn(20, 5, generator=generator)
    tokens = torch.tensor([[0, 5, 19], [3, 3, 3]])
    old = troll.capture(troll.Logits(old_logits), tokens, top_k=4, mass_threshold=1e-2)
    step = troll.trust_region_step(logits, old, entropy=True)
    assert step.projected.any() and step.log_ratio.requires_grad
    return {
        "Constraint": troll.Constraint.sequence(torch.ones(2, 3)),
        "LMHead": troll.LMHead(hidden, weight, torch.zeros(20), temperature=0.7, softcap=30.0),
        "Logits": troll.Logits(logits, temperature=0.7),
        "PolicyOnSupport": troll.log_probs_at(logits, old.token_ids),
        "PackedPolicy": PackedPolicy.of(old),
        "Projection": troll.project(logits, old_logits),
        "SparsePolicy": old,
        "Tally": troll.diagnostics.tail_report(troll.diagnostics.tail_gap(logits, old_logits, old), torch.ones(2, 3)),
        "TrustRegionStep": step,
    }


VALUES = public_values()

#: What holds numbers only.
PLAIN = [troll.Truncation(top_k=20, top_p=0.9)]


def test_values_hold_every_public_type():
    modules = (troll, troll.diagnostics)
    names = {name: getattr(module, name) for module in modules for name in module.__all__}
    public = {name: value for name, value in names.items() if inspect.isclass(value)}
    assert VALUES.keys() == public.keys() - {"Truncation", "KLTarget"}  # the latter has a state for JSON instead
    assert all(isinstance(value, public[name]) for name, value in VALUES.items())


@pytest.mark.parametrize("through", [by_torch, by_pickle])
@pytest.mark.parametrize("value", [*VALUES.values(), *PLAIN], ids=lambda value: type(value).__name__)
def test_files_keep_public_types(value: Any, through: Callable[[Any], Any]):
    back = through(value)
    assert type(back) is type(value)
    assert vars(back).keys() == vars(value).keys()
    for field, expected in vars(value).items():
        assert_exact(getattr(back, field), expected, field)


def assert_exact(found: Any, expected: Any, field: str):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), field
        for name, part in expected.items():
            assert_exact(found[name], part, name)
    elif isinstance(expected, Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape, field
        assert torch.equal(found.detach().nan_to_num(7.0), expected.detach().nan_to_num(7.0)), field
    else:
        assert found == expected, field


@pytest.mark.parametrize("name", VALUES)
def test_comparison_is_by_identity(name):
    """Of tensors it would raise, or give a tensor."""
    value = VALUES[name]
    twin = dataclasses.replace(value)
    assert (value == value) is True
    assert (value == twin) is False and (value != twin) is True
    assert (value == None) is False  # noqa: E711
    assert value in [twin, value] and len({value, twin}) == 2


@pytest.mark.parametrize("name", VALUES)
def test_public_types_are_frozen(name):
    value = VALUES[name]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, next(iter(vars(value))), None)
