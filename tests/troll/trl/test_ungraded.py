"""Completions that a grader could not judge take no part in a rollout, even if other rewards score them."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import compress, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from tests.troll.trl import tiny
from troll.grading import Grader, Verdict, leaves_unscored
from troll.trl.ungraded import NothingJudgedError, UngradedFilter
from troll_lab.rewards.code import CodeGrader, passed_fraction

pytestmark = pytest.mark.filterwarnings("ignore:.*(could not be judged|is on-policy)")

#: Three groups, of which the middle one lies on both of two processes.
SETTINGS: dict[str, Any] = {"per_device_train_batch_size": 6}
GROUP = tiny.DEFAULTS["num_generations"]
NAN = math.nan


def stuck(text: str) -> bool:
    """Whether no sandbox takes the text."""
    return sum(map(ord, text)) % 3 == 0


def success(text: str) -> float:
    """What it is worth, if it can be judged."""
    return float(len(set(text)) % 2)


class Sometimes(Grader):
    """A third of the texts cannot be judged."""

    def grade(self, completions: Any, **columns: Any) -> list[Verdict]:
        return [Verdict(None if stuck(text) else success(text), text, "unscored: no process") for text in completions]


def form(completions: Any, **_: Any) -> list[float]:
    """Pays for something else, and for every text."""
    return [len(text) / 8 for text in completions]


class Never(Grader):
    """Nothing can be judged."""

    def grade(self, completions: Any, **columns: Any) -> list[Verdict]:
        return [Verdict(None, text, "unscored: no process is left") for text in completions]


class InTurn(Grader):
    """Judges a rollout or not, one after the other, by a pattern."""

    def __init__(self, *judges: bool) -> None:
        self._judges = list(judges)

    def grade(self, completions: Any, **columns: Any) -> list[Verdict]:
        judges = self._judges.pop(0)
        return [Verdict(success(text) if judges else None, text, "unscored: no process") for text in completions]


def shy(completions: Any, **_: Any) -> list[float | None]:
    """An ordinary function that says nothing of some texts."""
    return [None if stuck(text) else success(text) for text in completions]


def make_one(make: tiny.Maker, **settings: Any) -> Any:
    return make(**{"reward_funcs": [Sometimes(), form], **SETTINGS, **settings})


def part(rollout: dict[str, Any], chosen: torch.Tensor) -> dict[str, Any]:
    """Some rows of a rollout."""

    def of(value: Any) -> Any:
        if torch.is_tensor(value):
            return value[chosen] if value.ndim else value
        return list(compress(value, chosen))

    return {name: of(value) for name, value in rollout.items()}


def expected_advantages(completions: list[str]) -> torch.Tensor:
    """GRPO's, over those of a group that were judged, from success and form together."""
    rewards = torch.tensor([NAN if stuck(text) else success(text) + len(text) / 8 for text in completions])
    advantages = torch.zeros(len(completions))
    for start in range(0, len(completions), GROUP):
        judged = start + (~rewards[start : start + GROUP].isnan()).nonzero().flatten()
        own = rewards[judged]
        if len(own) > 1:
            advantages[judged] = (own - own.mean()) / (own.std() + 1e-4)
    return advantages


def test_whose_none_means_that_a_row_could_not_be_judged():
    share = passed_fraction(CodeGrader(workers=1, sandbox=lambda *_, **__: []))
    assert leaves_unscored(Never()) and leaves_unscored(share) and not leaves_unscored(shy)
    rewards = torch.tensor([[1.0, 0.5, NAN], [NAN, 0.5, 0.0], [0.0, NAN, 1.0]])
    unscored = UngradedFilter(ACCELERATOR, [Never(), shy, form], torch.ones(3))
    assert unscored.excluded(rewards).isnan().tolist() == [[False, False, True], [True] * 3, [False, True, False]]
    assert unscored.metrics(rewards) == {"rewards/unscored": pytest.approx(1 / 3)}
    logged = UngradedFilter(ACCELERATOR, [Never(), shy, form], torch.tensor([0.0, 1.0, 1.0]))
    assert torch.equal(logged.excluded(rewards).isnan(), rewards.isnan()) and logged.metrics(rewards) == {}
    without = UngradedFilter(ACCELERATOR, [shy, form], torch.ones(2))
    assert torch.equal(without.excluded(rewards[:, 1:]).isnan(), rewards[:, 1:].isnan())
    assert without.metrics(rewards[:, 1:]) == {}


def test_an_unjudged_row_is_in_no_baseline_and_no_loss(make):
    trainer = make_one(make, loss_type="dapo")
    rollout = tiny.rolled_out(trainer)
    completions = list(trainer._logs["completion"])
    rows = torch.tensor([stuck(text) for text in completions])
    assert 0 < rows.sum() < len(rows) - GROUP, "nothing to leave out, or to keep"
    torch.testing.assert_close(rollout["advantages"], expected_advantages(completions), rtol=1e-4, atol=1e-4)
    mask = rollout["completion_mask"] * rollout["tool_mask"]
    assert not mask[rows].any() and (rollout["tool_mask"][~rows] == 1).all()
    assert rollout["completion_mask"][rows].any(1).all(), "the model still reads what it has written"
    assert float(rollout["num_items_in_batch"]) == float(mask.sum())
    metrics = trainer._metrics["train"]
    assert metrics["rewards/unscored"] == [pytest.approx(float(rows.float().mean()))]
    kept = [text for text in completions if not stuck(text)]
    assert metrics["rewards/success/mean"] == [pytest.approx(sum(map(success, kept)) / len(kept))]


def test_none_of_an_ordinary_function_means_what_it_does_in_trl(make):
    trainer = make_one(make, reward_funcs=[shy, form])
    rollout = tiny.rolled_out(trainer)
    assert any(stuck(text) for text in trainer._logs["completion"])
    assert "tool_mask" not in rollout and "rewards/unscored" not in trainer._metrics["train"]
    expected = tiny.rolled_out(make(GRPOTrainer, reward_funcs=[shy, form], **SETTINGS))
    torch.testing.assert_close(rollout["advantages"], expected["advantages"])


@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.1, "loss_type": "grpo"},
        {"surrogate": "clip"},
        {"constraint": "sequence", "loss_type": "dr_grpo"},
        {"advantage_estimator": "reinforce_plus_plus", "num_generations": 6},
        {"importance_sampling_level": "sequence", "beta": 0.1, "entropy_coef": 0.1},
        {"surrogate": "kl_penalty", "top_entropy_quantile": 0.5, "loss_type": "bnpo"},
    ],
    ids=str,
)
def test_only_judged_rows_move_the_model_as_if_alone(make, settings):
    assert_only_judged_moves_the_model(make, **settings)


def assert_only_judged_moves_the_model(make: tiny.Maker, **settings: Any) -> None:
    trainer = make_one(make, kl_bound=0.01, **{"loss_type": "dapo", **settings})
    trainer.current_gradient_accumulation_steps = 1
    rollout = tiny.rolled_out(trainer)
    tiny.move(trainer.model, 0.1)
    judged = torch.tensor([not stuck(text) for text in trainer._logs["completion"]])
    _, found = tiny.loss_and_gradients(trainer, rollout)
    _, expected = tiny.loss_and_gradients(trainer, part(rollout, judged))
    # These divide by the number of completions, and the others weigh what they always do.
    share = float(judged.float().mean()) if trainer.loss_type in ("grpo", "dr_grpo") else 1.0
    assert 0 < judged.sum() < len(judged) and any(gradient.any() for gradient in expected.values())
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, share * expected[name], rtol=1e-4, atol=1e-5)
    if settings.get("entropy_coef", 0) == 0:
        loss, gradients = tiny.loss_and_gradients(trainer, part(rollout, ~judged))
        assert loss == 0.0 and not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize(
    ("settings", "judged", "moved"),
    [
        ({}, [True, False, True], [True, True, False, False, True, True]),
        # An update of one rollout that was judged and one that was not.
        ({"gradient_accumulation_steps": 4}, [True, False, False, True], [True, True]),
    ],
    ids=["group", "accumulated"],
)
def test_an_update_of_nothing_judged_leaves_weights_and_momentum(make, settings, judged, moved):
    assert_moves_where_judged(make, judged, moved, **settings)


def assert_moves_where_judged(make: tiny.Maker, judged: list[bool], moved: list[bool], **settings: Any) -> None:
    weights: list[dict[str, torch.Tensor]] = []

    class Keep(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            weights.append(state())

    def state() -> dict[str, torch.Tensor]:
        critic = getattr(trainer, "critic", None)  # of a trainer that has one
        parts: dict[Any, Any] = {"policy": trainer.model.state_dict()}
        parts |= {"critic": critic.model.state_dict()} if critic else {}
        parts |= trainer.optimizer.state_dict()["state"]
        return {f"{part} {name}": value.clone() for part, entry in parts.items() for name, value in entry.items()}

    steps: dict[str, Any] = {"steps_per_generation": 2, "max_steps": len(moved), "weight_decay": 0.1}
    trainer = make(reward_funcs=[InTurn(*judged)], callbacks=[Keep()], **steps, **settings)
    trainer.create_optimizer()
    weights.append(state())
    trainer.train()
    changes = [
        any(name not in old or not torch.equal(old[name], new[name]) for name in new) for old, new in pairwise(weights)
    ]
    assert changes == moved


def test_where_nothing_can_be_judged_any_more_training_ends(make):
    trainer = make(reward_funcs=[Never(), form], max_steps=8, beta=0.1, advantage_estimator="rloo")
    before = tiny.parameters(trainer.model)
    message = "nothing could be judged in 3 rollouts in a row, most often because of: no process is left"
    with pytest.raises(NothingJudgedError, match=message):
        trainer.train()
    assert trainer.state.global_step == 4  # of two rollouts
    assert tiny.logged(trainer, "rewards/unscored") == [1.0, 1.0]
    assert not tiny.changed(before, trainer.model)


JUDGED, WRONG = Verdict(0.0, "program", "wrong answer"), Verdict(0.0, None, "no program")
STUCK, OTHER = (Verdict(None, "program", f"unscored: {reason}") for reason in ("no memory", "no process"))


def rollout_of(rows: int) -> dict[str, torch.Tensor]:
    return {"completion_mask": torch.ones(rows, 2), "num_items_in_batch": torch.tensor(2.0 * rows)}


def roll_out(unscored: UngradedFilter, *verdicts: Sequence[Verdict]) -> None:
    """A rollout, judged by one grader after the other."""
    for grader, own in zip(unscored._graders, verdicts, strict=True):
        grader.latest = own
    rewards = [[NAN if each.score is None else each.score for each in row] for row in zip(*verdicts, strict=True)]
    unscored.count_verdicts()
    unscored.observe(torch.tensor(rewards))
    unscored.without(rollout_of(len(rewards)), lambda values: values)


ACCELERATOR: Any = SimpleNamespace(
    process_index=0, num_processes=1, is_main_process=True, reduce=lambda tensor, **_: tensor
)


@pytest.mark.parametrize(
    "hopeless",
    [
        ([STUCK, OTHER, STUCK],),
        # What has no program is wrong, and says nothing about the machine.
        ([WRONG, STUCK, WRONG, OTHER, STUCK],),
        # Of no use if another grader still works.
        ([JUDGED, JUDGED, WRONG], [STUCK, STUCK, WRONG]),
    ],
    ids=["all", "all with a program", "by one of two"],
)
def test_three_rollouts_in_a_row_without_a_verdict_end_a_run(hopeless):
    unscored = UngradedFilter(ACCELERATOR, [Never() for _ in hopeless], torch.ones(len(hopeless)))
    better = tuple([*verdicts[:-1], JUDGED] for verdicts in hopeless)
    for rollout in [hopeless, hopeless, better, hopeless, hopeless]:
        roll_out(unscored, *rollout)
    with pytest.raises(NothingJudgedError, match="because of: no memory"):
        roll_out(unscored, *hopeless)


def test_cause_is_the_most_frequent_one_of_all_processes(monkeypatch):
    others: list[Any] = [(Counter(), Counter({"no memory": 2, "no answer": 1}))] * 3
    monkeypatch.setattr("troll.trl.ungraded.gather_object", lambda own: own + others)
    with pytest.warns(UserWarning, match="because of: no memory"):
        roll_out(UngradedFilter(ACCELERATOR, [Never()], torch.ones(1)), [OTHER] * 4)


@pytest.mark.filterwarnings("ignore:.*does not say why")
def test_a_function_that_keeps_no_verdicts_ends_a_run_too():
    def share(completions: Any, **_: Any) -> list[None]:
        return [None for _ in completions]

    vars(share)["grader"] = Never()
    unscored = UngradedFilter(ACCELERATOR, [share], torch.ones(1))
    for _ in range(2):
        unscored.observe(torch.full((8, 1), NAN))
        unscored.without(rollout_of(8), lambda values: values)
    with pytest.raises(NothingJudgedError, match="does not say why"):
        unscored.without(rollout_of(8), lambda values: values)


def test_unjudged_completions_are_warned_of_ever_more_rarely(recwarn):
    unscored = UngradedFilter(ACCELERATOR, [Never()], torch.ones(1))
    for _ in range(9):
        roll_out(unscored, [JUDGED, STUCK, WRONG, STUCK])
        roll_out(unscored, [JUDGED, WRONG])
    said = [str(warning.message) for warning in recwarn]
    assert all(each.startswith("2 of 4 completions") and "because of: no memory" in each for each in said)
    assert [each.rpartition(" ")[2] for each in said] == ["1", "2", "4", "8"]
    for _ in range(4):  # the only answer is judged, so training goes on
        roll_out(unscored, [JUDGED, Verdict(None, None, "unscored: no memory")])
