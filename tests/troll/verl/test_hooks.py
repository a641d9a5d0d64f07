"""What the hooks make of a micro-batch's logits, and what becomes of their metrics."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict

from tests.tolerance import rounding
from tests.troll.verl.actor import as_batch, nested, rollout, trolled
from tests.troll.verl.records import records_of
from troll import PackedPolicy, capture, trust_region_step
from troll.verl.hooks import Capture, Update
from troll.verl.old_policies import ResponseTokens, response_places
from troll.verl.records import without_policies
from troll.verl.settings import TrollPolicyLossConfig

VOCABULARY = 99


def micro_batch() -> tuple[TensorDict, Tensor, Tensor, ResponseTokens]:
    """A batch, its labels, logits at every position, and where its response tokens are."""
    data = as_batch(rollout(6))
    ids = data["input_ids"].values()
    logits = 3 * torch.randn(len(ids), VOCABULARY, generator=torch.Generator().manual_seed(0))
    tokens = ResponseTokens.of(response_places(data), len(data["responses"].values()))
    return data, torch.roll(ids, -1), logits, tokens


def hooks(settings: TrollPolicyLossConfig) -> tuple[Capture, Update]:
    capturing = Capture(settings, entropy=True)
    return capturing, Update(settings, False, capturing.old_policies, lambda **_: (torch.zeros(()), {}), None)


def read(
    hook: Capture | Update, logits: Tensor, data: TensorDict, labels: Tensor, tokens: ResponseTokens
) -> dict[str, Tensor]:
    """What a hook hands out for the response tokens of a micro-batch; an update uses the logits up."""
    hook.begin(labels, tokens)
    outputs = hook(student_logits=logits[None], data=data)
    spread = torch.ones(len(labels)).index_fill(0, tokens.rows, 0)
    assert all(values.shape == (1, len(labels)) and not (values * spread).any() for values in outputs.values())
    return {name: values[0, tokens.rows] for name, values in outputs.items()}


def moved(logits: Tensor) -> Tensor:
    return logits + 0.8 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))


def reports(data: TensorDict, policy: PackedPolicy) -> list[Tensor]:
    """The policy's records, one of each sequence."""
    return records_of(policy, data["responses"].offsets().diff().tolist())


def test_truncated_rollouts_have_the_cores_steps() -> None:
    data, labels, logits, tokens = micro_batch()
    settings = TrollPolicyLossConfig(kl_bound=0.1, top_k=2, rollout_top_p=0.8)
    capturing, updating = hooks(settings)
    scores = read(capturing, logits, data, labels, tokens)
    outputs = read(updating, moved(logits), data, labels, tokens)

    old = capture(logits[tokens.rows], data["responses"].values(), truncation=settings.truncation)
    step = trust_region_step(moved(logits)[tokens.rows], old, 0.1)
    assert step.projected.any() and step.kept_log_mass is not None
    for name, value in (("log_ratio", step.log_ratio), ("kept_log_mass", step.kept_log_mass)):
        torch.testing.assert_close(outputs[f"trust_region_{name}"], value, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(scores["log_probs"], old.log_prob, rtol=1e-6, atol=1e-6)
    log_probs = torch.log_softmax(logits[tokens.rows].double(), -1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    torch.testing.assert_close(scores["entropy"].double(), entropy, rtol=1e-5, atol=1e-5)  # of the whole policy
    mass = step.kept_log_mass[data["response_mask"].values().bool()].exp().mean()
    assert updating.sums().values()["kept_mass"].item() == pytest.approx(mass.item(), rel=1e-5)


def test_unreported_tokens_have_the_networks_kept_policy() -> None:
    data, labels, logits, tokens = micro_batch()
    settings = TrollPolicyLossConfig(anchor="rollout", bypass_mode=True, rollout_top_k=5)
    sampled, first = data["responses"].values(), slice(len(data["responses"].unbind()[0]))
    old = PackedPolicy.of(capture(logits[tokens.rows], sampled, truncation=settings.truncation))
    data["old_policies"] = nested([without_policies(first.stop), *reports(data, old)[1:]])
    outputs = read(hooks(settings)[1], moved(logits), data, labels, tokens)
    ratios = outputs["trust_region_log_ratio"].abs()
    assert ratios[first].max() < 1e-5 and ratios[first.stop :].max() > 0.1
    own = capture(moved(logits)[tokens.rows], sampled, truncation=settings.truncation)
    counts = data["response_mask"].values().bool()[first]
    mass = torch.log(-torch.expm1(own.tail_log_prob))[first][counts]
    assert counts.any()
    torch.testing.assert_close(outputs["trust_region_kept_log_mass"][first][counts], mass, rtol=1e-5, atol=1e-5)


def test_reports_fit_a_padded_vocabulary() -> None:
    """Megatron pads its LM head; what is padded has no mass in an engine's policy. A smaller head is refused."""
    batch, generator = as_batch(rollout(4)), torch.Generator().manual_seed(0)
    sampled = batch["responses"].values()
    old_logits, new_logits = (3 * torch.randn(len(sampled), VOCABULARY, generator=generator) for _ in range(2))
    old = capture(old_logits, sampled, top_k=12, mass_threshold=1e-3)
    batch["old_policies"] = nested(reports(batch, PackedPolicy.of(old)))
    settings = TrollPolicyLossConfig(kl_bound=0.02, anchor="rollout", bypass_mode=True)

    tokens = ResponseTokens(torch.arange(len(sampled)), torch.arange(len(sampled)), len(sampled))
    padded = torch.nn.functional.pad(new_logits, (0, 5), value=-torch.inf)
    wanted, found = (read(hooks(settings)[1], logits, batch, sampled, tokens) for logits in (new_logits, padded))
    for name, values in found.items():
        # The 99 terms of a normaliser are added up in another order.
        error = rounding(VOCABULARY, max(1.0, float(wanted[name].abs().max())))
        torch.testing.assert_close(values, wanted[name], rtol=0, atol=error)
    with pytest.raises(ValueError, match=r"the old policy's 99 tokens, got 98"):
        read(hooks(settings)[1], new_logits[:, 1:].clone(), batch, sampled, tokens)


@pytest.mark.parametrize(("constraint", "packed"), [("token", True), ("sequence", False)])
def test_sequence_in_which_no_token_counts_changes_nothing(constraint: str, packed: bool) -> None:
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
        actor.update(actor.score(changed), epochs=2)
        gradients.append([step.gradients for step in actor.steps])
    for step, other in zip(*gradients, strict=True):
        assert all(torch.equal(step[name], other[name]) and step[name].isfinite().all() for name in step)


def test_verl_reports_the_metrics_of_an_update() -> None:
    """The way of v1's trainer: renamed, then a mean over the updates, or the largest where the name says so."""
    actor = trolled()
    scored = actor.score(as_batch(rollout()))
    packed = actor.engine.old_policies.of(scored)
    metrics: dict[str, Any] = dict(actor.update(scored))
    updates = {name: list(values) for name, values in metrics.items() if name.startswith("trust_region/")}
    reported = reduce_metrics(rename_dict(metrics, "actor/"))
    assert {name.removeprefix("trust_region/") for name in updates} == {
        *("kl_before_mean", "kl_before_max", "kl_after_mean", "kl_after_max", "projected_fraction", "multiplier"),
        *("regression", "nonfinite", "support_size", "tail_mass", "old_policy_bytes"),
    }
    for name, values in updates.items():
        assert len(values) == 3
        wanted = max(values) if name.endswith("_max") else sum(values) / 3
        assert reported[f"actor/{name}"] == pytest.approx(wanted)
    whole = actor.update(scored, mini_batch=12, micro_batch_size_per_gpu=12)
    counted = sum(int(sample.mask.sum()) for sample in rollout())
    assert whole["trust_region/old_policy_bytes"] == [pytest.approx(packed.nbytes / counted)]
