"""Policies of truncated sampling: kept sets, and everything that is computed on them."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation import logits_process

import troll
from tests.tolerance import within
from tests.troll.trust_region import reference
from tests.troll.trust_region.policy.policies import assert_identical
from troll import PackedPolicy, SparsePolicy, Truncation
from troll.trust_region.metrics import step_tally
from troll.trust_region.reading.capture import captured as capture_result

SIZE = 40


def random_logits(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(*shape, SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sampled_from(logits: torch.Tensor, truncation: Truncation, seed: int = 0) -> torch.Tensor:
    """Tokens of the kept sets, any of them with the same chance."""
    generator = np.random.default_rng(seed)
    rows = logits.reshape(-1, SIZE).numpy()
    drawn = [generator.choice(reference.kept_set(row, **dataclasses.asdict(truncation))) for row in rows]
    return torch.tensor(np.array(drawn)).view(logits.shape[:-1])


def captured(logits: torch.Tensor, truncation: Truncation, **more: Any) -> SparsePolicy:
    return troll.capture(logits, sampled_from(logits, truncation), top_k=SIZE, truncation=truncation, **more)


def kept_and_added(
    logits: torch.Tensor, token: torch.Tensor, slots: int, truncation: Truncation
) -> tuple[SparsePolicy, torch.Tensor]:
    found = capture_result(troll.Logits(logits), token, top_k=slots, mass_threshold=0.0, truncation=truncation)
    assert found.added is not None
    return found.policy, found.added


#: Scores of up to 24 tokens: few different ones make ties, more make none.
SCORES = st.lists(st.integers(-6, 6), min_size=2, max_size=24) | st.lists(
    st.integers(-128, 128), min_size=2, max_size=12, unique=True
)
SETTINGS: tuple[Any, ...] = (st.integers(0, 12), st.floats(0.05, 1), st.floats(0, 1), st.booleans())
TIES = ("all", "exact")


def settled(scores: list[int], *settings: Any, ties: str = "all") -> list[int]:
    """The reference's kept set of scores in quarters; the example is thrown away if rounding decides."""
    top_k, top_p, min_p, min_p_first = settings
    logits = np.array(scores) / 4
    sets = [
        reference.kept_set(logits, top_k, min(1.0, top_p + shift), min(1.0, max(0.0, min_p + shift)), min_p_first, ties)
        for shift in (-1e-9, 0.0, 1e-9)
    ]
    assume(sets[0] == sets[1] == sets[2])
    return sets[1]


def warped(logits: torch.Tensor, top_k: int, top_p: float, min_p: float, min_p_first: bool) -> torch.Tensor:
    """The scores of transformers' own processors; min-p first is vLLM's order."""
    scores = logits
    for wanted, warper, value in (
        (min_p_first and min_p > 0, MinPLogitsWarper, min_p),
        (top_k > 0, TopKLogitsWarper, top_k),
        (top_p < 1, TopPLogitsWarper, top_p),
        (min_p > 0, MinPLogitsWarper, min_p),
    ):
        scores = warper(value)(None, scores) if wanted else scores  # type: ignore[arg-type]
    return scores


@pytest.fixture
def stable_sort(monkeypatch):
    """torch's sort on a GPU, of a whole vocabulary. That on a CPU puts ties in any order."""
    monkeypatch.setattr(logits_process.torch, "sort", functools.partial(torch.sort, stable=True))


@settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SCORES, *SETTINGS)
def test_truncation_keeps_what_transformers_keeps(stable_sort, scores, top_k, top_p, min_p, min_p_first):
    expected = settled(scores, top_k, top_p, min_p, min_p_first)
    logits = torch.tensor([scores], dtype=torch.float64) / 4
    processed = warped(logits, top_k, top_p, min_p, min_p_first)
    policy = troll.capture(logits, logits.argmax(-1), top_k=len(scores), mass_threshold=0)
    kept = policy.token_ids[Truncation(top_k, top_p, min_p, min_p_first).kept(policy)].tolist()
    assert kept == expected
    assert sorted(kept) == (processed[0] > -torch.inf).nonzero().flatten().tolist()


@settings(deadline=None, derandomize=True)
@given(SCORES, *SETTINGS, st.integers(0, 2**31), st.integers(1, 24))
def test_captured_log_prob_is_that_of_transformers(scores, top_k, top_p, min_p, min_p_first, seed, slots):
    """Whichever tokens of a tie an unstable sort keeps, and wherever the slots of the capture end."""
    settled(scores, top_k, top_p, min_p, min_p_first)
    logits = torch.tensor([scores], dtype=torch.float64) / 4
    processed = warped(logits, top_k, top_p, min_p, min_p_first).log_softmax(-1)
    token = torch.multinomial(processed.exp(), 1, generator=torch.Generator().manual_seed(seed)).squeeze(-1)
    truncation = Truncation(top_k, top_p, min_p, min_p_first)
    policy, added = kept_and_added(logits, token, slots, truncation)
    assert not added.any()
    own = processed[0][processed[0] > -torch.inf].sort(descending=True).values
    torch.testing.assert_close(policy.log_prob, processed[0, token], rtol=0, atol=1e-12)
    torch.testing.assert_close(policy.log_probs[0, policy.used[0]], own, rtol=0, atol=1e-12)


@settings(deadline=None, derandomize=True)
@given(SCORES, *SETTINGS, st.sampled_from(TIES), st.data(), st.integers(1, 24))
def test_capture_keeps_any_sampled_token_of_tie(scores, top_k, top_p, min_p, min_p_first, ties, data, slots):
    expected = settled(scores, top_k, top_p, min_p, min_p_first, ties=ties)
    edge = min(scores[token] for token in expected)
    token = data.draw(st.sampled_from([token for token, score in enumerate(scores) if score >= edge]))
    logits = torch.tensor([scores], dtype=torch.float64) / 4
    truncation = Truncation(top_k, top_p, min_p, min_p_first, ties)
    policy, added = kept_and_added(logits, torch.tensor([token]), slots, truncation)
    found = policy.token_ids[0, policy.used[0]].tolist()
    assert not added.any() and found[int(policy.slot)] == token
    assert [scores[each] for each in found] == [scores[each] for each in expected]
    if token in expected:
        assert found == expected
    else:  # it takes the place of one that is as likely
        assert len(set(found) - set(expected)) == 1


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [
        (Truncation(top_p=0.5), [0, 4]),
        (Truncation(top_p=0.5, ties="exact"), [0, 1]),
        (Truncation(top_k=2), [0, 1, 2, 3, 4]),
        (Truncation(top_k=2, ties="exact"), [0, 1]),
        (Truncation(top_k=3, top_p=0.6, ties="exact"), [0, 1]),
        (Truncation(min_p=0.3), [0, 1, 2, 3, 4]),
    ],
    ids=str,
)
@pytest.mark.parametrize("slots", [1, 3, 6])
def test_capture_cuts_tie_as_sampler_does(truncation, kept, slots):
    logits = torch.tensor([[0.397, 0.146, 0.146, 0.146, 0.146, 0.02]]).log()
    found = troll.capture(logits, torch.tensor([0]), top_k=slots, truncation=truncation)
    assert found.token_ids[found.used].tolist() == kept
    for token in range(1, 5):
        mass = 0.397 + (len(kept) - 1) * 0.146
        found, added = kept_and_added(logits, torch.tensor([token]), slots, truncation)
        assert int(found.used.sum()) == len(kept) and not added.any()
        assert float(found.log_prob.exp()) == pytest.approx(0.146 / mass, rel=1e-6)


@pytest.mark.parametrize("slots", [1, 8, 41])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 0.31, 0.0), (2, 0.31, 0.0), (2, 0.31, 0.05), (2, 0.9, 0.09), (9, 0.31, 0.0)]
)
def test_capture_cuts_tie_of_many_tokens_by_top_p(top_k, top_p, min_p, slots):
    """Top-k keeps the whole tie, and top-p few of it: what a capture holds of the tie may be more than top-p keeps."""
    logits = torch.tensor([[0.2, *[0.02] * 40]]).log()
    processed = warped(logits, top_k, top_p, min_p, min_p_first=False).log_softmax(-1)[0]
    kept = processed > -torch.inf
    for token in (0, 40):
        policy = troll.capture(logits, torch.tensor([token]), top_k=slots, truncation=Truncation(top_k, top_p, min_p))
        assert int(policy.used.sum()) == int(kept.sum()) > 1
        own = processed[0] if token == 0 else processed[kept][-1]
        torch.testing.assert_close(policy.log_prob[0], own, rtol=0, atol=within(1e-6))


def test_capture_adds_sampled_token_to_kept_set():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -9.0]], dtype=torch.float64)
    old = troll.capture(logits, torch.tensor([3]), top_k=5, truncation=Truncation(top_k=2))
    assert old.token_ids.tolist() == [[0, 1, 3]] and old.slot.tolist() == [2]
    torch.testing.assert_close(old.log_probs[0, :3], logits[0, [0, 1, 3]].log_softmax(-1))


def test_capture_truncates_single_position():
    logits = random_logits()
    old = captured(logits, Truncation(top_k=5))
    assert old.shape == () and old.token_ids.tolist() == logits.topk(5).indices.tolist()


@pytest.mark.parametrize("stacks", [False, True])
def test_joining_pads_truncated_policies(stacks):
    wide, narrow = (captured(random_logits(2, 3), Truncation(top_k=k)).to(torch.float32) for k in (7, 2))
    parts = PackedPolicy.of(narrow), PackedPolicy.of(wide)
    entries = [entry for part in parts for entry in part.unbind()]
    joined = (PackedPolicy.stack(entries) if stacks else PackedPolicy.cat(parts)).unpack()
    assert joined.top_k == 7
    assert_identical(joined[2:], wide)
    assert torch.equal(joined.token_ids[:2, :, :2], narrow.token_ids) and bool(
        (joined.token_ids[:2, :, 2:] == -1).all()
    )
    assert torch.equal(joined.log_probs[:2, :, :2], narrow.log_probs)
    assert torch.equal(joined.log_prob[:2], narrow.log_prob)


def test_capture_refuses_policy_read_at_too_few_tokens():
    logits, tokens = random_logits(4), torch.zeros(4, dtype=torch.long)
    few = troll.log_probs_at(logits, torch.arange(6).expand(4, 6))
    with pytest.raises(ValueError, match="source must hold all tokens that the sampler keeps, and was read at fewer"):
        troll.capture(few, tokens, truncation=Truncation(top_p=0.9))


def test_kept_set_of_broken_row_is_first_token():
    policy = troll.capture(torch.full((1, 3), torch.nan), torch.tensor([0]), top_k=3, mass_threshold=0)
    assert Truncation(top_p=0.8).kept(policy).tolist() == [[True, False, False]]


@pytest.mark.parametrize(
    ("kernels", "broken", "cut_is_known"),
    [
        ("torch", torch.nan, True),
        ("torch", torch.inf, False),
        ("triton", torch.nan, False),
        ("triton", torch.inf, True),
    ],
)
def test_step_of_row_broken_outside_kept_set_is_nan(monkeypatch, kernels, broken, cut_is_known):
    old = captured(random_logits(3).float(), Truncation(top_k=5))
    if not cut_is_known:
        old = dataclasses.replace(old, tail_log_prob=torch.full_like(old.tail_log_prob, -torch.inf))
    logits = random_logits(3, seed=1).float()
    outside = next(token for token in range(SIZE) if token not in old.token_ids[1].tolist())
    logits[1, outside] = broken
    logits.requires_grad_()
    monkeypatch.setenv("TROLL_KERNELS", kernels)
    step = troll.trust_region_step(troll.Logits(logits), old, entropy=True)
    for name, values in vars(step).items():
        assert name in ("projected", "scored") or values.isnan().tolist() == [False, True, False], name
    assert step_tally(step, torch.ones(3)).values()["nonfinite"] == 1
    (step.log_ratio + step.regression)[[0, 2]].sum().backward()
    assert logits.grad is not None and bool((logits.grad[1] == 0).all())


def test_capture_top_takes_kept_set():
    logits, truncation = random_logits(6), Truncation(top_p=0.8)
    expected = captured(logits, truncation)
    ids, entries = expected.token_ids, expected.log_probs
    tokens = expected.token_ids.gather(-1, expected.slot[:, None]).squeeze(-1)
    found = troll.capture_top(ids, entries, tokens, expected.log_prob, SIZE, top_k=SIZE, truncated=True)
    assert found.truncated
    found = dataclasses.replace(
        found, token_ids=found.token_ids[:, : expected.top_k], log_probs=found.log_probs[:, : expected.top_k]
    )
    for name in ("token_ids", "log_probs", "slot"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=1e-12)
    # It does not say how much the sampler cut, so the pull has no part of it.
    assert bool((found.tail_log_prob == -torch.inf).all())
    new = troll.log_probs_at(random_logits(6, seed=1), found.token_ids)
    on_kept = dataclasses.replace(found, truncated=False)
    assert torch.equal(
        troll.trust_region_step(new, found).regression, troll.trust_region_step(new.without_tail(), on_kept).regression
    )
    with pytest.raises(ValueError, match=r"all that the sampler could draw, at most top_k=40 tokens"):
        troll.capture_top(ids[:, :1], entries[:, :1], tokens, expected.log_prob - 9, SIZE, top_k=SIZE, truncated=True)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("top_k", -1), ("top_k", 1.5), ("top_k", True), ("top_p", 0.0), ("top_p", 1.1), ("min_p", -0.1), ("min_p", 2)],
)
def test_truncation_refuses_settings_out_of_range(setting, value):
    with pytest.raises(ValueError, match=rf"{setting} must be .*, got {value}"):
        Truncation(**{setting: value})
    Truncation(top_p=1.0, min_p=1.0)
    with pytest.raises(ValueError, match="ties must be one of all, exact, got 'some'"):
        Truncation(ties="some")  # type: ignore[arg-type]


def test_project_ignores_tokens_outside_kept_set() -> None:
    logits = torch.randn(7, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    moved = logits + torch.randn(7, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    old = troll.capture(logits, torch.zeros(7, dtype=torch.int64), truncation=Truncation(top_p=0.7))
    same = troll.project(troll.log_probs_at(logits, old.token_ids), old)
    assert same.kl_before.abs().max() < 1e-12 and not same.projected.any()
    found = troll.project(troll.log_probs_at(moved, old.token_ids), old)
    step = troll.trust_region_step(moved, old)
    assert found.projected.any()
    for name in ("kl_before", "kl_after", "multiplier"):
        torch.testing.assert_close(getattr(found, name), getattr(step, name), rtol=1e-9, atol=1e-12)
