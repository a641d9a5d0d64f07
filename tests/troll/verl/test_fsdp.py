"""TROLL on verl's FSDP2 engine: capture and update equal the core's on the same sequences, however they are packed."""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM
from verl.utils import tensordict_utils as tu

from tests.tolerance import within
from tests.troll.verl import reference, worker
from tests.troll.verl.actor import (
    SMALL,
    as_batch,
    captured,
    model_folder,
    nested,
    policy_loss,
    rollout,
    single,
    trolled,
    with_scores,
)
from tests.troll.verl.reference import Settings, check, check_captured, check_left_out, mini_batches
from tests.troll.verl.worker import CASES, KL_TARGET, left_out, trained
from troll.verl.old_policies import response_places
from troll.verl.records import from_records

MODEL = "actor_rollout_ref.model"

#: An inference engine's policies as the anchor, of a rollout that reports them.
REPORTED = {"anchor": "rollout", "bypass_mode": True}


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("two")
    return worker.run(2, worker.two_processes, folder / "found.pt", model_folder(), folder / "checkpoint")


def check_equals_the_core(found: dict[str, Any], processes: int = 1, **changes: Any) -> None:
    """Asserts that the rollout was captured and its updates made as by the core, each sequence by itself."""
    samples, settings = rollout(), Settings(**changes)
    check_captured(model_folder(), found["old_policies"], samples[::processes], settings)
    check(model_folder(), found["steps"], found["metrics"], mini_batches(samples), settings)


@pytest.mark.parametrize(
    ("case", "reads_head", "packed"),
    [
        *(("token", *both) for both in itertools.product((True, False), repeat=2)),
        *(("sequence", True, True), ("sequence", False, False), ("gspo", True, False)),
    ],
)
def test_one_process_equals_the_core(
    case: str, reads_head: bool, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = trolled(packed)
    assert actor.engine.reads_head
    monkeypatch.setitem(vars(actor.engine), "reads_head", reads_head)
    found = trained(actor.reset(**CASES[case]), as_batch(rollout()))
    assert actor.engine.from_head is reads_head
    check_equals_the_core(found, **CASES[case])


def responses(values: Tensor, batch: Any) -> Tensor:
    return values.values()[response_places(batch) > 0]


def test_head_and_logits_have_verls_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities and entropies of every pass."""
    actor, stock, batch = trolled(), single(plug_in=()), as_batch(rollout(), temperature=0.7)
    assert actor.engine.reads_head  # and has prepared the model for it
    own = stock.reset().infer(batch, calculate_entropy=True)
    log_probs, entropy = (responses(own[name], batch) for name in ("log_probs", "entropy"))
    error = max(reference.capture_error(reference.load(model_folder()), x, Settings()) for x in rollout())
    for reads_head in (True, False):
        monkeypatch.setitem(vars(actor.engine), "reads_head", reads_head)
        scores = actor.reset().infer(batch, calculate_entropy=True)
        reference_pass = actor.infer(batch, calculate_entropy=False)
        assert "entropy" not in reference_pass
        for got, wanted in (
            (scores["log_probs"], log_probs),
            (scores["entropy"], entropy),
            (reference_pass["log_probs"], log_probs),
        ):
            torch.testing.assert_close(responses(got, batch), wanted, rtol=0, atol=within(4 * error))


def test_temperatures_of_samples_are_applied_to_logits() -> None:
    """As verl has it, which its fused kernels refuse."""
    samples, actor = rollout(), trolled()
    batch = as_batch(samples)
    tu.assign_non_tensor(batch, temperature=None)
    batch["temperature"] = torch.full((len(samples),), 0.7)
    actor.reset().infer(batch, calculate_entropy=True)
    assert not actor.engine.from_head
    check_captured(model_folder(), captured(actor.engine, batch), samples, Settings(temperature=0.7))


def test_fused_reference_may_share_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's fused kernels are off for the actor, and patch the class of the model, and so the actor's too."""
    plain = Qwen3ForCausalLM.forward
    monkeypatch.setattr(Qwen3ForCausalLM, "forward", plain)  # which is put back afterwards
    fused = f"{MODEL}.use_fused_kernels=true"
    reference_engine = single(fused, "data.train_batch_size=8", plug_in=())
    assert Qwen3ForCausalLM.forward.__module__.startswith("verl.")
    actor = single(fused, *policy_loss(*SMALL), "data.train_batch_size=8").reset()
    batch = as_batch(rollout(), temperature=0.7)
    found = trained(actor, batch)
    assert found["reads_head"]
    own = reference_engine.reset().infer(batch, calculate_entropy=False)["log_probs"]
    got = actor.reset().infer(batch, calculate_entropy=False)["log_probs"]
    torch.testing.assert_close(responses(got, batch), responses(own, batch), rtol=0, atol=1e-4)
    monkeypatch.setitem(vars(actor.engine), "reads_head", False)
    with pytest.raises(ValueError, match=r"use_fused_kernels=False"):
        actor.infer(batch, calculate_entropy=True)
    monkeypatch.setattr(Qwen3ForCausalLM, "forward", plain)
    check_equals_the_core(found, temperature=0.7)


@pytest.mark.parametrize("name", ["token", "FSDP 1", "dynamic"])
def test_two_processes_equal_the_core(name: str, two_processes: dict[str, Any]) -> None:
    assert two_processes[name]["reads_head"]
    check_equals_the_core(two_processes[name], processes=2)


def test_nan_on_one_process_leaves_out_the_update_on_all(two_processes: dict[str, Any]) -> None:
    check_left_out(two_processes["nan"])


@pytest.mark.parametrize(("value", "reads_head"), [(torch.nan, True), (torch.inf, False)])
def test_updates_on_what_is_no_number_are_left_out(
    value: float, reads_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As verl leaves them out where gradients are not finite."""
    actor = trolled()
    assert actor.engine.reads_head  # and has prepared the model for it
    monkeypatch.setitem(vars(actor.engine), "reads_head", reads_head)
    check_left_out(left_out(actor, rollout(), value))


def test_learning_rate_follows_the_kl_of_all_processes(two_processes: dict[str, Any]) -> None:
    """Each has half of every mini-batch, and the rate is that of one process with all of it."""
    first, second = two_processes["KL target"]
    assert first == second and len({*first}) > 3
    # From the second update on, a rounding error is seen in the rate.
    assert first == pytest.approx(worker.rates_of(trolled(True, *policy_loss(*KL_TARGET)), rollout()), rel=1e-3)


def test_resumed_run_equals_an_uninterrupted_one(two_processes: dict[str, Any]) -> None:
    """Bit by bit, with a KL target, in two processes."""
    wanted, got = two_processes["resumed"]
    assert all(torch.equal(*pair) for pair in zip(got["old_policies"], wanted["old_policies"], strict=True))
    assert all(torch.equal(got["parameters"][name], value) for name, value in wanted["parameters"].items())
    assert got["metrics"]["lr"] == wanted["metrics"]["lr"]


def test_sequence_parallelism_equals_the_core(two_processes: dict[str, Any]) -> None:
    check_equals_the_core(two_processes["sequence parallel"], **CASES["sequence"])


def test_sequence_parallelism_captures_kept_tokens(two_processes: dict[str, Any]) -> None:
    actor, batch = trolled().reset(rollout_top_p=0.8), as_batch(rollout())
    actor.infer(batch, calculate_entropy=True)
    records = two_processes["kept tokens"], captured(actor.engine, batch)
    for got, own in zip(*([from_records([one]) for one in each] for each in records), strict=True):
        assert got.truncated and torch.equal(got.counts, own.counts) and torch.equal(got.token_ids, own.token_ids)
        torch.testing.assert_close(got.log_probs, own.log_probs, rtol=0, atol=within(1e-5))


def test_static_pack_sizes_equal_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    actor, samples = trolled(), rollout()
    monkeypatch.setattr(actor.engine, "pad_to_length", True)
    monkeypatch.setattr(actor.engine, "pad_to_length_bucket", 16)
    # A micro-batch that is the whole mini-batch, twice: nothing of the first update may linger in it.
    found = trained(actor, as_batch(samples), epochs=2, micro_batch_size_per_gpu=4)
    check(model_folder(), found["steps"], found["metrics"], mini_batches(samples) * 2, Settings())


def test_dynamic_shuffled_batches_find_their_old_policies() -> None:
    actor, samples = trolled(), rollout()
    batch, dynamic = as_batch(samples), {"use_dynamic_bsz": True, "max_token_len_per_gpu": 24}
    scored = with_scores(batch, actor.infer(batch, calculate_entropy=True, **dynamic))
    check_captured(model_folder(), captured(actor.engine, batch), samples, Settings())
    forward_backward = actor.engine.forward_backward_batch
    with mock.patch.object(actor.engine, "forward_backward_batch", wraps=forward_backward) as passes:
        metrics = actor.update(scored, epochs=2, dataloader_kwargs={"shuffle": True}, **dynamic)
    order = [[row.tolist() for row in call.args[0]["input_ids"].unbind()] for call in passes.call_args_list]
    by_ids = {tuple(sample.input_ids.tolist()): sample for sample in samples}
    shuffled = [[by_ids[tuple(ids)] for ids in mini_batch] for mini_batch in order]
    assert len(shuffled) == 6 and shuffled[:3] != shuffled[3:]
    check(model_folder(), actor.steps, metrics, shuffled, Settings())


def test_merging_an_adapter_of_a_tied_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=rf"{MODEL}.lora.merge=True merges .*embed_tokens and lm_head share"):
        trolled(True, f"{MODEL}.lora_rank=4", f"{MODEL}.target_modules=[lm_head]", f"{MODEL}.lora.merge=True")


def test_lora_trains_and_its_reference_captures_nothing() -> None:
    lora = [f"{MODEL}.lora_rank=4", f"{MODEL}.target_modules=all-linear", f"{MODEL}.lora.merge=True"]
    # A bound that any update of the adapter passes, which starts at random.
    actor, samples = trolled(True, *lora, *policy_loss("kl_bound=1e-9")), rollout()
    scored = actor.score(as_batch(samples))
    before_reference = actor.engine.old_policies
    reference_pass = actor.infer(scored, calculate_entropy=False, no_lora_adapter=True)
    assert actor.engine.old_policies is before_reference
    # The adapter starts as zero: the same network, and the same policies.
    check_captured(model_folder(), captured(actor.engine, scored), samples, Settings())
    before = actor.parameters()
    metrics = actor.update(scored)
    moved = {name for name, value in actor.parameters().items() if not torch.equal(value, before[name])}
    assert moved and all("lora_" in name for name in moved)
    assert metrics["trust_region/projected_fraction"][-1] > 0
    with_adapter = actor.infer(as_batch(samples), calculate_entropy=False)["log_probs"].values()
    without = actor.infer(as_batch(samples), calculate_entropy=False, no_lora_adapter=True)["log_probs"].values()
    assert not torch.equal(with_adapter, without)
    torch.testing.assert_close(without, reference_pass["log_probs"].values())


def test_reports_train_as_captured_policies_do() -> None:
    """Of a truncated rollout; the pass of the reports captures nothing."""
    actor = trolled().reset(rollout_top_k=5)
    scored = actor.score(as_batch(rollout()))
    records = captured(actor.engine, scored)
    metrics, wanted = actor.update(scored), actor.parameters()
    scored["old_policies"], before = nested(records), actor.engine.old_policies
    actor.reset(rollout_top_k=5, **REPORTED).infer(scored, calculate_entropy=True)
    assert actor.engine.old_policies is before
    found = actor.update(scored)
    assert found["trust_region/kept_mass"] == pytest.approx(metrics["trust_region/kept_mass"])
    assert max(found["trust_region/kl_before_max"]) > 0.02
    for name, value in actor.parameters().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-6, atol=1e-7)


def test_refused_update_leaves_the_run_as_it_was() -> None:
    actor = trolled()
    scored, before = actor.score(as_batch(rollout())), actor.parameters()
    damaged = scored.copy()
    first, *others = captured(actor.engine, scored)
    damaged["old_policies"] = nested([first[:-3], *others])
    actor.reset(**REPORTED)
    with pytest.raises(ValueError, match=r"record 0 .* damaged"):
        actor.update(damaged)
    assert not actor.steps and not actor.engine.optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in actor.parameters().items())
