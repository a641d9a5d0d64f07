"""TROLL on verl's FSDP2 engine: capture and update equal the core's on the same sequences, however they are packed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM
from verl.utils import tensordict_utils as tu

from tests.tolerance import within
from tests.verl import reference, worker
from tests.verl.actor import SMALL, Sample, as_batch, captured, model_folder, policy_loss, rollout, single, trolled
from tests.verl.reference import Settings, check, divided
from tests.verl.worker import CASES, trained
from troll import SparsePolicy
from troll.trust_region.policy.wire import from_records
from troll.verl.old_policies import response_places

ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return worker.run(2, worker.two_processes, model_folder(), tmp_path_factory.mktemp("two") / "found.pt")


def settings_of(case: dict[str, Any], **others: Any) -> Settings:
    """The reference's names."""
    own = {("aggregation" if name == "loss_agg_mode" else name): value for name, value in case.items()}
    return Settings(**(own | others))


def check_captured(records: list[Tensor], samples: list[Sample], settings: Settings) -> None:
    """Asserts that the records are the policies that the core captures of each sequence by itself."""
    model = reference.load(model_folder())
    assert len(records) == len(samples)
    for record, sample in zip(records, samples, strict=True):
        got, wanted = from_records([record]).unpack(), reference.capture(model, sample, settings)
        assert isinstance(got, SparsePolicy)
        assert torch.equal(got.token_ids, wanted.token_ids)
        assert torch.equal(got.slot, wanted.slot)
        assert (got.vocab_size, got.mass_threshold) == (wanted.vocab_size, wanted.mass_threshold)
        error = reference.capture_error(model, sample, settings)
        torch.testing.assert_close(got.log_probs, wanted.log_probs, rtol=0, atol=error)
        torch.testing.assert_close(got.tail_log_prob, wanted.tail_log_prob, rtol=0, atol=error)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_one_process_equals_the_core(case: str, packed: bool) -> None:
    settings, samples, actor = settings_of(CASES[case]), rollout(), trolled(packed)
    found = trained(actor.reset(**CASES[case]), as_batch(samples))
    assert actor.engine.reads_head
    check_captured(found["old_policies"], samples, settings)
    check(model_folder(), found["steps"], found["metrics"], divided(samples), settings)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_a_head_that_cannot_be_read_gives_logits(case: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, samples, actor = settings_of(CASES[case]), rollout(), trolled(packed)
    monkeypatch.setitem(vars(actor.engine), "reads_head", False)
    found = trained(actor.reset(**CASES[case]), as_batch(samples))
    assert not actor.engine.from_head
    check_captured(found["old_policies"], samples, settings)
    check(model_folder(), found["steps"], found["metrics"], divided(samples), settings)


@pytest.mark.parametrize("packed", [True, False])
def test_the_head_and_its_logits_have_the_same_scores(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities and entropies of every pass, and those of verl's own engine."""
    actor, stock = trolled(packed), single(f"actor_rollout_ref.model.use_remove_padding={packed}", plug_in=())
    found = []
    for reads_head in (True, False):
        monkeypatch.setitem(vars(actor.engine), "reads_head", reads_head)
        batch = as_batch(rollout(), temperature=0.7)
        scores = actor.reset().infer(batch, calculate_entropy=True)
        reference_pass = actor.infer(batch, calculate_entropy=False)
        assert "entropy" not in reference_pass
        tensors = scores["log_probs"], scores["entropy"], reference_pass["log_probs"]
        found.append([responses(x, batch) for x in tensors])
    own = stock.reset().infer(batch, calculate_entropy=True)
    log_probs, entropy = (responses(own[name], batch) for name in ("log_probs", "entropy"))
    error = max(reference.capture_error(reference.load(model_folder()), x, Settings()) for x in rollout())
    for scores in found:
        for got, wanted in zip(scores, (log_probs, entropy, log_probs), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=within(4 * error))


def test_one_temperature_for_each_sample_is_applied_to_logits() -> None:
    """As verl has it, which its fused kernels refuse."""
    samples, actor = rollout(), trolled()
    batch = as_batch(samples)
    tu.assign_non_tensor(batch, temperature=None)
    batch["temperature"] = torch.full((len(samples),), 0.7)
    actor.reset().infer(batch, calculate_entropy=True)
    assert not actor.engine.from_head
    check_captured(captured(actor.engine, batch), samples, Settings(temperature=0.7))


def test_fused_kernels_of_verl_change_nothing() -> None:
    samples = rollout()
    actor = trolled(True, "actor_rollout_ref.model.use_fused_kernels=true")
    found = trained(actor, as_batch(samples))
    assert actor.engine.reads_head
    check_captured(found["old_policies"], samples, Settings())
    check(model_folder(), found["steps"], found["metrics"], divided(samples), Settings())


def test_a_reference_with_fused_kernels_may_share_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl patches the class of the model, and so the actor's too."""
    plain = Qwen3ForCausalLM.forward
    monkeypatch.setattr(Qwen3ForCausalLM, "forward", plain)  # which is put back afterwards
    fused = "actor_rollout_ref.model.use_fused_kernels=true"
    reference_engine = single(fused, "data.train_batch_size=8", plug_in=())
    assert Qwen3ForCausalLM.forward.__module__.startswith("verl.")
    actor, samples = single(fused, *policy_loss(*SMALL), "data.train_batch_size=8").reset(), rollout()
    batch, found = as_batch(samples), trained(actor, as_batch(samples))
    own = reference_engine.reset().infer(batch, calculate_entropy=False)["log_probs"]
    got = actor.reset().infer(batch, calculate_entropy=False)["log_probs"]
    torch.testing.assert_close(responses(got, batch), responses(own, batch), rtol=0, atol=1e-4)
    monkeypatch.setitem(vars(actor.engine), "reads_head", False)
    with pytest.raises(ValueError, match=r"TROLL needs logits here.*use_fused_kernels=False"):
        actor.infer(batch, calculate_entropy=True)
    monkeypatch.setattr(Qwen3ForCausalLM, "forward", plain)
    check_captured(found["old_policies"], samples, Settings())
    check(model_folder(), found["steps"], found["metrics"], divided(samples), Settings())


def responses(values: Tensor, batch: Any) -> Tensor:
    """What a pass says of the response tokens, (N,)."""
    return values.values()[response_places(batch) > 0]


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
def test_eager_attention_equals_the_core(packed: bool) -> None:
    samples = rollout()
    found = trained(trolled(packed, f"{ATTENTION}=eager"), as_batch(samples))
    check_captured(found["old_policies"], samples, Settings())
    check(model_folder(), found["steps"], found["metrics"], divided(samples), Settings())


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_the_core(case: str, two_processes: dict[str, Any]) -> None:
    settings, samples, found = settings_of(CASES[case]), rollout(), two_processes[case]
    check_captured(found["old_policies"], samples[::2], settings)
    check(model_folder(), found["steps"], found["metrics"], divided(samples, world=2), settings)


def test_two_processes_of_fsdp_1_equal_the_core(two_processes: dict[str, Any]) -> None:
    found, samples = two_processes["FSDP 1"], rollout()
    assert found["reads_head"]
    check_captured(found["old_policies"], samples[::2], Settings())
    check(model_folder(), found["steps"], found["metrics"], divided(samples, world=2), Settings())


def test_two_processes_equal_the_core_with_padding(two_processes: dict[str, Any]) -> None:
    settings, samples, found = settings_of(CASES["sequence"]), rollout(), two_processes["padded"]
    check_captured(found["old_policies"], samples[::2], settings)
    check(model_folder(), found["steps"], found["metrics"], divided(samples, world=2), settings)


def test_two_processes_equal_the_core_with_dynamic_batch_sizes(two_processes: dict[str, Any]) -> None:
    found = two_processes["dynamic"]
    check(model_folder(), found["steps"], found["metrics"], divided(rollout(), world=2), Settings())


def test_nan_on_one_process_leaves_out_the_update_on_all(two_processes: dict[str, Any]) -> None:
    found = two_processes["nan"]
    assert found["unchanged"]
    assert all(count > 0 for count in found["metrics"]["trust_region/nonfinite"])
    assert all(math.isnan(norm) for norm in found["metrics"]["grad_norm"])
    assert all(count == 0 for count in found["later"]["trust_region/nonfinite"])
    assert all(math.isfinite(norm) for norm in found["later"]["grad_norm"])


@pytest.mark.parametrize("case", ["token", "floor", "sequence", "batch"])
def test_sequence_parallelism_equals_the_core(case: str, two_processes: dict[str, Any]) -> None:
    settings, samples, found = settings_of(CASES[case]), rollout(), two_processes["sequence parallel"][case]
    check_captured(found["old_policies"], samples, settings)
    check(model_folder(), found["steps"], found["metrics"], divided(samples), settings)


def test_static_pack_sizes_equal_the_core() -> None:
    actor, samples = trolled(), rollout()
    actor.engine.pad_to_length, actor.engine.pad_to_length_bucket = True, 16
    try:
        # A micro-batch that is the whole mini-batch, twice: nothing of the first update may linger in it.
        found = trained(actor, as_batch(samples), epochs=2, micro_batch_size_per_gpu=4)
    finally:
        actor.engine.pad_to_length = False
    check_captured(found["old_policies"], samples, Settings())
    check(model_folder(), found["steps"], found["metrics"], divided(samples) * 2, Settings())


def test_temperature_divides_the_logits_of_both_policies() -> None:
    settings, samples = Settings(temperature=0.7), rollout()
    found = trained(trolled(), as_batch(samples, temperature=0.7))
    check_captured(found["old_policies"], samples, settings)
    check(model_folder(), found["steps"], found["metrics"], divided(samples), settings)


def test_dynamic_batch_sizes_equal_the_core() -> None:
    samples = rollout()
    found = trained(trolled(), as_batch(samples), use_dynamic_bsz=True, max_token_len_per_gpu=24)
    check(model_folder(), found["steps"], found["metrics"], divided(samples), Settings())


def test_dynamic_batch_sizes_capture_in_the_order_of_the_batch() -> None:
    samples = rollout()
    batch, actor = as_batch(samples), trolled()
    actor.infer(batch, calculate_entropy=True, use_dynamic_bsz=True, max_token_len_per_gpu=24)
    check_captured(captured(actor.engine, batch), samples, Settings())


def test_old_policies_follow_their_sequences_through_shuffled_epochs() -> None:
    actor, samples, order = trolled(), rollout(), []
    scored = actor.score(as_batch(samples))
    forward_backward = actor.engine.forward_backward_batch

    def recorded(data: Any, *arguments: Any, **options: Any) -> Any:
        order.append([row.tolist() for row in data["input_ids"].unbind()])
        return forward_backward(data, *arguments, **options)

    actor.engine.forward_backward_batch = recorded
    try:
        metrics = actor.update(
            scored, epochs=2, dataloader_kwargs={"shuffle": True}, use_dynamic_bsz=True, max_token_len_per_gpu=24
        )
    finally:
        actor.engine.forward_backward_batch = forward_backward
    by_ids = {tuple(sample.input_ids.tolist()): sample for sample in samples}
    mini_batches = [[[by_ids[tuple(ids)] for ids in mini_batch]] for mini_batch in order]
    assert len(mini_batches) == 8 and mini_batches[:4] != mini_batches[4:]
    check(model_folder(), actor.steps, metrics, mini_batches, Settings())


def test_lora_trains_and_its_reference_pass_captures_nothing() -> None:
    lora = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=all-linear"]
    # A bound that any update of the adapter passes, which starts at random.
    actor, samples = trolled(True, *lora, *policy_loss("kl_bound=1e-9")), rollout()
    scored = actor.score(as_batch(samples))
    before_reference = actor.engine.captured
    reference_pass = actor.infer(scored, calculate_entropy=False, no_lora_adapter=True)
    assert actor.engine.captured is before_reference
    # The adapter starts as zero: the same network, and the same policies.
    check_captured(captured(actor.engine, scored), samples, Settings())
    before = actor.parameters()
    metrics = actor.update(scored)
    moved = {name for name, value in actor.parameters().items() if not torch.equal(value, before[name])}
    assert moved and all("lora_" in name for name in moved)
    assert metrics["trust_region/projected_fraction"][-1] > 0
    with_adapter = actor.infer(as_batch(samples), calculate_entropy=False)["log_probs"].values()
    without = actor.infer(as_batch(samples), calculate_entropy=False, no_lora_adapter=True)["log_probs"].values()
    assert not torch.equal(with_adapter, without)
    torch.testing.assert_close(without, reference_pass["log_probs"].values())


def same(got: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether two runs end with the same bits."""
    records = zip(got["old_policies"], wanted["old_policies"], strict=True)
    return all(torch.equal(a, b) for a, b in records) and all(
        torch.equal(got["parameters"][name], value) for name, value in wanted["parameters"].items()
    )


def test_a_resumed_run_equals_one_that_was_never_interrupted(tmp_path: Path) -> None:
    wanted = worker.uninterrupted(trolled(), 0, 1, tmp_path / "checkpoint")
    got = worker.run(1, worker.resumed, model_folder(), tmp_path / "found.pt", tmp_path / "checkpoint")
    assert same(got, wanted)


@pytest.mark.slow
def test_two_processes_resume_after_one_was_killed_within_its_updates(tmp_path: Path) -> None:
    places = (model_folder(), tmp_path / "found.pt", tmp_path / "checkpoint")
    wanted = worker.run(2, worker.uninterrupted_processes, *places)
    with pytest.raises(Exception, match="SIGKILL"):
        worker.run(2, worker.killed, *places)
    assert same(worker.run(2, worker.resumed, *places), wanted)


def test_actors_share_a_process_with_verls_own() -> None:
    """verl's engine for verl's loss, beside the plug-in's: importing it takes nothing over."""
    stock = single(plug_in=())
    assert type(stock.engine).__module__.startswith("verl.")
    assert not hasattr(stock.reset().engine, "captured")
