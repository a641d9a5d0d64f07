"""TROLL in slime: the conformance test on a stand-in for slime's calls, and what the example refuses."""

import dataclasses
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.examples import slime
from tests.tolerance import within
from troll.testing import Case, check_adapter, make_case


@pytest.fixture
def example() -> Any:
    return slime.load_example(slime.make_mpu())


@pytest.fixture
def case() -> Case:
    return dataclasses.replace(make_case("packed", torch.float32), micro_batches=((2, 0), (3, 1)))


@pytest.mark.parametrize(("per_token", "aggregation"), [(False, "sequence_mean"), (True, "token_mean")])
def test_slime_keeps_the_contract(example: Any, per_token: bool, aggregation: Any) -> None:
    check_adapter(
        lambda case: slime.adapter(case, example, calculate_per_token_loss=per_token),
        aggregation=aggregation,
        layouts=["packed"],
    )
    assert not example._captured  # each was used once


def test_slime_keeps_the_contract_at_temperature_1(example: Any) -> None:
    """Where the gradient is written over the logits."""

    def at_temperature_1(case: Case) -> Any:
        # The same logits, divided beforehand: of their gradient, the table's is 1/T.
        tables: dict[str, Any] = {"old_table": case.old_table / 0.7, "new_table": case.new_table / 0.7}
        update = slime.adapter(dataclasses.replace(case, **tables, temperature=1.0), example)
        return dataclasses.replace(update, gradient=update.gradient / 0.7)

    with mock.patch.object(example.troll, "Logits", wraps=example.troll.Logits) as source:
        check_adapter(at_temperature_1, layouts=["packed"])
    assert any(call.kwargs["donate"] for call in source.call_args_list)


def test_slime_keeps_the_contract_with_a_sliced_vocabulary(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(slime.check_in_processes, (2, str(tmp_path / "rendezvous")), nprocs=2)


def test_capture_is_of_the_pass_of_the_policy(example: Any, case: Case) -> None:
    network = slime.Network(case.old_table)
    iterator, counts = [slime.DataIterator(slime.rollout_data_of(case), case.micro_batches)], [2]
    for prefix, captured in (("ref_", 0), ("", 2), ("teacher_", 2)):
        slime.forward_only(slime.make_args(case), [network], iterator, counts, example.before_log_prob, prefix)
        assert len(example._captured) == captured
    network.role = "critic"  # type: ignore[assignment]
    example._captured.clear()
    slime.forward_only(slime.make_args(case), [network], iterator, counts, example.before_log_prob)
    assert not example._captured and not network._forward_hooks


def test_capture_is_of_the_last_stage_and_the_last_rollout(example: Any, case: Case) -> None:
    mpu = slime.make_mpu()
    mpu.is_pipeline_last_stage = lambda ignore_virtual: False
    network = slime.Network(case.old_table)
    slime.load_example(mpu).before_log_prob(slime.make_args(case), [network], "")
    assert not network._forward_hooks
    iterator = [slime.DataIterator(slime.rollout_data_of(case), case.micro_batches)]
    for _ in range(2):  # what was not used up is dropped
        slime.forward_only(slime.make_args(case), [network], iterator, [2], example.before_log_prob)
    assert len(example._captured) == 2


def weights(case: Case, low: float, high: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [low + (high - low) * torch.rand(len(x.response), generator=generator) for x in case.samples]


def approximate_kl(log_probs: Tensor, reference: Tensor, kl_loss_type: str) -> Tensor:
    assert kl_loss_type == "k2"
    return (log_probs - reference) ** 2 / 2


def test_loss_has_the_terms_of_slime(example: Any, case: Case) -> None:
    """Against the plain formula; correction weights multiply the policy term and leave the regression."""
    reference, correction = weights(case, -6, -1), weights(case, 0.2, 3)
    options: dict[str, Any] = {"use_tis": True, "tis_clip": 2.0, "tis_clip_low": 0.5, "entropy_coef": 0.3}
    options |= {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "k2"}
    ppo_utils = ModuleType("slime.utils.ppo_utils")
    ppo_utils.compute_approx_kl = approximate_kl  # type: ignore[attr-defined]
    old_log_probs = [x.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1) for x, y in logits(case, case.old_table)]
    sampled_at = [old - weight.log() for old, weight in zip(old_log_probs, correction, strict=True)]
    data = {"rollout_log_probs": sampled_at, "ref_log_probs": reference}
    with mock.patch.dict(sys.modules, {"slime.utils.ppo_utils": ppo_utils}):
        metrics, network = slime.run(case, example, data=data, **options)

    table, loss = case.new_table.clone().requires_grad_(), torch.zeros(())
    for i, (sample, (new, labels)) in enumerate(zip(case.samples, logits(case, table), strict=True)):
        old = example.troll.capture(
            logits(case, case.old_table)[i][0], labels, top_k=case.top_k, mass_threshold=case.mass_threshold
        )
        step = example.troll.trust_region_step(new, old, case.kl_bound, entropy=True)
        policy_term = -step.log_ratio.exp() * sample.advantage * correction[i].clamp(0.5, 2.0)
        kl = approximate_kl(step.log_prob, reference[i], "k2")
        per_token = policy_term + case.regression_weight * step.regression - 0.3 * step.entropy + 0.5 * kl
        loss = loss + per_token[sample.counts].mean() / len(case.samples)
    loss.backward()
    assert table.grad is not None and network.weight.grad is not None
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-5)
    worst = (network.weight.grad - table.grad).abs().max() / table.grad.abs().max()
    assert worst < within(1e-3)


def logits(case: Case, table: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Of every response token, at the temperature, and the token."""
    return [(table[x.token_ids[len(x.prompt) - 1 : -1]] / case.temperature, x.response) for x in case.samples]


def test_loss_takes_a_sample_without_tokens_that_count(example: Any, case: Case) -> None:
    silent = dataclasses.replace(case.samples[3], counts=torch.zeros(5, dtype=torch.bool))
    case = dataclasses.replace(case, samples=(*case.samples[:3], silent), micro_batches=((2, 0), (3,), (1,)))
    metrics, network = slime.run(case, example)
    assert network.weight.grad is not None and network.weight.grad.isfinite().all()
    assert 0 < metrics["troll_projected_fraction"] < 1
    own, _ = slime.run(dataclasses.replace(case, micro_batches=((2, 0, 3, 1),)), example)
    assert metrics == pytest.approx(own, rel=1e-5)


def swapped(args: Any, data_iterator: Any, *others: Any) -> dict[str, float]:
    """The update's micro-batches come in another order than those of the pass before it."""
    data_iterator[0].micro_batch_indices = data_iterator[0].micro_batch_indices[::-1]
    return train_one_step(args, data_iterator, *others)


def scored_otherwise(*positional: Any, **named: Any) -> dict[str, list[Tensor]]:
    """The same tokens, scored by another network or at another temperature."""
    return {name: [x + 0.01 for x in values] for name, values in forward_only(*positional, **named).items()}


train_one_step, forward_only = slime.train_one_step, slime.forward_only


@pytest.mark.parametrize(
    ("name", "call", "message"),
    [
        ("train_one_step", swapped, "that of other tokens: slime updates in another order than it scores"),
        ("forward_only", scored_otherwise, r"up to 0\.01 off slime's own"),
    ],
)
def test_loss_refuses_old_policies_of_another_rollout(
    example: Any, case: Case, name: str, call: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slime, name, call)
    with pytest.raises(RuntimeError, match=message):
        slime.run(case, example)


def test_loss_names_a_missing_hook(example: Any, case: Case) -> None:
    hookless = mock.Mock(before_log_prob=lambda args, model, store_prefix: None, loss_function=example.loss_function)
    with pytest.raises(RuntimeError, match="set --custom-megatron-before-log-prob-hook-path"):
        slime.run(case, hookless)


#: What the loss has no place for.
REFUSED: dict[str, Any] = {
    **dict.fromkeys(("recompute_loss_function", "use_rollout_logprobs", "use_opsm", "get_mismatch_metrics"), True),
    **{"use_unbiased_kl": True, "context_parallel_size": 2, "rollout_top_p": 0.9},
    **{"custom_tis_function_path": "mis.weights", "custom_pg_loss_reducer_function_path": "dr_grpo.reducer"},
}
OWN_LOSSES = (("advantage_estimator", name, f"{name} is a loss of its own") for name in ("gspo", "cispo"))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        *((name, value, f"TROLL in slime takes {name}=") for name, value in REFUSED.items()),
        *OWN_LOSSES,
        ("troll_kl_bond", 0.5, "no setting troll_kl_bond; it has troll_kl_bound, "),
    ],
)
def test_loss_refuses_what_it_has_no_place_for(example: Any, case: Case, option: str, value: Any, message: str) -> None:
    assert REFUSED.keys() == example.NEUTRAL.keys()
    with pytest.raises(ValueError, match=message):
        slime.run(case, example, **{option: value})


def test_settings_come_from_the_custom_configuration(example: Any) -> None:
    assert example.Settings.of(slime.make_args()) == example.Settings(0.05, 1.0, 64, 1e-5)
    changed = example.Settings.of(slime.make_args(troll_kl_bound=0.2, troll_top_k=8))
    assert changed == example.Settings(0.2, 1.0, 8, 1e-5)
