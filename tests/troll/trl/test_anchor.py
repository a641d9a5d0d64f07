"""The anchor: an engine's log-probs in TRL's lists, as policies; what is refused; and training around them."""

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig
from trl import GRPOTrainer

import troll
from tests.tolerance import within
from tests.troll.trl import tiny
from tests.troll.trl.engine import Engine, EngineGeneration, RolloutFunc, take_the_place_of_vllm, train_around_both
from tests.troll.trl.tiny import logged
from troll.trl import TrollTrainer
from troll.trl.anchor import (
    EngineTopLogprobs,
    allow_log_probs,
    check_engine,
    check_rollout_source,
    check_sampling,
    logprobs_mode,
    report_top_log_probs,
    reporting_rollout_func,
)
from troll.trust_region.policy.packed import PackedPolicy

VOCAB_SIZE = len(tiny.VOCABULARY)
PROMPTS = [[1, 5, 9], [1, 7], [1, 12, 13, 14]]


#: Settings of a capture.
CAPTURE: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "top_k": 8, "mass_threshold": 1e-5}


def reporting(number: int = 8) -> tuple[Any, EngineTopLogprobs]:
    """An engine in vLLM's place, with the tiny model's weights, and where it reports to."""
    torch.manual_seed(3)
    engine = Engine()
    engine.sync(tiny.make_model("llama"))
    vllm: Any = EngineGeneration(engine, model=None, accelerator=None)
    reports = EngineTopLogprobs()
    report_top_log_probs(vllm, number, reports)
    return vllm, reports


def completed(vllm: Any, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Completions, and the rows of their tokens."""
    _, completion_ids, entries, _ = vllm.generate(prompts, None, 1)
    return completion_ids, [[entry[0] for entry in completion] for completion in entries]


def numbered(completion_ids: list[list[int]]) -> list[list[int]]:
    """The rows of tokens that are the first to be reported."""
    rows = itertools.count(1)
    return [[next(rows) for _ in ids] for ids in completion_ids]


def padded(lists: list[list[int]], length: int) -> torch.Tensor:
    return torch.tensor([row + [0] * (length - len(row)) for row in lists])


def test_the_sampled_tokens_log_prob_is_found_by_its_id():
    reports = EngineTopLogprobs()
    rows = reports.add([[5, 4], [7]], [[[-0.5, -1.5, -4.0], [-0.1, -3.0]], [[-0.2]]], [[[8, 3, 5], [4, 9]], [[7]]])
    assert rows == [[1, 2], [3]]
    assert reports.add([[9], []], [[[-1.0, -2.0]], []], [[[9, 1]], []]) == [[4], []]
    found = reports.log_probs(torch.tensor([[3, 1], [0, 4]]))
    torch.testing.assert_close(found, torch.tensor([[-0.2, -4.0], [0.0, -1.0]]))
    reports.clear()
    assert reports.add([], [], []) == []
    assert reports.add([[5]], [[[-1.0]]], [[[5]]]) == [[1]]


@pytest.mark.parametrize(
    "entries", [[None, None], [-0.5, None], [-0.5, math.nan], [-math.inf, 0.0], [-9999.0, 0.0], [], None]
)
def test_a_token_that_the_engine_does_not_know_has_no_row(entries):
    reports = EngineTopLogprobs()
    assert reports.add([[5, 4, 6]], [[[-0.5, -1.0], entries, [-2.0]]], [[[8, 5], [4, 9], [6]]]) == [[1, 0, 2]]
    torch.testing.assert_close(reports.log_probs(torch.tensor([1, 0, 2])), torch.tensor([-1.0, 0.0, -2.0]))


@pytest.mark.parametrize(
    ("top_log_probs", "top_token_ids", "message"),
    [
        ([[[-1.0]]], [[[5]]], r"one list for each of the \[2\] tokens .* \[1\] and \[1\]"),
        ([[[-1.0], [-1.0, -2.0]]], [[[5], [4]]], "each of 2 entries"),
        ([[[-1.0], [-1.0, -2.0]]], [[[5], [8, 9]]], r"sampled token 4 among them, got \[8, 9\]"),
    ],
)
def test_lists_that_do_not_fit_are_refused(top_log_probs, top_token_ids, message):
    with pytest.raises(ValueError, match=message):
        EngineTopLogprobs().add([[5, 4]], top_log_probs, top_token_ids)


def test_reporting_rollout_func_hides_its_keys_from_rewards(make):
    reward = mock.Mock(side_effect=tiny.reward, __name__="reward")
    trainer, reports = make(GRPOTrainer, reward_funcs=reward), EngineTopLogprobs()
    function = RolloutFunc(Engine())
    with_a_column = lambda prompts, trainer: function(prompts, trainer) | {"answer": list(prompts)}  # noqa: E731
    trainer.rollout_func = reporting_rollout_func(with_a_column, reports)
    _, completion_ids, _, _, rows, *_ = trainer._generate(["ab", "1+2="])
    assert rows == numbered(completion_ids)
    tiny.rollout(trainer)
    seen = reward.call_args.kwargs
    assert "answer" in seen and not [name for name in seen if "logprob" in name]


@pytest.mark.parametrize("environment", [[], [0.0, 0.0]], ids=["tokens of vLLM", "and of an environment"])
def test_a_rollout_function_may_hand_on_what_vllm_reported(environment):
    vllm, reports = reporting(4)

    def function(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        completion_ids, rows = completed(vllm, prompts)
        return {"completion_ids": completion_ids, "logprobs": [[*row, *environment] for row in rows]}

    output = reporting_rollout_func(function, reports)(PROMPTS, None)
    assert output["logprobs"] == [row + environment for row in numbered(output["completion_ids"])]


@pytest.mark.parametrize("left_out", ["top_logprobs", "top_logprob_token_ids"])
def test_a_rollout_function_that_reports_nothing_is_refused(left_out):
    output: dict[str, Any] = {"completion_ids": [[5]], "logprobs": [[-1.0]]}
    output |= {"top_logprobs": [[[-1.0]]], "top_logprob_token_ids": [[[5]]]}
    del output[left_out]
    with pytest.raises(ValueError, match="rollout_func must return top_logprobs and top_logprob_token_ids"):
        reporting_rollout_func(lambda prompts, trainer: output, EngineTopLogprobs())(PROMPTS, None)


def test_reports_stay_with_their_tokens_over_tool_calls():
    """TRL joins the turns, with zeros for the tools' tokens, and cuts the last one; in whose numbers: test_recorded."""
    vllm, reports = reporting()
    completion_ids, first = completed(vllm, [[1, 5], [1, 9]])
    tool = [20, 21, 22]
    (more_ids,), (more,) = completed(vllm, [[1, 5, *completion_ids[0], *tool]])
    assert len(more_ids) > 1
    tokens = [completion_ids[0] + tool + more_ids[:-1], completion_ids[1]]
    rows = [first[0] + [0] * 3 + more[:-1], first[1]]
    mask = padded([[1] * len(ids) for ids in tokens], 20)
    policies = reports.policies(padded(rows, 20), padded(tokens, 20), mask, **CAPTURE)
    assert PackedPolicy.stack(policies).shape == (2, 20)
    policy, rest = policies[0].unpack()[: len(tokens[0])], policies[0].unpack()[len(tokens[0]) :]
    with torch.no_grad():
        logits = vllm.engine.model(torch.tensor([[1, 5, *tokens[0]]])).logits[0, 1:-1]
    expected = troll.capture(logits, torch.tensor(tokens[0]), top_k=8)
    of_model = torch.tensor(rows[0]) > 0
    assert (policy.token_ids == expected.token_ids)[of_model].all()
    assert not rest.used.any() and (rest.tail_log_prob == 0).all()


@pytest.mark.parametrize("truncated", [False, True])
def test_a_token_without_a_report_has_all_the_mass(truncated):
    """So that nothing downstream meets a token without a slot; the loss leaves it out."""
    reports = EngineTopLogprobs()
    rows = torch.tensor(reports.add([[5, 4]], [[[-0.5, -0.9327521], None]], [[[5, 8], None]]))
    (policy,) = reports.policies(rows, torch.tensor([[5, 4]]), torch.ones(1, 2), truncated=truncated, **CAPTURE)
    known, unknown = policy.unpack()[0], policy.unpack()[1]
    assert known.log_prob.item() == pytest.approx(-0.5)
    assert (unknown.log_prob, unknown.used.sum()) == (0, 1)


@pytest.mark.parametrize(
    ("settings", "has", "message"),
    [
        ({}, {"has_rollout_func": False, "has_tools": False}, "use_vllm=True, or pass a rollout_func"),
        ({}, {"has_rollout_func": True, "has_tools": True}, "tools needs use_vllm=True"),
        ({}, {"has_rollout_func": True, "has_tools": False}, None),
        ({"use_vllm": True}, {"has_rollout_func": False, "has_tools": True}, None),
    ],
)
def test_something_must_report(config, settings, has, message):
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        check_rollout_source(config(**settings), **has)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_p": 0.9, "truncated_ratio": False}, r"top_p=0.9 .* set top_p=1.0"),
        ({"top_k": 20, "truncated_ratio": False}, r"top_k=20 .* set top_k=0"),
        ({"min_p": 0.1, "surrogate": "clip"}, r"min_p=0.1 .* set min_p=0.0"),
        ({"generation_kwargs": {"top_p": 0.9}, "truncated_ratio": False}, "set top_p=1.0"),
        ({"vllm_structured_outputs_regex": "a+"}, "set vllm_structured_outputs_regex=None"),
    ],
)
def test_sampling_from_another_distribution_is_refused(config, settings, message):
    """What no configuration takes: test_sampling."""
    with pytest.raises(ValueError, match=message):
        check_sampling(config(**settings))


def test_sampling_from_the_policy_is_accepted(config):
    check_sampling(config(top_k=20, generation_kwargs={"top_p": 0.9}))  # the trust region is on the kept set
    kwargs = {"seed": 3, "stop": ["."], "temperature": 0.5, "top_k": -1, "min_p": 0}
    check_sampling(config(temperature=0.7, top_k=-1, min_p=0.0, generation_kwargs=kwargs))


def test_an_engine_that_reports_another_distribution_is_refused():
    check_engine("processed_logprobs")
    with pytest.raises(ValueError, match=r"returns raw_logprobs: .* --logprobs-mode processed_logprobs"):
        check_engine("raw_logprobs")


@pytest.mark.parametrize("mode", ["server", "colocate"])
def test_the_engines_setting_is_read_where_trl_keeps_it(make, mode):
    vllm = EngineGeneration(Engine(), None, make(GRPOTrainer).accelerator, mode)
    vllm.llm.llm_engine.model_config.logprobs_mode = "raw_logprobs"
    assert logprobs_mode(vllm) == "raw_logprobs"


def test_a_server_that_does_not_report_its_setting_is_refused(make):
    vllm = EngineGeneration(Engine(), None, make(GRPOTrainer).accelerator, "server")
    del vllm.llm.llm_engine.model_config.logprobs_mode
    with pytest.raises(ValueError, match=r"VLLM_SERVER_DEV_MODE=1.* failed: KeyError: 'logprobs_mode'"):
        logprobs_mode(vllm)


@pytest.mark.parametrize(
    ("mode", "cap", "number", "expected"),
    [("colocate", 20, 64, 64), ("colocate", 20, 8, 20), ("colocate", -1, 64, -1), ("server", 20, 64, 20)],
)
def test_the_cap_of_a_colocated_engine_is_raised(mode, cap, number, expected):
    vllm = EngineGeneration(Engine(), None, None, mode)
    config = vllm.llm.llm_engine.model_config
    config.max_logprobs = cap
    allow_log_probs(vllm, number)
    assert config.max_logprobs == expected


KL_BOUND = 0.02


@pytest.fixture(params=["vllm"])
def anchored(request, make, monkeypatch) -> Callable[..., TrollTrainer]:
    """Builds a trainer around an engine, in vLLM's place or as a rollout function."""

    def build(engine: Engine, **settings: Any) -> TrollTrainer:
        settings = {"anchor": "rollout", "support_top_k": 8, "kl_bound": KL_BOUND} | settings
        if request.param == "vllm":
            take_the_place_of_vllm(monkeypatch, engine)
            return make(use_vllm=True, vllm_mode="colocate", **settings)
        return make(rollout_func=RolloutFunc(engine), **settings)

    return build


either_engine = pytest.mark.parametrize("anchored", ["rollout_func", "vllm"], indirect=True)


def count_forwards(trainer: TrollTrainer) -> list[int]:
    """The rows of each forward pass of the trained model, from now on."""
    rows: list[int] = []

    def count(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        rows.append(len(inputs["input_ids"]))

    trainer.model.register_forward_pre_hook(count, with_kwargs=True)
    return rows


@either_engine
def test_the_engine_takes_the_place_of_the_old_policys_forward(anchored):
    trainer = anchored(Engine())
    forwards = count_forwards(trainer)
    trainer.train()
    assert forwards == [4, 4, 4, 4], "the four updates, and nothing else"
    # An engine with the trainer's own weights is the old policy, which the first update of a rollout sees.
    assert max(logged(trainer, "trust_region/kl_before_mean")[::2]) <= within(1e-5)
    assert max(logged(trainer, "trust_region/kl_after_max")) <= KL_BOUND * (1 + within(1e-3))


@either_engine
def test_training_with_an_exact_engine_equals_the_old_policy(anchored):
    """The same rollouts, of one engine; only the centre comes from elsewhere."""
    train_around_both(lambda anchor: anchored(Engine(), anchor=anchor, vllm_importance_sampling_correction=False))


def test_the_first_update_is_off_policy_too(anchored):
    """With one update per rollout the old policy would be the network's own; a stale engine's is not."""
    trainer = anchored(Engine(steps_old=1), steps_per_generation=1, max_steps=3)
    trainer.train()
    assert max(logged(trainer, "trust_region/kl_before_mean")) > 1e-4
    assert max(logged(trainer, "trust_region/kl_after_max")) <= KL_BOUND * (1 + within(1e-3))


@either_engine
def test_tokens_that_the_engine_does_not_know_are_not_trained_on(anchored):
    trainer = anchored(Engine(unknown=3), max_steps=2)
    for batch in tiny.rollout(trainer):
        assert (batch["completion_mask"] * batch["tool_mask"]).sum() < batch["completion_mask"].sum()
        assert batch["old_per_token_logps"].isfinite().all()
    with pytest.raises(IndexError):  # the tables do not outlive the rollout
        trainer.old_policy.reports.log_probs(torch.tensor([1]))
    trainer.train()
    assert all(math.isfinite(value) for name in ("loss", "grad_norm") for value in logged(trainer, name))
    assert min(logged(trainer, "sampling/unreported_fraction")) > 0


@pytest.mark.parametrize("steps_per_generation", [1, 2])
def test_a_reference_is_still_scored(anchored, steps_per_generation):
    """TRL asks for the old policy before it, but not where every update has a rollout of its own.

    With LoRA the reference is the trained model with its adapter off.
    """
    peft = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = anchored(Engine(), beta=0.1, steps_per_generation=steps_per_generation, peft_config=peft)
    forwards = count_forwards(trainer)
    inputs = tiny.rollout(trainer)[0]
    assert forwards == [4] * steps_per_generation, "only the reference's"
    mask = inputs["completion_mask"].bool()
    # The reference is the model itself, before it has learnt anything, and so is the engine.
    torch.testing.assert_close(
        inputs["ref_per_token_logps"][mask], inputs["old_per_token_logps"][mask], rtol=0, atol=1e-5
    )
    assert not torch.equal(inputs["ref_per_token_logps"], inputs["old_per_token_logps"])


def test_mismatch_with_the_engine_is_logged_before_any_update(make, monkeypatch):
    """By weights that are a rollout old: none at the first rollout."""
    take_the_place_of_vllm(monkeypatch, Engine(steps_old=1))
    trainer = make(use_vllm=True, vllm_mode="colocate")
    with mock.patch.object(trainer.old_policy, "added_to", wraps=trainer.old_policy.added_to) as added_to:
        trainer.train()
    seen = [call.args[0] for call in added_to.call_args_list]
    first, *later = logged(trainer, "sampling/mismatch_kl")
    assert abs(first) <= within(1e-6) and min(later) > 1e-3
    for rollout, mean, largest in zip(seen, [first, *later], logged(trainer, "sampling/mismatch_kl_max"), strict=True):
        at = rollout["completion_mask"].bool()
        log_ratio = (rollout["old_per_token_logps"].double() - rollout["sampling_per_token_logps"].double())[at]
        kl = log_ratio.exp() - 1 - log_ratio
        assert mean == pytest.approx(float(kl.mean()), rel=1e-3, abs=1e-6)
        assert largest == pytest.approx(float(kl.max()), rel=1e-3, abs=1e-6)


def test_evaluation_is_trls(anchored):
    trainer = anchored(Engine())
    metrics = trainer.evaluate(tiny.make_dataset(4))
    assert math.isfinite(metrics["eval_reward"]) and not any("trust_region" in name for name in metrics)


def test_trainer_checks_the_source_and_the_sampling(anchored, make):
    with pytest.raises(ValueError, match=r"set top_p=1\.0"):
        anchored(Engine(), top_p=0.5, truncated_ratio=False)
    with pytest.raises(ValueError, match="use_vllm=True, or pass a rollout_func"):
        make(anchor="rollout")


def other_vocabulary(prompts: Any, ids: Any, log_probs: Any, token_ids: Any) -> Any:
    """All tokens have ids beyond the trainer's."""
    beyond = [[token + VOCAB_SIZE for token in completion] for completion in ids]
    return prompts, beyond, log_probs, [[[x + VOCAB_SIZE for x in at] for at in each] for each in token_ids]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (other_vocabulary, rf"must be in \[0, {VOCAB_SIZE}\), got"),
        (lambda p, ids, x, y: (p, ids, None, None), "asked vLLM for 8 log-probabilities a token, and it returned 0"),
        (
            lambda p, ids, x, y: (p, ids, *([[at[:5] for at in each] for each in lists] for lists in (x, y))),
            "asked vLLM for 8 log-probabilities a token, and it returned 5",
        ),
    ],
    ids=["other vocabulary", "no log-probs", "fewer log-probs"],
)
def test_a_faulty_rollout_ends_training_before_an_update(anchored, monkeypatch, fault, message):
    generate = EngineGeneration.generate
    monkeypatch.setattr(
        EngineGeneration, "generate", lambda self, *args, **kwargs: fault(*generate(self, *args, **kwargs))
    )
    trainer = anchored(Engine())
    before = tiny.parameters(trainer.model)
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert not tiny.changed(before, trainer.model)
