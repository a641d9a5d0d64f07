"""trust_region_step beyond single cases: any policies, two paths of one product, shapes, errors.

That every path gives the reference's numbers is tested in test_matrix.py.
"""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import troll
from tests.tolerance import within
from tests.troll.trust_region import reference
from tests.troll.trust_region.cases import LOGIT, TOKEN_FIELDS, pairs, tensor
from tests.troll.trust_region.matrix_cases import Case
from tests.troll.trust_region.matrix_paths import PATHS, apart, run
from tests.troll.trust_region.reading.sources import KINDS, Problem
from tests.troll.trust_region.test_matrix import assert_is_reference
from troll import LMHead, Logits
from troll.trust_region.reading.source import LogitsSource
from troll.trust_region.step import PULLS

pytestmark = pytest.mark.usefixtures("small_tiles")


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.tuples(LOGIT, LOGIT), min_size=1, max_size=9),
    top_k=st.integers(1, 10),
    threshold=st.sampled_from([0.0, 1e-5, 1e-2, 0.5]),
    kl_bound=st.sampled_from([1e-3, 0.05, 0.5, math.inf]),
    pull=st.sampled_from(PULLS),
    equal=st.booleans(),
    data=st.data(),
)
def test_step_of_any_policies_is_the_reference(rows, top_k, threshold, kl_bound, pull, equal, data):
    old, new = np.array(rows).T.reshape(2, 1, -1)
    new = old if equal else new
    assume(reference.is_finite_row(old[0]) and reference.is_finite_row(new[0]))
    token = data.draw(st.integers(0, len(rows) - 1))
    case = Case(old, new, np.array([token]), np.array([kl_bound]), top_k, threshold, pull)
    kl_before = reference.step(new[0], reference.capture(old[0], token, top_k, threshold), kl_bound).kl_before
    assume(abs(kl_before - kl_bound) > 1e-6 * (1 + kl_before))
    assert_is_reference(PATHS["logits"], case, run(PATHS["logits"], case))


def ways_to_one_product(dtype: torch.dtype) -> tuple[dict[str, LogitsSource], Tensor, Tensor]:
    """Sources of the same logits, which differ by the product's rounding; sampled tokens; Σ |h_i| |w_i|, (N, V)."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(24, 64, generator=generator).to(dtype)
    weight = (torch.randn(300, 64, generator=generator) / 3).to(dtype)
    logits = hidden @ weight.t()
    wide, rows = apart(hidden)
    paths: dict[str, LogitsSource] = {
        "logits": Logits(logits),
        "head": LMHead(hidden, weight),
        "rows of a head": LMHead(wide, weight, rows=rows),
    }
    if dtype == torch.float32:
        # The same sums in reverse order.
        paths["head, reversed"] = LMHead(hidden.flip(-1), weight.flip(-1))
        paths["logits, in float64 first"] = Logits((hidden.double() @ weight.double().t()).float())
    tokens = torch.where(torch.arange(24) % 2 == 0, logits.double().argmax(-1), logits.double().argmin(-1))
    return paths, tokens, hidden.abs().double() @ weight.abs().double().t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_step_on_another_path_differs_by_product_rounding(dtype):
    """The ratio is 1 up to what the two products may differ by, of o's logit and of any other in the total."""
    paths, token_ids, size = ways_to_one_product(dtype)
    # A float32 sum of H products is off by at most H · 2⁻²⁴ · |h| |w|, on either path.
    error = 2 * 64 * 2.0**-24 * size
    if dtype != torch.float32:
        # A logit in half precision is rounded once more, by at most a unit in the last place.
        exact = paths["head"].tensors[0].double() @ paths["head"].tensors[1].double().t()  # type: ignore[union-attr]
        error = error + exact.abs() * torch.finfo(dtype).eps
    limit = error.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1) + error.amax(-1) + 8 * 2.0**-23 * 40
    largest = 0.0
    for before in paths.values():
        old = troll.capture(before, token_ids, top_k=16)
        for now in paths.values():
            step = troll.trust_region_step(now, old)
            assert (step.log_ratio.abs() <= within(1) * limit).all()
            assert not step.projected.any()
            largest = max(largest, (step.log_ratio.abs() / limit).max().item())
    assert largest > 0.001, "the paths do differ"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0,), (2, 0)])
def test_capture_and_step_have_shape_of_positions(kind, shape):
    problem = Problem(kind, shape=shape, size=11)
    old = troll.capture(problem.source(), problem.token_ids, top_k=4)
    assert old.shape == old.slot.shape == old.log_prob.shape == shape
    assert old.token_ids.shape == old.log_probs.shape == (*shape, 4)
    step = troll.trust_region_step(problem.source(), old, entropy=True)
    for name in (*TOKEN_FIELDS, "entropy"):
        assert getattr(step, name).shape == shape, name
    for gradient, leaf in zip(problem.gradients(step.log_ratio.sum()), problem.leaves, strict=True):
        assert gradient.shape == leaf.shape


def test_step_sends_nothing_back_from_a_policy_that_excludes_the_kept_set():
    logits = torch.randn(1, 2, 20, generator=torch.Generator().manual_seed(0))
    old = troll.capture(logits, logits.argmax(-1), truncation=troll.Truncation(top_k=3))
    new = logits.clone()
    new[0, 1, old.token_ids[0, 1]] = -torch.inf
    step = troll.trust_region_step(new.requires_grad_(), old)
    assert step.log_ratio.isnan().tolist() == [[False, True]]
    troll.troll_loss(step, torch.ones(1), torch.tensor([[1, 0]]))[0].backward()
    assert new.grad is not None and new.grad.isfinite().all()


def test_step_numbers_carry_no_gradient():
    old_logits, new_logits = (tensor(x) for x in pairs("flat", 4, 9))
    old = troll.capture(old_logits, torch.arange(4), top_k=4)
    step = troll.trust_region_step(new_logits.requires_grad_(), old, entropy=True)
    differentiable = {name for name, value in vars(step).items() if value is not None and value.requires_grad}
    assert differentiable == {"log_ratio", "log_prob", "regression", "entropy"}


IDS = torch.tensor([[0, 1, 2], [0, 1, 2]])


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("kl_bound must be above 0, got 0.0", {"kl_bound": 0.0}),
        ("kl_bound must .* (2), got (3)", {"kl_bound": torch.full((3,), 0.1)}),
        ("pull must be one of projection, proximal, got 'old'", {"pull": "old"}),
        ("source must .* 8 tokens, got 7", {"source": torch.zeros(2, 7)}),
        ("old must .* positions (3), got (2)", {"source": torch.zeros(3, 8)}),
        ("old must .* positions (), got (2)", {"source": torch.zeros(8)}),
        ("old must .* positions (1, 2), got (2)", {"source": torch.zeros(1, 2, 8)}),
        ("new must .* 3 slots, got 2", {"read_at": IDS[:, :2]}),
        ("new must .* 3 slots, got 4", {"read_at": torch.cat([IDS, IDS[:, :1] + 5], -1)}),
        ("two policies must .* log_probs_at(_, old.token_ids)", {"read_at": IDS.flip(1)}),
    ],
)
def test_step_refuses_arguments_that_do_not_fit(message, change):
    old = troll.capture(torch.zeros(2, 8), torch.tensor([0, 1]), top_k=3, mass_threshold=0.0)
    assert old.token_ids.tolist() == [[0, 1, 2]] * 2
    arguments: dict[str, Any] = {"source": torch.zeros(2, 8), "old": old} | change
    if "read_at" in arguments:
        arguments["source"] = troll.log_probs_at(torch.zeros(2, 8), arguments.pop("read_at"))
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\ \.\*\ ", " .* ")):
        troll.trust_region_step(**arguments)
