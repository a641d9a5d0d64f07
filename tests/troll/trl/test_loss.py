"""The loss and its gradient: GRPOTrainer's where the bound is out of reach, a dense float64 one where it is not."""

import copy
import itertools
import math
from typing import Any
from unittest import mock

import pytest
import torch

from tests.troll.trl import dense, tiny
from troll.trl import TrollTrainer
from troll.trl.trainer import OLD_POLICY

#: What else a user may switch on. Each is an off-policy setting.
SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reference, accumulation": {"beta": 0.1, "gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "accumulation over rollouts": {"gradient_accumulation_steps": 2, "steps_per_generation": 3},
    "biased reference": {"beta": 0.1, "use_bias_correction_kl": False},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 5.0},
    "both masks and a bonus": {"top_entropy_quantile": 0.4, "off_policy_mask_threshold": 0.05, "entropy_coef": 0.1},
    "truncated": {"mask_truncated_completions": True},
    "iterations": {"num_iterations": 2, "steps_per_generation": 1, "per_device_train_batch_size": 8},
    "padded lengths": {"pad_to_multiple_of": 8},
}

#: Every loss type and both levels, in turn.
EVERY_LOSS = [("grpo", "token"), ("bnpo", "sequence"), ("dr_grpo", "token"), ("dapo", "sequence")]
EVERY_OTHER = [("grpo", "sequence"), ("bnpo", "token"), ("dr_grpo", "sequence"), ("dapo", "token")]

CASES = [
    *(("plain", *loss) for loss in EVERY_LOSS),
    *(("reference, accumulation", *loss) for loss in EVERY_OTHER),
    *((name, *EVERY_OTHER[i % 4]) for i, name in enumerate(SCENARIOS) if i > 1),
]


def compare_with_stock(make: Any, model: str, **settings: Any) -> None:
    """Every micro-batch of a rollout: loss, gradients and metrics equal GRPOTrainer's with an infinite clip."""
    ours, theirs = make(TrollTrainer, model, **settings), make.stock(model, **settings)
    for _ in tiny.same_updates(ours, theirs, 0.1):
        metrics, stock_metrics = ours._metrics["train"], theirs._metrics["train"]
        assert {name for name in stock_metrics if not name.startswith("clip_ratio/")} == set(metrics)
        for name, values in metrics.items():
            assert values == pytest.approx(stock_metrics[name], rel=1e-5, abs=1e-6), name
    assert float(ours.monitor.tally.totals["kl_before_mean"][0]) > 0
    assert float(ours.monitor.tally.totals["projected_fraction"][0]) == 0


@pytest.mark.parametrize(("scenario", "loss_type", "level"), CASES)
def test_an_unreachable_bound_is_an_infinite_clip(make, scenario, loss_type, level):
    settings = SCENARIOS[scenario]
    compare_with_stock(make, "llama", kl_bound=1e9, loss_type=loss_type, importance_sampling_level=level, **settings)


# With a scale, a softcap, and a loss of routers.
@pytest.mark.parametrize("model", ["gemma2", "granite", "cohere", "qwen3_moe"])
def test_unreachable_bound_is_an_infinite_clip_by_architecture(make, model):
    compare_with_stock(make, model, kl_bound=math.inf, temperature=0.8, beta=0.05, router_aux_loss_coef=None)


def test_vllm_weights_apply_to_the_policy_term_alone(make):
    """What a rollout of vLLM brings along, without vLLM: its log-probabilities, and the weights made of them."""
    ours, theirs = make(kl_bound=1e9, off_policy_mask_threshold=0.1), make.stock(off_policy_mask_threshold=0.1)
    inputs = dict(tiny.rollout(ours)[0])
    noise = 0.3 * torch.randn(inputs["completion_mask"].shape, generator=torch.Generator().manual_seed(3))
    inputs["sampling_per_token_logps"] = inputs["old_per_token_logps"] + noise
    inputs["importance_sampling_ratio"] = (-noise).exp()
    tiny.move(ours.model, 0.1)
    tiny.follow(theirs, ours)
    ours.use_vllm = theirs.use_vllm = True
    tiny.assert_same_update(ours, theirs, inputs)

    # The regression term is the same with and without the weights.
    ours.kl_bound, losses = 0.02, {}
    for ours.use_vllm, ours.args.regression_weight in itertools.product((True, False), (0.0, 1.0)):
        losses[ours.use_vllm, ours.args.regression_weight] = tiny.loss_and_gradients(ours, inputs)[0]
    weighted, plain = (losses[vllm, 1.0] - losses[vllm, 0.0] for vllm in (True, False))
    assert weighted == pytest.approx(plain, rel=1e-4)
    assert plain > 1e-3


def test_off_policy_mask_sees_the_network_not_the_projection(make):
    trainer = make(kl_bound=1e-4, support_top_k=8, off_policy_mask_threshold=0.1)
    inputs = tiny.rollout(trainer)[0]
    tiny.move(trainer.model, 0.1)
    with mock.patch.object(trainer, "get_off_policy_mask", wraps=trainer.get_off_policy_mask) as mask:
        tiny.loss_and_gradients(trainer, inputs)
    mask.assert_called_once()
    arguments = mask.call_args.kwargs
    assert torch.equal(arguments["sampling_per_token_logps"], inputs["old_per_token_logps"])
    moved = (arguments["per_token_logps"] - inputs["old_per_token_logps"]).abs()
    assert moved[dense.scored_mask(inputs)].mean() > 0.05


DENSE: dict[str, Any] = {"support_top_k": 48, "mass_threshold": 0.0}


def compare_with_dense(make: Any, model: str = "llama", tools: bool = False, **settings: Any) -> None:
    """Every micro-batch of a rollout: loss, gradients and metrics equal those of `dense`."""
    moved = dense.Moved(make, model, dense.with_tools if tools else dict, **settings)
    args = moved.args
    tolerance = tiny.MEAN_ERROR / math.sqrt(2 * args.kl_bound)  # the condition of the projection
    everything: list[dense.Token] = []
    for inputs, old in moved.batches:
        rows = dense.tokens(moved.logits(inputs), old, inputs, args)
        everything += itertools.chain(*rows)
        moved.assert_loss(inputs, dense.loss(rows, inputs, args), tolerance)
    projected = [one for one in everything if one.multiplier > 0]
    assert projected, "the test moves the weights too little"
    metrics = moved.trainer.monitor.metrics()
    count = len(everything)
    expected_metrics = {
        "kl_before_mean": sum(one.kl_before for one in everything) / count,
        "kl_before_max": max(one.kl_before for one in everything),
        "kl_after_mean": sum(one.kl_after for one in everything) / count,
        "kl_after_max": max(one.kl_after for one in everything),
        "projected_fraction": len(projected) / count,
        "multiplier": sum(one.multiplier for one in projected) / len(projected),
        "regression": sum(float(one.regression) for one in everything) / count,
        "support_size": sum(one.support for one in everything) / count,
        "nonfinite": 0,
    }
    for name, value in expected_metrics.items():
        assert metrics[f"trust_region/{name}"] == pytest.approx(value, rel=1e-3), name


@pytest.mark.parametrize(
    "settings",
    [
        *({"loss_type": loss_type, "importance_sampling_level": level} for loss_type, level in EVERY_LOSS),
        {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "loss_type": "dapo"},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "loss_type": "grpo"},
        {"temperature": 0.7, "loss_type": "dr_grpo"},
        {"regression_weight": 0.0, "loss_type": "bnpo"},
        {"pull": "proximal", "regression_weight": 0.5},
        {"mask_truncated_completions": True, "loss_type": "bnpo"},
        {"tools": True, "loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"model": "gemma2", "temperature": 1.3, "loss_type": "dapo"},
        {"support_top_k": 6, "mass_threshold": 1e-3, "loss_type": "grpo"},
        {"support_top_k": 1, "mass_threshold": 1e-5, "loss_type": "grpo"},
    ],
    ids=str,
)
def test_a_reachable_bound_agrees_with_a_dense_computation(make, settings):
    compare_with_dense(make, **{"kl_bound": 0.02, **DENSE, **settings})


def test_the_regression_term_is_not_masked_as_the_policy_term(make):
    """It is about the network, like the KL to the reference: neither of TRL's two masks applies."""
    plain = {"kl_bound": 0.01, "loss_type": "grpo", **DENSE}
    masked = {**plain, "top_entropy_quantile": 0.3, "off_policy_mask_threshold": 0.01}

    def regression(settings: dict[str, Any]) -> float:
        losses = []
        for weight in (0.0, 1.0):
            trainer = make(regression_weight=weight, **settings)
            inputs = tiny.rollout(trainer)[0]
            tiny.move(trainer.model, 0.1)
            losses.append(tiny.loss_and_gradients(trainer, inputs)[0])
        return losses[1] - losses[0]

    expected = regression(plain)
    assert regression(masked) == pytest.approx(expected, rel=1e-4)
    assert expected > 1e-3


@pytest.mark.parametrize(
    ("loss_type", "level", "bias_correction"),
    [*((*loss, True) for loss in EVERY_LOSS), ("dapo", "sequence", False)],
)
def test_the_reference_term_does_not_see_the_projection(make, loss_type, level, bias_correction):
    """β times k3, weighted with p̃/p and not with q/p: next to the projected policy term, none of it is projected."""
    beta = 0.3
    settings = {"loss_type": loss_type, "importance_sampling_level": level, "use_bias_correction_kl": bias_correction}
    trainer, without = (make(beta=each, kl_bound=0.02, **settings, **DENSE) for each in (beta, 0.0))
    inputs = tiny.rollout(trainer)[0]
    # The reference differs from the old policy, too.
    inputs["ref_per_token_logps"] = inputs["ref_per_token_logps"] - 0.3 * inputs["completion_mask"]
    with torch.no_grad():
        old = dense.completion_log_probs(make.model(), inputs)
    tiny.move(trainer.model, 0.1)
    tiny.follow(without, trainer)
    model = make.model()
    model.load_state_dict(trainer.model.state_dict())

    loss, gradients = tiny.loss_and_gradients(trainer, inputs)
    base_loss, base_gradients = tiny.loss_and_gradients(without, inputs)
    assert float(without.monitor.tally.totals["projected_fraction"][0]) > 0
    new, mask = dense.completion_log_probs(model, inputs), dense.scored_mask(inputs)
    gap = inputs["ref_per_token_logps"] - new
    k3 = gap.exp() - gap - 1
    log_ratio = torch.where(mask, new - old, 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    weighted = k3 * log_ratio.exp() if bias_correction else k3
    rows = [list(row[kept]) for row, kept in zip(beta * weighted, mask, strict=True)]
    expected = dense.aggregate(rows, inputs, trainer.args)
    expected.backward()

    assert loss - base_loss == pytest.approx(expected.item(), rel=1e-5)
    difference = {name: gradients[name] - base_gradients[name] for name in gradients}
    tiny.assert_same_gradients(difference, tiny.gradients(model), 2e-5)


def test_the_loss_leaves_its_inputs_alone(make):
    trainer = make(kl_bound=0.01, beta=0.1, support_top_k=8)
    inputs = tiny.rollout(trainer)[0]
    before = copy.deepcopy(inputs)
    tiny.move(trainer.model, 0.1)
    first = tiny.loss_and_gradients(trainer, inputs)
    second = tiny.loss_and_gradients(trainer, inputs)
    policies, old_policies = inputs.pop(OLD_POLICY), before.pop(OLD_POLICY)
    assert tiny.same_policies(policies, old_policies) == [True] * len(old_policies)
    torch.testing.assert_close(inputs, before, rtol=0, atol=0)
    tensors = [*inputs.values(), *(value for policy in policies for value in vars(policy).values())]
    assert not any(torch.is_tensor(value) and value.requires_grad for value in tensors)
    assert first[0] == second[0]
    tiny.assert_same_gradients(second[1], first[1], 0)


def test_a_rollout_starts_at_ratio_one(make, monkeypatch):
    """Up to rounding, although much of the mass is outside the support."""
    trainer = make(support_top_k=2, kl_bound=1e-4, loss_type="grpo")
    inputs = tiny.rollout(trainer)[0]
    steps: list[Any] = []
    monkeypatch.setattr(trainer.monitor, "observe", lambda step, *_: steps.append(step))
    loss, _ = tiny.loss_and_gradients(trainer, inputs)  # the weights have not moved
    mask = dense.scored_mask(inputs)
    with torch.no_grad():
        total = dense.completion_logits(trainer.model, inputs, 1.0).logsumexp(-1)[mask]
    size = torch.stack([total, inputs["old_per_token_logps"][mask].double()]).abs().amax(0).clamp(min=1)
    (step,) = steps
    assert float((step.log_ratio.abs() / size).max()) <= 4 * 2**-23
    assert not step.projected.any()
    assert loss == pytest.approx(-inputs["advantages"].mean().item(), rel=1e-5, abs=1e-6)
