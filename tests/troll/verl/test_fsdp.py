"""TROLL on verl's FSDP2 engine: capture and update equal the core's on the same sequences, however they are packed."""

import itertools
from collections.abc import Sequence
from pathlib import Path
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
    REPORTED,
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
from tests.troll.verl.reference import Settings, check, check_captured, check_left_out, divided
from tests.troll.verl.worker import CASES, KL_TARGET, trained
from troll.verl.old_policies import response_places
from troll.verl.records import from_records

BOTH = tuple(itertools.product((True, False), repeat=2))


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return worker.run(2, worker.two_processes, tmp_path_factory.mktemp("two") / "found.pt", model_folder())


def check_equals_the_core(found: dict[str, Any], processes: int = 1, **changes: Any) -> None:
    """Asserts that the rollout was captured and its updates made as by the core, each sequence by itself."""
    samples, settings = rollout(), Settings(**changes)
    check_captured(model_folder(), found["old_policies"], samples[::processes], settings)
    check(model_folder(), found["steps"], found["metrics"], divided(samples, world=processes), settings)


@pytest.mark.parametrize(
    ("case", "reads_head", "packed"),
    [(case, *both) for case in CASES for both in BOTH if case == "token" or both[0] is both[1]],
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
    check_captured(model_folder(), captured(actor.engine, batch), samples, Settings(temperature=0.7))


def test_fused_kernels_of_verl_are_off_and_a_temperature_divides_both_policies_logits() -> None:
    actor = trolled(True, "actor_rollout_ref.model.use_fused_kernels=true")
    found = trained(actor, as_batch(rollout(), temperature=0.7))
    assert found["reads_head"]
    check_equals_the_core(found, temperature=0.7)


def test_a_reference_with_fused_kernels_may_share_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl patches the class of the model, and so the actor's too."""
    plain = Qwen3ForCausalLM.forward
    monkeypatch.setattr(Qwen3ForCausalLM, "forward", plain)  # which is put back afterwards
    fused = "actor_rollout_ref.model.use_fused_kernels=true"
    reference_engine = single(fused, "data.train_batch_size=8", plug_in=())
    assert Qwen3ForCausalLM.forward.__module__.startswith("verl.")
    actor, batch = single(fused, *policy_loss(*SMALL), "data.train_batch_size=8").reset(), as_batch(rollout())
    found = trained(actor, batch)
    own = reference_engine.reset().infer(batch, calculate_entropy=False)["log_probs"]
    got = actor.reset().infer(batch, calculate_entropy=False)["log_probs"]
    torch.testing.assert_close(responses(got, batch), responses(own, batch), rtol=0, atol=1e-4)
    monkeypatch.setitem(vars(actor.engine), "reads_head", False)
    with pytest.raises(ValueError, match=r"TROLL needs logits here.*use_fused_kernels=False"):
        actor.infer(batch, calculate_entropy=True)
    monkeypatch.setattr(Qwen3ForCausalLM, "forward", plain)
    check_equals_the_core(found)


def responses(values: Tensor, batch: Any) -> Tensor:
    return values.values()[response_places(batch) > 0]


@pytest.mark.parametrize(
    ("name", "settings"),
    [*CASES.items(), ("FSDP 1", {}), ("padded", CASES["sequence"]), ("dynamic", {})],
    ids=[*CASES, "FSDP 1", "padded", "dynamic batch sizes"],
)
def test_two_processes_equal_the_core(name: str, settings: dict[str, Any], two_processes: dict[str, Any]) -> None:
    assert two_processes[name]["reads_head"]
    check_equals_the_core(two_processes[name], processes=2, **settings)


def test_nan_on_one_process_leaves_out_the_update_on_all(two_processes: dict[str, Any]) -> None:
    check_left_out(two_processes["nan"])


def test_the_learning_rate_follows_the_kl_of_all_processes(two_processes: dict[str, Any]) -> None:
    """Each has half of every mini-batch, and the rate is that of one process with all of it."""
    first, second = two_processes["KL target"]
    assert first == second and len({*first}) > 4
    # From the second update on, a rounding error is seen in the rate.
    assert first == pytest.approx(worker.rates_of(trolled(True, *policy_loss(*KL_TARGET)), rollout()), rel=1e-3)


@pytest.mark.parametrize("case", ["token", "sequence"])
def test_sequence_parallelism_equals_the_core(case: str, two_processes: dict[str, Any]) -> None:
    check_equals_the_core(two_processes["sequence parallel"][case], **CASES[case])


def test_sequence_parallelism_captures_kept_sets_of_any_size(two_processes: dict[str, Any]) -> None:
    actor, batch = trolled().reset(rollout_top_p=0.8), as_batch(rollout())
    actor.infer(batch, calculate_entropy=True)
    records = two_processes["sequence parallel"]["kept"], captured(actor.engine, batch)
    for got, own in zip(*([from_records([one]) for one in each] for each in records), strict=True):
        assert got.truncated and torch.equal(got.counts, own.counts) and torch.equal(got.token_ids, own.token_ids)
        torch.testing.assert_close(got.log_probs, own.log_probs, rtol=0, atol=within(1e-5))


def test_static_pack_sizes_equal_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    actor, samples = trolled(), rollout()
    monkeypatch.setattr(actor.engine, "pad_to_length", True)
    monkeypatch.setattr(actor.engine, "pad_to_length_bucket", 16)
    # A micro-batch that is the whole mini-batch, twice: nothing of the first update may linger in it.
    found = trained(actor, as_batch(samples), epochs=2, micro_batch_size_per_gpu=4)
    check_captured(model_folder(), found["old_policies"], samples, Settings())
    check(model_folder(), found["steps"], found["metrics"], divided(samples) * 2, Settings())


def test_old_policies_follow_their_sequences_through_dynamic_batches_and_shuffled_epochs() -> None:
    actor, samples = trolled(), rollout()
    batch, dynamic = as_batch(samples), {"use_dynamic_bsz": True, "max_token_len_per_gpu": 24}
    scored = with_scores(batch, actor.infer(batch, calculate_entropy=True, **dynamic))
    check_captured(model_folder(), captured(actor.engine, batch), samples, Settings())
    forward_backward = actor.engine.forward_backward_batch
    with mock.patch.object(actor.engine, "forward_backward_batch", wraps=forward_backward) as passes:
        metrics = actor.update(scored, epochs=2, dataloader_kwargs={"shuffle": True}, **dynamic)
    order = [[row.tolist() for row in call.args[0]["input_ids"].unbind()] for call in passes.call_args_list]
    by_ids = {tuple(sample.input_ids.tolist()): sample for sample in samples}
    mini_batches = [[[by_ids[tuple(ids)] for ids in mini_batch]] for mini_batch in order]
    assert len(mini_batches) == 6 and mini_batches[:3] != mini_batches[3:]
    check(model_folder(), actor.steps, metrics, mini_batches, Settings())


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head", "q_proj"])
def test_merging_an_adapter_of_a_tied_weight_is_refused(target: str) -> None:
    model = "actor_rollout_ref.model"
    lora = [f"{model}.lora_rank=4", f"{model}.target_modules=[{target}]", f"{model}.lora.merge=True"]
    if target == "q_proj":
        assert trolled(True, *lora).engine.model_config.lora["merge"]
        return
    with pytest.raises(ValueError, match=rf"{model}.lora.merge=True merges .*embed_tokens and lm_head share"):
        trolled(True, *lora)


def test_lora_trains_and_its_reference_pass_captures_nothing() -> None:
    lora = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=all-linear"]
    # A bound that any update of the adapter passes, which starts at random.
    actor, samples = trolled(True, *lora, *policy_loss("kl_bound=1e-9")), rollout()
    scored = actor.score(as_batch(samples))
    before_reference = actor.engine.captured
    reference_pass = actor.infer(scored, calculate_entropy=False, no_lora_adapter=True)
    assert actor.engine.captured is before_reference
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


def test_reports_of_a_truncated_rollout_train_as_captured_policies_do() -> None:
    kept, batch = "actor_rollout_ref.rollout.top_k=5", as_batch(rollout())
    capturing = trolled(True, kept)
    scored = capturing.score(batch)
    records = captured(capturing.engine, scored)
    metrics = capturing.update(scored)
    wanted = capturing.parameters()
    reporting = trolled(True, kept, *REPORTED)
    scored["old_policies"] = nested(records)
    found = reporting.update(scored)
    assert found["trust_region/kept_mass"] == pytest.approx(metrics["trust_region/kept_mass"])
    assert max(found["trust_region/kl_before_max"]) > 0.02
    for name, value in reporting.parameters().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-6, atol=1e-7)


def same(got: dict[str, Any], wanted: dict[str, Any]) -> bool:
    records = zip(got["old_policies"], wanted["old_policies"], strict=True)
    return all(torch.equal(a, b) for a, b in records) and all(
        torch.equal(got["parameters"][name], value) for name, value in wanted["parameters"].items()
    )


@pytest.mark.parametrize("settings", [(), KL_TARGET], ids=["plain", "KL target"])
def test_a_resumed_run_equals_one_that_was_never_interrupted(settings: Sequence[str], tmp_path: Path) -> None:
    wanted = worker.uninterrupted(trolled(True, *policy_loss(*settings)), 0, 1, tmp_path / "checkpoint")
    places = model_folder(), tmp_path / "checkpoint"
    got = worker.run(1, worker.resumed, tmp_path / "found.pt", *places, *settings)
    assert same(got, wanted) and got["metrics"]["lr"] == wanted["metrics"]["lr"]


@pytest.mark.slow
def test_two_processes_resume_after_one_was_killed_within_its_updates(tmp_path: Path) -> None:
    places = (tmp_path / "found.pt", model_folder(), tmp_path / "checkpoint")
    wanted = worker.run(2, worker.uninterrupted_processes, *places)
    with pytest.raises(Exception, match="SIGKILL"):
        worker.run(2, worker.killed, *places)
    assert same(worker.run(2, worker.resumed, *places), wanted)
