"""What the hooks make of a micro-batch's logits, and what becomes of their metrics."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict

from tests.tolerance import rounding
from tests.trust_region import reference
from tests.verl.actor import REPORTED, as_batch, nested, rollout, trolled
from troll import PackedPolicy, capture, trust_region_step
from troll.trust_region.policy.serialized import to_records
from troll.verl.hooks import Capture, Update
from troll.verl.old_policies import ResponseTokens, response_places
from troll.verl.reported import without_slots
from troll.verl.settings import TrollPolicyLossConfig

VOCABULARY = 99


def micro_batch(seed: int = 0) -> tuple[TensorDict, Tensor, Tensor, ResponseTokens]:
    """A batch, its labels, logits at every position, and where its response tokens are."""
    data = as_batch(rollout(6, seed=seed))
    ids = data["input_ids"].values()
    logits = 3 * torch.randn(len(ids), VOCABULARY, generator=torch.Generator().manual_seed(seed))
    tokens = ResponseTokens.of(response_places(data), len(data["responses"].values()))
    return data, torch.roll(ids, -1), logits, tokens


def hooks(settings: TrollPolicyLossConfig) -> tuple[Capture, Update]:
    """A capture, and an update around what it captures."""
    capturing = Capture(settings, entropy=True)
    return capturing, Update(settings, False, capturing.captured, lambda **_: (torch.zeros(()), {}), None, 1.0)


def read(
    hook: Capture | Update, logits: Tensor, data: TensorDict, labels: Tensor, tokens: ResponseTokens
) -> dict[str, Tensor]:
    """What a hook hands out for the response tokens of a micro-batch; an update uses the logits up."""
    hook.begin(labels, tokens)
    outputs = hook(student_logits=logits[None], data=data)
    spread = torch.ones(len(labels)).index_fill(0, tokens.rows, 0)
    assert all(values.shape == (1, len(labels)) and not (values * spread).any() for values in outputs.values())
    return {name: values[0, tokens.rows] for name, values in outputs.items()}


def stepped(
    settings: TrollPolicyLossConfig, old: Tensor, new: Tensor, data: TensorDict, labels: Tensor, tokens: ResponseTokens
) -> dict[str, Tensor]:
    """What an update hands out for the response tokens, after a capture of the old logits."""
    first, second = hooks(settings)
    read(first, old, data, labels, tokens)
    return read(second, new, data, labels, tokens)


def test_a_capture_is_the_cores_to_the_bit() -> None:
    data, labels, logits, tokens = micro_batch()
    hook, _ = hooks(TrollPolicyLossConfig(top_k=8, mass_threshold=1e-3))
    outputs = read(hook, logits, data, labels, tokens)
    sampled = data["responses"].values()
    wanted = capture(logits[tokens.rows], sampled, top_k=8, mass_threshold=1e-3)
    got = hook.captured.of(data).unpack()
    for name in ("token_ids", "log_probs", "tail_log_prob", "slot"):
        assert torch.equal(getattr(got, name), getattr(wanted, name))
    assert got.vocab_size == VOCABULARY
    log_probs = torch.log_softmax(logits, -1)[tokens.rows].gather(-1, sampled[:, None])[:, 0]
    torch.testing.assert_close(outputs["log_probs"], log_probs)
    assert outputs["log_probs"].all()


def test_an_update_hands_out_the_cores_tokens() -> None:
    data, labels, logits, tokens = micro_batch()
    settings = TrollPolicyLossConfig(kl_bound=0.1, top_k=8, mass_threshold=1e-3)
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    leaf = (logits + 0.8 * noise).requires_grad_()
    outputs = stepped(settings, logits, 1.0 * leaf, data, labels, tokens)
    weights = torch.randn(2, len(tokens.rows), generator=torch.Generator().manual_seed(2))
    pulled = outputs["trust_region_log_ratio"] * weights[0] + outputs["trust_region_regression"] * weights[1]
    (got,) = torch.autograd.grad(pulled.sum(), leaf)

    sampled = data["responses"].values()
    old = capture(logits[tokens.rows], sampled, top_k=8, mass_threshold=1e-3)
    plain = leaf.detach().clone().requires_grad_()
    step = trust_region_step(plain[tokens.rows], old, 0.1)
    pulled = step.log_ratio * weights[0] + step.regression * weights[1]
    (wanted,) = torch.autograd.grad(pulled.sum(), plain)
    assert 0.2 < step.projected.float().mean() < 1
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)
    assert torch.equal(outputs["trust_region_log_ratio"], step.log_ratio)
    raw = torch.log_softmax(plain, -1)[tokens.rows].gather(-1, sampled[:, None])[:, 0]
    torch.testing.assert_close(outputs["log_probs"], raw)


@pytest.mark.parametrize("rollout", [{"rollout_top_p": 0.8}, {"rollout_top_k": 5}])
def test_truncated_rollouts_have_the_cores_policies_and_steps(rollout: dict[str, Any]) -> None:
    data, labels, logits, tokens = micro_batch()
    settings = TrollPolicyLossConfig(kl_bound=0.1, top_k=2, **rollout)
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    capturing, updating = hooks(settings)
    scores = read(capturing, logits, data, labels, tokens)
    outputs = read(updating, logits + 0.8 * noise, data, labels, tokens)

    sampled, truncation = data["responses"].values(), settings.truncation
    old = capture(logits[tokens.rows], sampled, truncation=truncation)
    step = trust_region_step((logits + 0.8 * noise)[tokens.rows], old, 0.1)
    assert step.projected.any() and step.kept_log_mass is not None
    torch.testing.assert_close(scores["log_probs"], old.log_prob, rtol=1e-6, atol=1e-6)
    log_probs = torch.log_softmax(logits[tokens.rows].double(), -1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    torch.testing.assert_close(scores["entropy"].double(), entropy, rtol=1e-5, atol=1e-5)  # of the whole policy
    for name, value in (("log_ratio", step.log_ratio), ("kept_log_mass", step.kept_log_mass)):
        torch.testing.assert_close(outputs[f"trust_region_{name}"], value, rtol=1e-6, atol=1e-6)
    mass = step.kept_log_mass[data["response_mask"].values().bool()].exp().mean()
    assert updating.metrics()["kept_mass"] == pytest.approx(mass.item(), rel=1e-5)


@pytest.mark.parametrize("kept", [{"rollout_top_p": 0.8}, {"rollout_top_k": 5}])
def test_a_truncated_rollout_is_the_anchor_by_what_its_engine_kept(kept: dict[str, Any]) -> None:
    data, labels, logits, tokens = micro_batch()
    settings = TrollPolicyLossConfig(kl_bound=0.1, anchor="rollout", bypass_mode=True, **kept)
    sampled, lengths = data["responses"].values(), data["responses"].offsets().diff().tolist()
    old = capture(logits[tokens.rows], sampled, truncation=settings.truncation)
    # An engine does not say how much of the whole policy it kept.
    old = dataclasses.replace(old, tail_log_prob=torch.full_like(old.tail_log_prob, -torch.inf))
    data["old_policies"] = nested(to_records(PackedPolicy.of(old), lengths))
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    for new in (logits.clone(), logits + 0.8 * noise):
        step = trust_region_step(new[tokens.rows], old, 0.1)
        outputs = read(hooks(settings)[1], new.clone(), data, labels, tokens)
        assert step.kept_log_mass is not None
        for name, value in (("log_ratio", step.log_ratio), ("kept_log_mass", step.kept_log_mass)):
            torch.testing.assert_close(outputs[f"trust_region_{name}"], value, rtol=1e-6, atol=1e-6)
        assert torch.equal(new, logits) == bool((step.log_ratio.abs() < 1e-5).all())


def test_tokens_that_a_truncated_rollout_did_not_report_have_the_networks_own_kept_policy() -> None:
    data, labels, logits, tokens = micro_batch()
    settings = TrollPolicyLossConfig(anchor="rollout", bypass_mode=True, rollout_top_k=5)
    sampled, lengths = data["responses"].values(), data["responses"].offsets().diff().tolist()
    old = PackedPolicy.of(capture(logits[tokens.rows], sampled, truncation=settings.truncation))
    parts = [without_slots(lengths[0], old), old[lengths[0] :]]
    data["old_policies"] = nested(to_records(PackedPolicy.cat(parts), lengths))
    new = logits + 0.8 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    outputs = read(hooks(settings)[1], new.clone(), data, labels, tokens)
    ratios = outputs["trust_region_log_ratio"].abs()
    assert ratios[: lengths[0]].max() < 1e-5 and ratios[lengths[0] :].max() > 0.1
    own = capture(new[tokens.rows], sampled, truncation=settings.truncation)
    counts = data["response_mask"].values().bool()[: lengths[0]]
    mass = torch.log(-torch.expm1(own.tail_log_prob))[: lengths[0]][counts]
    assert counts.any()
    torch.testing.assert_close(outputs["trust_region_kept_log_mass"][: lengths[0]][counts], mass, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:tail='floor' sees divergences")
@pytest.mark.parametrize("tail", ["bucket", "floor"])
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_equal_policies_have_ratio_one(tail: str, scale: float) -> None:
    """Sampled tokens below the floor included, which the larger scale makes of most."""
    data, labels, logits, tokens = micro_batch()
    logits = scale * (logits + 3)
    settings = TrollPolicyLossConfig(kl_bound=1e-3, top_k=8, tail=tail)
    outputs = stepped(settings, logits, logits.clone(), data, labels, tokens)
    log_total, log_probs = logits[tokens.rows].logsumexp(-1), outputs["log_probs"]
    size = torch.stack([torch.ones_like(log_total), log_total.abs(), log_probs.abs()]).amax(0)
    assert (outputs["trust_region_log_ratio"].abs() <= 4 * 2**-23 * size).all()
    assert (outputs["trust_region_regression"] == 0).all()


@pytest.mark.filterwarnings("ignore:tail='floor' sees divergences")
@pytest.mark.parametrize("tail", ["bucket", "floor"])
def test_ratios_of_projected_tokens_below_the_floor_are_the_definitions(tail: str) -> None:
    data, labels, logits, tokens = micro_batch()
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    old, new = 4 * logits, 4 * logits + 6 * noise
    settings = TrollPolicyLossConfig(kl_bound=0.1, top_k=8, mass_threshold=1e-3, tail=tail)
    outputs = stepped(settings, old, new, data, labels, tokens)
    below = 0
    for number, (row, token) in enumerate(zip(tokens.rows, data["responses"].values().tolist(), strict=True)):
        captured = reference.capture(old[row].double().numpy(), token, 8, 1e-3)
        wanted = reference.step(new[row].double().numpy(), captured, 0.1, tail)
        below += wanted.projected and min(wanted.log_prob, captured.log_prob) < -30
        assert outputs["trust_region_log_ratio"][number].item() == pytest.approx(wanted.log_ratio, rel=1e-4, abs=1e-4)
        assert outputs["log_probs"][number].item() == pytest.approx(wanted.log_prob, rel=1e-6)
        assert outputs["trust_region_regression"][number].item() == pytest.approx(wanted.regression, rel=1e-4, abs=1e-6)
    assert below > 5


@pytest.mark.parametrize("tail", ["bucket", "floor"])
def test_an_inference_engines_policies_fit_a_padded_vocabulary(tail: Any) -> None:
    """Megatron pads its LM head; what is padded has no mass in an inference engine's policy."""
    samples = rollout(4)
    batch = as_batch(samples)
    generator = torch.Generator().manual_seed(0)
    sampled = batch["responses"].values()
    old_logits, new_logits = (3 * torch.randn(len(sampled), VOCABULARY, generator=generator) for _ in range(2))
    old = capture(old_logits, sampled, top_k=12, mass_threshold=1e-3)
    records = to_records(PackedPolicy.of(old), [len(sample.response) for sample in samples])
    tu.assign_non_tensor_stack(batch, "extra_fields", [{"old_policies": record} for record in records])
    settings = TrollPolicyLossConfig(kl_bound=0.02, tail=tail, anchor="rollout", bypass_mode=True)

    tokens = ResponseTokens(torch.arange(len(sampled)), torch.arange(len(sampled)), len(sampled))
    padded = torch.nn.functional.pad(new_logits, (0, 5), value=-torch.inf)
    wanted, found = (read(hooks(settings)[1], logits, batch, sampled, tokens) for logits in (new_logits, padded))
    for name, values in found.items():
        # The 99 terms of a normaliser are added up in another order.
        error = rounding(VOCABULARY, max(1.0, float(wanted[name].abs().max())))
        torch.testing.assert_close(values, wanted[name], rtol=0, atol=error)


def test_metrics_are_means_over_the_tokens_of_all_micro_batches() -> None:
    """Micro-batches of different sizes: a mean of their means would be another number."""
    settings, sums = TrollPolicyLossConfig(kl_bound=0.1, top_k=8), []
    scoring, hook = hooks(settings)
    assert not hook.observed
    for seed, keep in ((0, 1.0), (1, 0.3)):
        data, labels, logits, tokens = micro_batch(seed)
        old = logits + keep * torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
        read(scoring, old, data, labels, tokens)
        read(hook, logits, data, labels, tokens)
        sampled, mask = data["responses"].values(), data["response_mask"].values().bool()
        step = trust_region_step(logits[tokens.rows], capture(old[tokens.rows], sampled, top_k=8), 0.1)
        sums.append([step.kl_before[mask], step.projected[mask].float(), step.multiplier[mask & step.projected]])
    kl, projected, multiplier = (torch.cat(values) for values in zip(*sums, strict=True))
    assert hook.observed
    metrics = hook.metrics()
    assert metrics["kl_before_mean"] == pytest.approx(kl.mean().item(), rel=1e-5)
    assert metrics["kl_before_max"] == pytest.approx(kl.max().item(), rel=1e-6)
    assert metrics["projected_fraction"] == pytest.approx(projected.mean().item(), rel=1e-6)
    assert metrics["multiplier"] == pytest.approx(multiplier.mean().item(), rel=1e-5)


def test_verl_reports_the_metrics_of_an_update() -> None:
    """The way of v1's trainer: renamed, then a mean over the updates, or the largest where the name says so."""
    actor = trolled()
    metrics: dict[str, Any] = dict(actor.update(actor.score(as_batch(rollout()))))
    updates = {name: list(values) for name, values in metrics.items() if name.startswith("trust_region/")}
    reported = reduce_metrics(rename_dict(metrics, "actor/"))
    assert {name.removeprefix("actor/") for name in reported if "trust_region" in name} == set(updates)
    assert set(updates) == {
        f"trust_region/{name}"
        for name in (
            "kl_before_mean",
            "kl_before_max",
            "kl_after_mean",
            "kl_after_max",
            "projected_fraction",
            "multiplier",
            "regression",
            "nonfinite",
            "support_size",
            "tail_mass",
            "old_policy_bytes",
        )
    }
    for name, values in updates.items():
        assert len(values) == 4
        wanted = max(values) if name.endswith("_max") else sum(values) / 4
        assert reported[f"actor/{name}"] == pytest.approx(wanted)


def test_bytes_of_old_policies_are_those_of_the_tokens() -> None:
    actor = trolled()
    scored = actor.score(as_batch(rollout()))
    packed = actor.engine.captured.of(scored)
    metrics = actor.update(scored, mini_batch=16, micro_batch_size_per_gpu=16)
    counted = sum(int(sample.mask.sum()) for sample in rollout())
    assert metrics["trust_region/old_policy_bytes"] == [pytest.approx(packed.nbytes / counted)]


@pytest.mark.parametrize("constraint", ["token", "sequence", "batch"])
@pytest.mark.parametrize("packed", [True, False])
def test_a_sequence_of_which_no_token_counts_changes_nothing(constraint: str, packed: bool) -> None:
    """verl fills a batch up with such sequences. Its response token is there, and is captured."""
    samples = rollout(4)
    masks = [sample.mask if number else torch.zeros_like(sample.mask) for number, sample in enumerate(samples)]
    batch = as_batch(samples)
    batch["response_mask"], batch["loss_mask"] = nested(masks), nested(masks)
    gradients = []
    for advantage in (1.0, -5.0):
        changed = batch.copy()
        first, *others = batch["advantages"].unbind()
        changed["advantages"] = nested([torch.full_like(first, advantage), *others])
        actor = trolled(packed).reset(constraint=constraint)
        actor.update(actor.score(changed), epochs=3)
        gradients.append([step.gradients for step in actor.steps])
    for step, other in zip(*gradients, strict=True):
        assert all(torch.equal(step[name], other[name]) and step[name].isfinite().all() for name in step)


def test_entropy_is_verls_and_asked_for_by_the_capture() -> None:
    batch, actor = as_batch(rollout()), trolled()
    plain = actor.infer(batch, calculate_entropy=False)
    before = actor.engine.captured
    scores = actor.infer(batch, calculate_entropy=True)
    assert actor.engine.captured is not before and "entropy" not in plain
    log_probs, others = (
        torch.cat([row[len(s.prompt) - 1 : -1] for row, s in zip(td["log_probs"].unbind(), rollout(), strict=True)])
        for td in (scores, plain)
    )
    torch.testing.assert_close(log_probs, others)
    assert torch.equal(scores["entropy"].values() > 0, response_places(batch) > 0)


def test_the_reported_anchor_captures_nothing() -> None:
    actor = trolled(True, *REPORTED)
    before = actor.engine.captured
    actor.infer(as_batch(rollout()), calculate_entropy=True)
    assert actor.engine.captured is before
