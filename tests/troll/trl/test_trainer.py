"""TrollTrainer in training: what it trains, logs, warns about, saves and refuses."""

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import trl.trainer.utils as trl_utils
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import troll
from tests.tolerance import within
from tests.troll.trl import dense, tiny
from tests.troll.trl.distributed_worker import SameRollouts
from tests.troll.trl.resuming import SETTINGS as RESUMED
from tests.troll.trl.resuming import interrupted, resumed_exactly
from troll.trl import TrollConfig, TrollTrainer, old_policy, seam
from troll.trl.monitor import Monitor
from troll.trl.trainer import OLD_POLICY
from troll.trust_region.policy.packed import PackedPolicy
from troll.trust_region.policy.sparse import SparsePolicy
from troll.trust_region.reading import head as head_module


def captured(inputs: dict[str, Any]) -> SparsePolicy:
    """The old policy of a micro-batch's scored tokens."""
    policy = PackedPolicy.stack(inputs[OLD_POLICY]).unpack()
    mask = dense.scored_mask(inputs)
    assert policy.shape == mask.shape
    assert not policy.used[~mask].any()
    return policy[mask]


def steps(trainer: Any) -> list[dict[str, Any]]:
    """The logged entries of the training steps."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def same_metrics(actual: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float = 0.0) -> None:
    """All but the times are equal."""
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        names = {name for name in other if "time" not in name}
        assert names == {name for name in one if "time" not in name}
        for name in names:
            assert one[name] == pytest.approx(other[name], rel=tolerance, abs=tolerance), name


# Training


@pytest.mark.parametrize(
    ("weights", "settings"),
    [
        (torch.float32, {"num_iterations": 3, "steps_per_generation": 1, "per_device_train_batch_size": 8}),
        (torch.float32, {"gradient_accumulation_steps": 2, "steps_per_generation": 3}),
        # In bf16 are the computations, or the weights themselves.
        (torch.float32, {"bf16": True}),
        (torch.bfloat16, {}),
    ],
    ids=str,
)
def test_every_order_of_passes_and_precision_trains(make, weights, settings):
    """What single settings make of a loss: test_loss."""
    trainer = make(model=make.model().to(weights), kl_bound=0.01, **settings)
    trainer.train()
    assert all(math.isfinite(value) for value in tiny.logged(trainer, "loss"))
    first, *later = tiny.logged(trainer, "trust_region/kl_before_max")
    assert first < within(1e-6) and max(later) > 0.01
    assert max(tiny.logged(trainer, "trust_region/kl_after_max")) <= 0.01 * (1 + within(1e-3))


def test_gradient_checkpointing_changes_nothing(make):
    checkpointed = {"gradient_checkpointing": True}
    reentrant = checkpointed | {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
    runs = []
    for settings in ({}, checkpointed, reentrant):
        trainer = make(kl_bound=0.01, max_steps=2, **settings)
        trainer.train()
        runs.append(steps(trainer))
    for run in runs[1:]:
        same_metrics(run, runs[0], 1e-5)


def test_on_policy_equals_grpo_and_is_warned_about(make, monkeypatch):
    monkeypatch.setattr(old_policy, "capture_tokens", lambda *_, **__: pytest.fail("the old policy was captured"))
    settings = {"steps_per_generation": 2, "gradient_accumulation_steps": 2, "beta": 0.1, "max_steps": 2}
    with pytest.warns(UserWarning, match="every update is on-policy, .* updates_per_rollout, .* num_iterations"):
        ours = make(kl_bound=1e-6, **settings)
    ours.train()
    theirs = make.stock(**settings)
    theirs.train()
    assert not tiny.changed(tiny.parameters(theirs.model), ours.model)
    for entry in theirs.state.log_history:
        for name in [name for name in entry if name.startswith("clip_ratio/")]:
            del entry[name]
    same_metrics(steps(ours), steps(theirs))


# The old policy


@pytest.mark.parametrize(("iterations", "temperature"), [(1, 1.0), (2, 0.5)])
def test_the_old_policy_stays_with_its_tokens(make, iterations, temperature):
    """Through TRL's scoring in chunks, its shuffle and its split; at the sampling temperature."""
    order = {"per_device_train_batch_size": 2, "steps_per_generation": 6, "num_iterations": iterations}
    trainer = make(support_top_k=5, temperature=temperature, **order)
    reference = make.model()
    buffered = tiny.rollout(trainer)
    assert len(buffered) == 6 and len({int(inputs["completion_mask"].sum()) for inputs in buffered}) > 1
    for inputs in buffered:
        mask, tokens = dense.scored_mask(inputs), inputs["completion_ids"]
        policy = captured(inputs)
        with torch.no_grad():
            logits = dense.completion_logits(reference, inputs, temperature).float()
        expected = troll.capture(logits[mask], tokens[mask], top_k=5, mass_threshold=1e-5)
        assert torch.equal(policy.token_ids, expected.token_ids)
        for name in ("log_probs", "tail_log_prob"):
            torch.testing.assert_close(getattr(policy, name), getattr(expected, name), rtol=1e-5, atol=1e-5)
        assert torch.equal(policy.slot, expected.slot)
        assert (policy.vocab_size, policy.mass_threshold) == (expected.vocab_size, 1e-5)
        torch.testing.assert_close(policy.outcomes.exp().sum(-1), torch.ones(policy.shape))
        assert not policy.log_probs.requires_grad
        raw = logits[mask].log_softmax(-1).gather(-1, tokens[mask].unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(inputs["old_per_token_logps"][mask], raw, rtol=1e-5, atol=1e-5)
        assert torch.equal(policy.log_prob, inputs["old_per_token_logps"][mask])
        assert (inputs["old_per_token_logps"][~mask] == 0).all()


def test_a_trl_that_does_not_score_the_old_policy_is_refused(make, monkeypatch):
    trainer = make()
    original = GRPOTrainer._generate_and_score_completions

    def without_scoring(self: Any, inputs: Any) -> dict[str, Any]:
        self.old_policy.expects_scoring = False
        return original(self, inputs)

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", without_scoring)
    with pytest.raises(RuntimeError, match="did not score the old policy"):
        tiny.rollout(trainer)


def test_a_trl_that_does_not_score_the_new_policy_is_refused(make, monkeypatch):
    trainer = make()
    inputs = tiny.rollout(trainer)[0]
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda *_: torch.zeros(()))
    with pytest.raises(RuntimeError, match="did not score the new policy"):
        tiny.loss_and_gradients(trainer, inputs)


# PEFT, dropout, precision


def lora(dropout: float = 0.0) -> LoraConfig:
    return LoraConfig(
        r=4, lora_alpha=8, lora_dropout=dropout, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )


def test_lora_trains_only_the_adapter(make):
    trainer = make(kl_bound=1e-4, peft_config=lora(), beta=0.1, learning_rate=0.05)
    before = tiny.parameters(trainer.model)
    trainer.train()
    assert tiny.changed(before, trainer.model) == {name for name in before if "lora_" in name}
    assert max(tiny.logged(trainer, "trust_region/projected_fraction")) > 0


def test_an_adapter_that_transformers_has_injected_trains(make, monkeypatch):
    """Such a model has a `peft_config`, but PEFT does not wrap it."""
    # transformers 5.24 asks for PEFT 0.22, which is not released.
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.21")
    model = make.model()
    model.add_adapter(lora())
    trainer = make(model=model, kl_bound=1e-4, learning_rate=0.05)
    trainer.train()
    assert max(tiny.logged(trainer, "trust_region/projected_fraction")) > 0


def test_with_lora_and_a_reference_the_capture_is_the_policys(make):
    """The reference pass goes through the same model object, with its adapter off."""
    trainer = make(peft_config=lora(), beta=0.1)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    inputs = tiny.rollout(trainer)[0]
    mask, models = dense.scored_mask(inputs), (trainer.model, make.model())
    with torch.no_grad():
        adapted, plain = (dense.completion_log_probs(model, inputs)[mask].float() for model in models)
    assert (adapted - plain).abs().max() > 0.1
    torch.testing.assert_close(captured(inputs).log_prob, adapted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inputs["ref_per_token_logps"][mask], plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrapped", [False, True])
def test_lora_dropout_is_silenced_with_a_warning(make, wrapped):
    """Whether the trainer adds the adapter or the user has."""
    given: dict[str, Any] = {"peft_config": lora(0.5)}
    if wrapped:
        given = {"model": get_peft_model(make.model(), lora(0.5))}
    with pytest.warns(UserWarning, match=r"lora_dropout=0.5 is set to 0"):
        trainer = make(kl_bound=1e-4, max_steps=1, **given)
    trainer.train()
    # The first update of a rollout sees the policy that scored it.
    assert tiny.logged(trainer, "trust_region/kl_before_max")[0] < within(1e-6)


@pytest.mark.parametrize(("disabled", "rate"), [(True, 0.5), (False, 0.5), (False, 0.0)])
def test_dropout_is_disabled_unless_it_is_wanted(make, disabled, rate):
    """Which rates of a model that finds: test_dropout."""
    model = tiny.make_model("llama", attention_dropout=rate)
    stays = rate > 0 and not disabled
    warned = pytest.warns(UserWarning, match="the model has dropout and disable_dropout=False")
    with warned if stays else tiny.no_warnings_about("dropout"):
        trainer = make(TrollTrainer, model, disable_dropout=disabled, max_steps=1)
    trainer.train()
    before = tiny.logged(trainer, "trust_region/kl_before_max")[0]
    assert before > 1e-3 if stays else before < within(1e-5)


@pytest.mark.parametrize(("architecture", "temperature", "autocast"), [("llama", 1.0, True), ("gemma2", 0.7, False)])
def test_bf16_logits_are_not_rounded_on_the_support(make, architecture, temperature, autocast):
    """Products of bf16 operands are float32, caps and temperature too; rounding moves log-probabilities by 0.02."""
    model = make.model(architecture) if autocast else make.model(architecture).to(torch.bfloat16)
    trainer = make(TrollTrainer, model, temperature=temperature, bf16=autocast)
    inputs = tiny.rollout(trainer)[0]
    input_ids, attention_mask = seam.sequences(inputs)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        hidden = model.base_model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    logits = hidden.bfloat16().float() @ model.get_output_embeddings().weight.detach().bfloat16().float().T
    if (cap := getattr(model.config, "final_logit_softcapping", None)) is not None:
        logits = cap * torch.tanh(logits / cap)
    ids = inputs["completion_ids"].unsqueeze(-1)
    log_probs = (logits[:, -ids.shape[1] - 1 : -1] / temperature).log_softmax(-1).gather(-1, ids).squeeze(-1)
    mask = dense.scored_mask(inputs)
    torch.testing.assert_close(inputs["old_per_token_logps"][mask], log_probs[mask], rtol=1e-5, atol=1e-5)
    assert captured(inputs).log_probs.dtype == torch.float32


@pytest.mark.parametrize(("architecture", "bf16"), [("llama", False), ("gemma2", True)])
def test_cast_lm_head_to_fp32_computes_the_head_in_float32(make, architecture, bf16):
    """The log-probabilities are those of TRL's fused head, which honours it."""
    model = make.model(architecture).to(torch.float32 if bf16 else torch.bfloat16)
    trainer = make(model=model, kl_bound=0.01, cast_lm_head_to_fp32=True, bf16=bf16)
    inputs = tiny.rollout(trainer)[0]
    with torch.no_grad():
        fused = seam.score(trainer, trainer.model, inputs).log_probs
    mask = dense.scored_mask(inputs)
    assert inputs["old_per_token_logps"].dtype == torch.float32
    torch.testing.assert_close(inputs["old_per_token_logps"][mask], fused[mask], rtol=1e-5, atol=1e-5)


def test_evaluation_in_the_middle_of_training_is_grpos(make, monkeypatch):
    captures = []
    original = old_policy.capture_tokens

    def spy(*args: Any, **kwargs: Any) -> Any:
        captures.append(trainer.model.training)
        return original(*args, **kwargs)

    monkeypatch.setattr(old_policy, "capture_tokens", spy)
    trainer = make(kl_bound=0.01, eval_dataset=tiny.make_dataset(4), eval_strategy="steps", eval_steps=2, do_eval=True)
    trainer.train()
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evaluations) == 2
    for entry in evaluations:
        assert math.isfinite(entry["eval_loss"]) and "eval_reward" in entry
        assert not any("trust_region" in name or "clip_ratio" in name for name in entry)
    assert captures and all(captures)
    for entry in steps(trainer):
        assert entry.keys() >= {"trust_region/multiplier", "trust_region/nonfinite", "entropy"}
        assert all(math.isfinite(value) for value in entry.values() if isinstance(value, float))


# Failures and warnings


class After(TrainerCallback):
    """Does something once, after an update."""

    def __init__(self, step: int, action: Callable[..., Any]) -> None:
        self.step, self.action = step, action

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == self.step:
            self.step = -1
            self.action(model, control)


def poison(model: Any, _: Any) -> None:
    """In the middle of a rollout."""
    with torch.no_grad():
        model.get_output_embeddings().weight[10] = torch.nan


def break_off(*_: Any) -> None:
    raise RuntimeError("broken off")


@pytest.mark.parametrize(
    ("settings", "step", "found"),
    [
        ({"callbacks": [After(1, poison)]}, 2, r"the logits of \d+ tokens are"),
        # Where no distributions are read, it is found in the loss.
        ({"callbacks": [After(1, poison)], "surrogate": "clip"}, 2, "the loss is"),
        # The weight is infinite in float32.
        ({"regression_weight": 1e39}, 1, "the loss is"),
    ],
)
def test_nan_stops_the_training_before_the_update(make, settings, step, found):
    trainer = make(**settings)
    with pytest.raises(FloatingPointError, match=f"^step {step}: {found} NaN or infinite, and the update was not made"):
        trainer.train()
    assert trainer.state.global_step == step - 1
    poisoned = sum(bool(value.isnan().any()) for value in trainer.model.parameters())
    assert poisoned == ("callbacks" in settings), "an update would have made all of them NaN"


def test_monitor_waits_for_the_device_once_in_an_update(make, monkeypatch):
    """However many micro-batches it takes: what the host has to know is summed up on the device."""
    trainer = make(gradient_accumulation_steps=4, steps_per_generation=8, max_steps=2, logging_steps=100)
    accelerator = mock.Mock(wraps=trainer.accelerator)
    monkeypatch.setattr("troll.trl.trainer.Monitor", lambda _, args: Monitor(accelerator, args))
    with mock.patch.object(Monitor, "observe", autospec=True, side_effect=Monitor.observe) as observe:
        trainer.train()
    assert observe.call_count == 8
    assert accelerator.reduce.call_count == 2 + 1, "the log's is one more"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"save_steps": 3}, "exactly. Set save_steps=4"),
        ({"save_steps": 500, "steps_per_generation": 12}, None),  # transformers' default, which nobody has set
        # Passes over two rollouts in an update.
        ({"save_steps": 3, "gradient_accumulation_steps": 3}, "exactly. Set save_steps=4"),
        ({"save_steps": 4, "gradient_accumulation_steps": 3}, None),
        ({"save_steps": 3, "save_strategy": "epoch"}, None),
        ({"save_steps": 3, "gradient_accumulation_steps": 4, "steps_per_generation": 4}, None),  # one update a rollout
        ({"save_steps": 0.5}, None),  # a fraction of the run, whose length is not known yet
        ({"save_steps": 4, "sync_ref_model": True, "beta": 0.1}, "TRL saves no reference model with a checkpoint"),
        ({"save_strategy": "no", "sync_ref_model": True, "beta": 0.1}, None),
    ],
    ids=str,
)
def test_checkpoints_that_resume_inexactly_are_warned_about(make, recwarn, settings, said):
    make(**{"save_strategy": "steps", "steps_per_generation": 4, **settings})
    found = [text for warning in recwarn if "repeat the interrupted run" in (text := str(warning.message))]
    assert len(found) == (said is not None) and all(str(said) in text for text in found)


def test_another_configuration_class_is_refused(make, tmp_path):
    args: Any = GRPOConfig(str(tmp_path), report_to="none", use_cpu=True, bf16=False)
    with pytest.raises(TypeError, match="args must be a TrollConfig, got GRPOConfig: change the name of the class"):
        TrollTrainer(make.model(), tiny.reward, args, train_dataset=tiny.make_dataset())


def grpo_trainer(make: tiny.Maker, args: TrollConfig) -> Any:
    parts: dict[str, Any] = {"train_dataset": tiny.make_dataset(), "processing_class": tiny.make_tokenizer()}
    parts["reward_funcs"] = tiny.reward
    return GRPOTrainer(make.model(), args=args, **parts)


def test_grpo_trainer_refuses_a_configuration_without_a_clip(make):
    """It has no part of the surrogate, and would clip. Which configurations have none: test_config."""
    trainer = grpo_trainer(make, make().args)
    before = tiny.parameters(trainer.model)
    with pytest.raises(TypeError, match=r"unsupported operand type.* 'int' and 'NoneType'"):
        trainer.train()
    assert trainer.state.global_step == 0 and not tiny.changed(before, trainer.model)


@pytest.mark.parametrize("surrogate", ["clip", "cispo"])
def test_grpo_trainer_takes_a_configuration_of_its_own_loss(make, surrogate):
    theirs = grpo_trainer(make, make(surrogate=surrogate, max_steps=2).args)
    theirs.train()
    ours = make(surrogate=surrogate, max_steps=2)
    ours.train()
    assert theirs.state.global_step == 2
    assert not tiny.changed(tiny.parameters(theirs.model), ours.model)


def test_without_args_the_configuration_is_the_default(make, tmp_path, monkeypatch):
    class OnCpu(TrollConfig):
        def __init__(self, output_dir: str) -> None:
            super().__init__(output_dir, use_cpu=True, bf16=False, report_to="none")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TrollTrainer, "config", OnCpu)
    parts: dict[str, Any] = {"train_dataset": tiny.make_dataset(), "processing_class": tiny.make_tokenizer()}
    with tiny.no_warnings_about("on-policy"):
        trainer = TrollTrainer(str(make.model_path("llama")), tiny.reward, **parts)
    assert isinstance(trainer.args, TrollConfig)
    assert (trainer.args.output_dir, trainer.args.kl_bound) == ("llama-TROLL", 0.05)


def test_arguments_are_accepted_by_position_as_by_grpo(make):
    trainer_class: Any = TrollTrainer
    args, data = make().args, tiny.make_dataset()
    trainer = trainer_class(make.model(), tiny.reward, args, data, None, tiny.make_tokenizer())
    assert trainer.train_dataset is data


# Saving and resuming


#: With LoRA, the reference is the model without its adapter.
RESUMED_RUNS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "num_iterations": 2},
    "lora, entropy": {"peft_config": lora(), "kl_bound": 1e-3, "learning_rate": 0.05, "beta": 0.1}
    | {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 5.0},
    "after an epoch": {"train_dataset": tiny.make_dataset(4), "per_device_train_batch_size": 8},
}


@pytest.mark.parametrize("name", RESUMED_RUNS)
def test_a_resumed_run_repeats_the_interrupted_one(make, tmp_path, name):
    """Saved on a rollout's boundary, half of the run: weights and metrics are equal bit for bit."""
    log = resumed_exactly(interrupted(make, tmp_path, ddp_backend=None, **RESUMED_RUNS[name]))
    assert max(entry["trust_region/projected_fraction"] for entry in log) > 0
    assert "2510.03817" in (tmp_path / "README.md").read_text()


def test_interrupted_trainer_resumes_with_a_new_rollout(make, tmp_path):
    """After the first update of the second rollout; what is left of that rollout is not used again."""
    settings = RESUMED | {"ddp_backend": None, "diagnostics_steps": 1}
    whole = make(output_dir=str(tmp_path / "whole"), **settings)
    whole.train()
    trainer = make(callbacks=[After(3, break_off)], output_dir=str(tmp_path / "broken"), **settings)
    with pytest.raises(RuntimeError, match="broken off"):
        trainer.train()
    trainer.train(resume_from_checkpoint=True)
    same_metrics(steps(trainer)[-2:], steps(whole)[-2:])


def test_resumed_run_logs_and_saves_as_its_own_settings_say(make, tmp_path):
    settings: dict[str, Any] = {"output_dir": str(tmp_path), "save_strategy": "steps"}
    make(**settings, logging_steps=2, save_steps=2, max_steps=2).train()
    trainer = make(**settings, logging_steps=1, save_steps=4, max_steps=6)
    trainer.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [2, 3, 4, 5, 6]
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}


def test_stream_that_had_begun_anew_is_warned_of(make, tmp_path):
    stream = tiny.make_dataset(4).to_iterable_dataset()
    settings: dict[str, Any] = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 6}
    make(**settings, train_dataset=stream, max_steps=6).train()
    trainer = make(**settings, train_dataset=stream, max_steps=7)
    with pytest.warns(UserWarning, match="stream of prompts had ended"):
        trainer.train(resume_from_checkpoint=True)


def test_stream_that_has_not_ended_is_resumed_without_a_warning(make, tmp_path):
    stream = tiny.make_dataset(64).to_iterable_dataset()
    settings: dict[str, Any] = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 4}
    make(**settings, train_dataset=stream, max_steps=4).train()
    with tiny.no_warnings_about("stream of prompts"):
        make(**settings, train_dataset=stream, max_steps=6).train(resume_from_checkpoint=True)


def test_training_logs_nothing_of_an_interrupted_one(make):
    trainer = make(callbacks=[After(3, break_off)], logging_steps=4)
    with pytest.raises(RuntimeError, match="broken off"):
        trainer.train()
    assert trainer._metrics["train"]["reward"]
    trainer.begin()
    assert not any(trainer._metrics["train"].values()) and trainer._current_train_step_time == 0


def test_a_log_that_a_users_callback_asks_for_has_everything(make):
    """And the last one, where the callback stops the training."""
    log = After(2, lambda _, control: setattr(control, "should_log", True))
    stop = After(3, lambda _, control: setattr(control, "should_training_stop", True))
    trainer = make(logging_steps=100, callbacks=[log, stop])
    trainer.train()
    first, last, _ = trainer.state.log_history
    assert first.keys() >= {"trust_region/kl_before_mean", "entropy"}
    assert last["step"] == 3 and "trust_region/kl_before_mean" in last


def test_what_an_interrupted_update_leaves_behind_is_cleared(make):
    trainer = make(eval_dataset=tiny.make_dataset(4), max_steps=2)
    expected = make(eval_dataset=tiny.make_dataset(4)).evaluate().keys()
    inputs = tiny.rollout(trainer)[0]
    interrupt = mock.patch("trl.GRPOTrainer._compute_loss", side_effect=KeyboardInterrupt)
    with interrupt, pytest.raises(KeyboardInterrupt):
        trainer._compute_loss(trainer.model, inputs)
    assert trainer.evaluate().keys() == expected


def test_prompt_learning_adds_tokens_in_front(make):
    """PEFT prepends virtual tokens and their labels: the old policy still stands at the completion's tokens."""
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    trainer = make(peft_config=config, kl_bound=1e-3, learning_rate=0.5, steps_per_generation=4)
    trainer.train()
    assert tiny.logged(trainer, "trust_region/kl_before_max")[0] < within(1e-6)
    assert tiny.logged(trainer, "trust_region/kl_before_max")[-1] > 1e-3


def test_training_makes_no_tensor_of_tokens_by_vocabulary(make, monkeypatch):
    """Neither capture nor update, with entropy and reference, the loss and its backward included."""
    vocab_size, hidden_size, largest = 1111, 42, 0
    model = tiny.make_model("llama", vocab_size=vocab_size, hidden_size=hidden_size, num_attention_heads=1)

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                # The head itself and its gradient; no number of tokens here is the hidden size.
                if isinstance(tensor, Tensor) and hidden_size not in tensor.shape:
                    largest = max(largest, tensor.numel())
            return out

    monkeypatch.setattr(head_module, "TOKEN_TILE", 4)
    monkeypatch.setattr(head_module, "VOCABULARY_TILE", 128)
    monkeypatch.setitem(head_module.WHOLE_ROWS, "cpu", vocab_size)
    monkeypatch.setattr(trl_utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 8)
    model.config._name_or_path = str(make.output_dir / "reference")
    model.save_pretrained(model.config._name_or_path)
    settings = {"entropy_coef": 0.1, "beta": 0.1}
    trainer = make(SameRollouts, model, kl_bound=0.01, max_steps=2, support_top_k=8, **settings)
    with Watch():
        trainer.train()
    assert max(tiny.logged(trainer, "trust_region/projected_fraction")) > 0
    assert 0 < largest <= 4 * vocab_size  # the first reading compares a token of each of four rows; there are more
