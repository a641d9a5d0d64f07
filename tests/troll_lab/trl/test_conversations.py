"""Rollouts of several conversations a sample: which rows they become, what trains on them, and what is counted."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from tests.tolerance import rounding, within
from tests.troll.trl import tiny
from tests.troll.trl.engine import Engine, RolloutFunc, take_the_place_of_vllm
from troll.grading import Grader, Verdict
from troll.trl import complete, sampling
from troll.trl.estimators import ESTIMATORS
from troll.trl.old_policy import OLD_POLICY
from troll.trust_region.policy.packed import PackedPolicy
from troll_lab.trl.conversations import Conversation, completion_metrics, read

pytestmark = pytest.mark.filterwarnings("ignore:.*experimental feature", "ignore:.*could not be judged")

#: Three groups, of which the middle one lies on both of two processes.
SETTINGS: dict[str, Any] = {"per_device_train_batch_size": 6, "max_completion_length": 6, "learning_rate": 1e-3}

END = tiny.COMMON["eos_token_id"][0]


def conversation(seed: int) -> dict[str, list[int]]:
    """Tokens, the same for the same number; every third completion ends."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(length: int) -> list[int]:
        return torch.randint(7, 47, (length,), generator=generator).tolist()

    end = [END] if seed % 3 == 0 else []
    return {"prompt_ids": tokens(3 + seed % 4), "completion_ids": tokens(2 + seed % 3) + end}


@dataclass
class Rollout:
    """A rollout function with earlier conversations for each of all processes' samples; keeps what it has returned."""

    #: The numbers; None for a function that returns nothing of the kind.
    earlier: Sequence[int] | None
    given: dict[str, Any] = field(default_factory=dict)

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        first = trainer.accelerator.process_index * len(prompts)
        samples = range(first, first + len(prompts))
        last = [conversation(1000 + i) for i in samples]
        self.given = {name: [each[name] for each in last] for name in ("prompt_ids", "completion_ids")}
        self.given["logprobs"] = None
        if self.earlier is not None:
            self.given["earlier"] = [[conversation(10 * i + j) for j in range(self.earlier[i])] for i in samples]
        return dict(self.given)


def by_hand(
    model: torch.nn.Module,
    samples: Sequence[Sequence[dict[str, list[int]]]],
    advantages: Sequence[float],
    rows: int | None = None,
) -> dict[str, torch.Tensor]:
    """The policy gradient of conversations, each read by itself, where old and new policy are equal.

    For the loss "grpo", the sum of their means is divided by a number of rows; for "dapo", all tokens have one mean.
    """
    model.zero_grad()
    tokens = sum(len(each["completion_ids"]) for several in samples for each in several)
    for several, advantage in zip(samples, advantages, strict=True):
        for each in several:
            prompt, completion = each["prompt_ids"], each["completion_ids"]
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            log_probs = torch.log_softmax(logits, -1).gather(-1, torch.tensor(completion).unsqueeze(-1))
            (-float(advantage) * log_probs.sum() / (rows * len(completion) if rows else tokens)).backward()
    return tiny.gradients(model)


def samples_of(given: dict[str, Any]) -> list[list[dict[str, list[int]]]]:
    """The conversations of each sample, the last one first."""
    last = zip(given["prompt_ids"], given["completion_ids"], strict=True)
    earlier = given.get("earlier") or [[]] * len(given["prompt_ids"])
    return [
        [{"prompt_ids": prompt, "completion_ids": completion}, *several]
        for (prompt, completion), several in zip(last, earlier, strict=True)
    ]


def mean_gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """The mean of the gradients of a rollout's micro-batches, by parameter."""
    each = [tiny.loss_and_gradients(trainer, inputs)[1] for inputs in tiny.rollout(trainer)]
    return {name: torch.stack([gradients[name] for gradients in each]).mean(0) for name in each[0]}


#: In the first process, no earlier conversations; in the second, 11.
UNEQUAL = [0, 0, 0, 0, 0, 0, 3, 0, 1, 4, 2, 1]


def work(mode: str, make: tiny.Maker, folder: Path) -> dict[str, Any]:
    """A rollout with its metrics, the gradients of its rows in this process, and a run."""
    found: dict[str, Any] = {}
    for loss in ("grpo", "dapo"):
        rollout = Rollout(UNEQUAL)
        trainer = make(rollout_func=rollout, loss_type=loss, **tiny.halved(SETTINGS))
        gradients = mean_gradients(trainer)
        kept = [tiny.tensors(inputs) for inputs in trainer._buffered_inputs]
        found[loss] = {"gradients": gradients, "inputs": kept, "samples": samples_of(rollout.given)}
    trainer = make(rollout_func=Rollout(UNEQUAL), **tiny.halved(SETTINGS), advantage_estimator="reinforce_plus_plus")
    trainer.train()
    return found | {"log": trainer.state.log_history, "parameters": tiny.parameters(trainer.model)}


#: Of 12 samples: with the 12 last conversations 25 rows, and a filler.
EARLIER = [0, 2, 1, 0, 5, 0, 0, 1, 3, 0, 0, 1]


def make_one(make: tiny.Maker, earlier: Any = EARLIER, **settings: Any) -> tuple[Any, Rollout]:
    rollout = Rollout(earlier)
    return make(**{"rollout_func": rollout, **SETTINGS, **settings}), rollout


def rows_of(inputs: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Prompts and completions of a rollout's rows, without padding and without what does not count."""
    counted = inputs["completion_mask"] * inputs["tool_mask"]
    parts = inputs["prompt_ids"], inputs["prompt_mask"], inputs["completion_ids"], counted
    return [(p[m.bool()].tolist(), c[n.bool()].tolist()) for p, m, c, n in zip(*parts, strict=True)]


def pair(one: dict[str, list[int]]) -> tuple[list[int], list[int]]:
    return one["prompt_ids"], one["completion_ids"]


def owners(samples: list[list[Any]]) -> list[int]:
    """The sample of each row that is not a filler."""
    return [*range(len(samples)), *(i for i, several in enumerate(samples) for _ in several[1:])]


def test_rows_are_last_then_earlier_conversations_then_fillers(make):
    trainer, rollout = make_one(make)
    rolled_out = tiny.rolled_out(trainer)
    samples = samples_of(rollout.given)
    rows = rows_of(rolled_out)
    assert rows[:25] == [pair(several[0]) for several in samples] + [
        pair(one) for several in samples for one in several[1:]
    ]
    assert rows[25:] == [([trainer.processing_class.pad_token_id], [])]
    expected = tiny.group_advantages(tiny.reward(rollout.given["completion_ids"]))[owners(samples)]
    torch.testing.assert_close(rolled_out["advantages"][:25], expected)
    assert rolled_out["num_items_in_batch"] == sum(len(completion) for _, completion in rows)
    assert all(len(value) == 26 for value in rolled_out.values() if not torch.is_tensor(value) or value.ndim)


#: Four micro-batches, whose rows are filled up to 28.
SMALL = {"steps_per_generation": 4, "per_device_train_batch_size": 3}


def test_every_row_is_in_one_micro_batch_with_its_old_policy(make):
    trainer, rollout = make_one(make, **SMALL)
    buffered = tiny.rollout(trainer)
    assert [len(inputs["advantages"]) for inputs in buffered] == [7] * 4
    wanted = [pair(one) for several in samples_of(rollout.given) for one in several]
    found = [row for inputs in buffered for row in rows_of(inputs)]
    assert sorted(row for row in found if row[1]) == sorted(wanted)
    for inputs in buffered:
        old = PackedPolicy.stack(inputs[OLD_POLICY]).unpack()
        sampled = old.token_ids.gather(-1, old.slot.unsqueeze(-1)).squeeze(-1)
        mask = inputs["completion_mask"].bool()
        assert sampled[mask].tolist() == inputs["completion_ids"][mask].tolist()


@pytest.mark.parametrize(("loss", "surrogate"), [("grpo", "troll"), ("dapo", "none")])
def test_all_conversations_get_the_gradient_by_hand(make, loss, surrogate):
    """In float64, but for advantages, and the ratio of 1."""
    trainer, rollout = make_one(make, surrogate=surrogate, loss_type=loss, model=make.model().double())
    gradients = mean_gradients(trainer)
    samples = samples_of(rollout.given)
    advantages = tiny.group_advantages(tiny.reward(rollout.given["completion_ids"])).tolist()
    tiny.assert_same_gradients(gradients, by_hand(trainer.model, samples, advantages, 26 if loss == "grpo" else None))


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 5, "beta": 0.1, "loss_type": "bnpo", "diagnostics_steps": 1},
        {"loss_type": "dr_grpo", "gradient_accumulation_steps": 2, "constraint": "sequence", **SMALL},
        {"importance_sampling_level": "sequence", "mask_truncated_completions": True},
        {"surrogate": "clip", "num_iterations": 2},
    ],
    ids=str,
)
def test_fillers_are_no_trouble_to_other_settings(make, settings):
    """One process has a filler, or three."""
    trainer, _ = make_one(make, **settings)
    before = tiny.parameters(trainer.model)
    trainer.train()
    assert all(math.isfinite(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)
    assert tiny.changed(before, trainer.model) == before.keys()


def test_no_earlier_conversations_change_nothing(make):
    def trained(earlier: Any) -> dict[str, torch.Tensor]:
        trainer, _ = make_one(make, earlier)
        torch.manual_seed(0)
        trainer.train()
        return tiny.parameters(trainer.model)

    without, empty, some = trained(None), trained([0] * 12), trained(EARLIER)
    assert all(torch.equal(empty[name], value) for name, value in without.items())
    assert not all(torch.equal(some[name], value) for name, value in without.items())


@pytest.mark.parametrize(
    ("estimator", "kl_in_reward"),
    [("rloo", False), ("reinforce_plus_plus", True), ("reinforce_plus_plus_baseline", True)],
)
def test_estimators_count_all_tokens_of_a_sample(make, estimator, kl_in_reward):
    settings = {"kl_in_reward": True, "beta": 0.1} if kl_in_reward else {}
    trainer, rollout = make_one(make, advantage_estimator=estimator, **settings)
    if kl_in_reward:  # a reference that differs
        tiny.move(trainer.model, 0.1)
    rolled_out = tiny.rolled_out(trainer)
    samples = samples_of(rollout.given)
    rewards = torch.tensor(tiny.reward(rollout.given["completion_ids"]))
    counts = torch.tensor([sum(len(one["completion_ids"]) for one in several) for several in samples])
    if kl_in_reward:
        mask = rolled_out["completion_mask"] * rolled_out["tool_mask"]
        kl = ((rolled_out["old_per_token_logps"] - rolled_out["ref_per_token_logps"]) * mask).sum(1)[:25]
        assert kl.abs().max() > 1e-3
        rewards = rewards - 0.1 * torch.zeros(12).index_add(0, torch.tensor(owners(samples)), kl)
    of_sequences = ESTIMATORS[estimator].of_sequences
    assert of_sequences is not None
    expected = of_sequences(rewards, 4, counts)[owners(samples)]
    torch.testing.assert_close(rolled_out["advantages"][:25], expected, rtol=1e-4, atol=1e-4)


class Last(Grader):
    """Judges by the number of tokens that reach it; a sample with an odd number cannot be judged."""

    def grade(self, completions: Any, completion_ids: Any = (), **columns: Any) -> list[Verdict]:
        lengths = [len(ids) for ids in completion_ids]
        return [Verdict(None if n % 2 else float(n % 4 == 0), str(n), "unscored: odd") for n in lengths]


def test_unjudged_samples_are_left_out_with_all_conversations(make):
    trainer, rollout = make_one(make, reward_funcs=Last())
    rolled_out = tiny.rolled_out(trainer)
    samples = samples_of(rollout.given)
    judged = [len(several[0]["completion_ids"]) % 2 == 0 for several in samples]
    assert any(judged) and not all(judged)
    assert [bool(completion) for _, completion in rows_of(rolled_out)] == [judged[i] for i in owners(samples)] + [False]


def test_masks_and_log_probabilities_go_with_their_conversations(make):
    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        last = [conversation(i) for i in range(12)]
        first: dict[str, Any] = {**conversation(50), "env_mask": [1] * len(conversation(50)["completion_ids"])}
        first["env_mask"][0] = 0
        first["logprobs"] = [-0.5] * len(first["completion_ids"])
        return {
            **{name: [one[name] for one in last] for name in ("prompt_ids", "completion_ids")},
            "logprobs": [[-1.0] * len(one["completion_ids"]) for one in last],
            "earlier": [[first], *[[]] * 11],
        }

    rolled_out = tiny.rolled_out(make(rollout_func=rollout, **SETTINGS))
    assert len(rolled_out["advantages"]) == 14
    length = len(conversation(50)["completion_ids"])
    assert rolled_out["tool_mask"][12, :length].tolist() == [0] + [1] * (length - 1)
    for row, value in ((0, -1.0), (12, -0.5)):
        mask = rolled_out["completion_mask"][row].bool()
        assert set(rolled_out["sampling_per_token_logps"][row][mask].tolist()) == {value}


def test_metrics_count_all_conversations_and_no_filler(make):
    trainer, rollout = make_one(make)
    tiny.rolled_out(trainer)
    rows = list(chain.from_iterable(samples_of(rollout.given)))
    ended: list[bool] = [one["completion_ids"][-1] == END for one in rows]
    lengths = [len(one["completion_ids"]) for one in rows]
    metrics = trainer._metrics["train"]
    assert metrics["num_tokens"] == [sum(lengths) + sum(len(one["prompt_ids"]) for one in rows)]
    for name, value in completion_metrics(list(zip(lengths, ended, strict=True))).items():
        assert metrics[name] == [pytest.approx(value)], name
    assert metrics["completions/mean_length"] == [pytest.approx(sum(lengths) / 25)]
    assert metrics["completions/clipped_ratio"] == [pytest.approx(1 - sum(ended) / 25)]
    assert metrics["conversations/per_sample"] == [25 / 12]
    assert metrics["conversations/filled"] == [pytest.approx(1 / 26)]
    assert metrics["reward"] == [pytest.approx(sum(tiny.reward(rollout.given["completion_ids"])) / 12)]


def test_completion_metrics_are_trls(make):
    trainer, rollout = make_one(make, None)
    tiny.rolled_out(trainer)
    counted = completion_metrics([(len(ids), ids[-1] == END) for ids in rollout.given["completion_ids"]])
    assert {name: trainer._metrics["train"][name] for name in counted} == {
        name: [pytest.approx(value)] for name, value in counted.items()
    }
    assert "conversations/per_sample" not in trainer._metrics["train"]
    without_an_end = completion_metrics([(3, False), (5, False)])
    assert without_an_end["completions/mean_length"] == 4.0 and without_an_end["completions/clipped_ratio"] == 1.0
    assert without_an_end["completions/max_terminated_length"] == 0.0


def test_evaluation_counts_all_conversations_and_scores_the_last(make):
    def evaluated(earlier: Any) -> dict[str, float]:
        held_out = {"eval_dataset": tiny.make_dataset(3), "num_generations_eval": 4, "per_device_eval_batch_size": 12}
        return make_one(make, earlier, **held_out)[0].evaluate()

    some, none = evaluated(EARLIER), evaluated(None)
    assert some["eval_reward"] == none["eval_reward"]
    assert some["eval_completions/mean_length"] != none["eval_completions/mean_length"]


def documented() -> dict[str, Any]:
    """What the example of docs/reference/lab-trl.md defines."""
    page = (Path(__file__).parents[3] / "docs" / "reference" / "lab-trl.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "def rollout(" in block]
    found: dict[str, Any] = {}
    exec(code, found)
    return found


#: Questions and documents as the example takes them.
DOCUMENTS = Dataset.from_dict({"prompt": [f"{i}?|{'ab' * 4}{'cd' * 4}" for i in range(6)]})


def test_the_documented_rollout_function_trains(make):
    """Each memory is in the next prompt, and the answer's prompt has nothing of the document."""
    given: list[dict[str, Any]] = []

    def kept(prompts: list[str], trainer: Any) -> dict[str, Any]:
        given.append(documented()["rollout"](prompts, trainer))
        return dict(given[-1])

    trainer = make(rollout_func=kept, train_dataset=DOCUMENTS, **SETTINGS)
    before = tiny.parameters(trainer.model)
    trainer.train()
    assert trainer.state.log_history[0]["conversations/per_sample"] == 3
    assert tiny.changed(before, trainer.model) == before.keys()
    tokenizer = trainer.processing_class
    for i, (first, second) in enumerate(given[0]["earlier"]):
        memories = [tokenizer.decode(one["completion_ids"], skip_special_tokens=True) for one in (first, second)]
        question = f"{tokenizer.convert_ids_to_tokens(first['prompt_ids'][0])}?"
        texts = [f"{question}||abababab=", f"{question}|{memories[0]}|cdcdcdcd=", f"{question}|{memories[1]}="]
        found = [first["prompt_ids"], second["prompt_ids"], given[0]["prompt_ids"][i]]
        assert found == tokenizer(texts)["input_ids"]


def test_complete_samples_what_the_trainer_would(make):
    trainer = make(**SETTINGS)
    prompts = trainer.processing_class(["1+2=", "ab"])["input_ids"]
    torch.manual_seed(3)
    completions, log_probs = complete(trainer, prompts)
    torch.manual_seed(3)
    assert (completions, log_probs) == trainer._generate_single_turn(prompts, None, {}, 4)
    assert len(completions) == 2 and log_probs is None


def test_complete_asks_equally_often_on_all_processes(make, monkeypatch):
    """As the first of two processes, of which the other asks about two; its own answers are its own."""
    trainer = make()
    asked = []

    def completions(trainer, prompts):
        asked.append(prompts)
        return [[7] * len(prompt) for prompt in prompts], [[0.5] * len(prompt) for prompt in prompts]

    monkeypatch.setattr(sampling.seam, "completions", completions)
    monkeypatch.setattr(sampling, "gather_object", lambda counts: [*counts, 2])
    assert complete(trainer, [[5, 6, 7]]) == ([[7, 7, 7]], [[0.5, 0.5, 0.5]])
    assert complete(trainer, []) == ([], [])
    assert list(map(len, asked)) == [2, 2]


def test_complete_has_the_log_probabilities_of_an_engine(make, monkeypatch):
    take_the_place_of_vllm(monkeypatch, Engine())
    page = documented()
    settings = {"use_vllm": True, "vllm_mode": "colocate", "rollout_func": page["rollout"], "train_dataset": DOCUMENTS}
    rolled_out = tiny.rolled_out(make(**SETTINGS, **settings))
    mask = rolled_out["completion_mask"].bool()
    assert len(mask) == 36
    sampled, scored = rolled_out["sampling_per_token_logps"][mask], rolled_out["old_per_token_logps"][mask]
    torch.testing.assert_close(sampled, scored, rtol=0, atol=within(1e-4))  # the engine has the trainer's own weights


PICTURES = Dataset.from_dict({"prompt": [[{"role": "user", "content": "a"}]] * 16, "image": [None] * 16})


def of_engine(prompts: list[str], trainer: Any) -> dict[str, Any]:
    return RolloutFunc(Engine())(prompts, trainer) | {"earlier": [[conversation(0)]] * len(prompts)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantage_estimator": "gae"}, 'advantage_estimator="gae" takes no earlier'),
        ({"advantage_estimator": "rloo_tokens"}, 'advantage_estimator="rloo_tokens" takes no earlier'),
        ({"train_dataset": PICTURES}, "earlier where the data have images"),
        ({"anchor": "rollout", "rollout_func": of_engine}, 'anchor="rollout" takes no earlier of rollout_func'),
    ],
)
def test_what_has_no_place_for_more_rows_is_refused(make, settings, message):
    trainer, rollout = make_one(make, **settings)
    with pytest.raises(ValueError, match=message):
        tiny.rolled_out(trainer)
    if "advantage_estimator" in settings:
        rollout.earlier = None
        tiny.rolled_out(trainer)


ONE = {"prompt_ids": [1], "completion_ids": [2, 3]}


@pytest.mark.parametrize(
    ("earlier", "message"),
    [
        ([[]], "an entry for each of 2 prompts, got 1"),
        (3, "an entry for each of 2 prompts, got int"),
        ([[], [ONE, {"prompt_ids": [1]}]], r"earlier\[1\]\[1\] of rollout_func must be a dictionary with"),
        ([[ONE | {"reward": [1]}], []], r"earlier\[0\]\[0\] of rollout_func must be a dictionary"),
        ([[[1, 2]], []], r"must be a dictionary .* got \[1, 2\]"),
        ([[ONE | {"completion_ids": []}], []], "at least one token in its prompt and in its completion"),
        ([[ONE | {"env_mask": [1]}], []], r"env_mask of earlier\[0\]\[0\] .* has 1 entries for 2 tokens"),
    ],
)
def test_read_refuses_another_form(earlier, message):
    with pytest.raises(ValueError, match=message):
        read(earlier, 2, log_probs=False)


def test_read_makes_numbers_of_arrays_and_tensors():
    given = {"prompt_ids": torch.tensor([1, 2]), "completion_ids": np.array([3, 4]), "env_mask": np.array([1, 0])}
    ((found,),) = read([[given]], 1, log_probs=False)
    assert json.loads(json.dumps([found.prompt_ids, found.completion_ids, found.mask])) == [[1, 2], [3, 4], [1, 0]]


def test_read_needs_log_probabilities_where_the_last_has_them():
    assert read([[ONE]], 1, log_probs=False) == [[Conversation([1], [2, 3])]]
    assert read(None, 2, log_probs=True) == [[], []]
    with pytest.raises(ValueError, match=r"earlier\[0\]\[0\] of rollout_func needs logprobs"):
        read([[ONE]], 1, log_probs=True)


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_two_processes_weigh_every_conversation_alike(left_by_two, make, loss):
    """One has six rows of its own, the other seventeen: both get 18, and their mean is the gradient by hand."""
    found = [each[loss] for each in left_by_two("ddp", "conversations")]
    assert [sum(len(inputs["advantages"]) for inputs in each["inputs"]) for each in found] == [18, 18]
    samples = [several for each in found for several in each["samples"]]
    assert [len(several) - 1 for several in samples] == UNEQUAL
    tokens = sum(len(one["completion_ids"]) for several in samples for one in several)
    assert {float(inputs["num_items_in_batch"]) for each in found for inputs in each["inputs"]} == {float(tokens)}
    advantages = tiny.group_advantages(tiny.reward([several[0]["completion_ids"] for several in samples])).tolist()
    mean = {name: (value + found[1]["gradients"][name]) / 2 for name, value in found[0]["gradients"].items()}
    expected = by_hand(make.model(), samples, advantages, 36 if loss == "grpo" else None)
    # A sum over up to 18 rows of 6 tokens in another order, too.
    tiny.assert_same_gradients(mean, expected, tiny.GRADIENT_ERROR + rounding(2 * 18 * 6))


def test_two_processes_train_and_log_the_same(left_by_two):
    first, second = left_by_two("ddp", "conversations")
    torch.testing.assert_close(first["parameters"], second["parameters"], rtol=0, atol=0)
    steps = [entry for entry in first["log"] if "loss" in entry]
    assert len(steps) == 4
    for entry in steps:
        assert math.isfinite(entry["loss"]) and entry["grad_norm"] > 0
        if "conversations/per_sample" in entry:
            assert entry["conversations/per_sample"] == pytest.approx(23 / 12)
            assert entry["conversations/filled"] == pytest.approx(13 / 36)
