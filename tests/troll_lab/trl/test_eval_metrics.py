"""The metrics of an evaluation, and the temperature it samples at."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.troll.trl import tiny
from tests.troll.trl.test_checks import DROPS
from troll.grading import Grader, Verdict
from troll_lab.trl import seam
from troll_lab.trl.eval_metrics import EvalMetrics, judged_by, sampling_temperature

REWARD_MEAN, UNSCORED = "rewards/success/mean", "rewards/unscored"


def made(reward_funcs: list[Any], names: list[str]) -> EvalMetrics:
    return EvalMetrics(reward_funcs, names, torch.tensor([1.0, 2.0][: len(names)]))


def without_means(metrics: dict[str, float]) -> dict[str, float]:
    """Without the mean rewards of others."""
    return {k: v for k, v in metrics.items() if k != "reward" and (k == REWARD_MEAN or not k.endswith("/mean"))}


class LastLetter(Grader):
    """The answer is the last letter; right is one before "n"."""

    votes = True

    def grade(self, completions, **columns: Any):
        answers = [text.strip()[-1:] or None for text in completions]
        return [Verdict(float((answer or "z") < "n"), answer, "") for answer in answers]


def observed(grader: Any, batches: list[list[str]]) -> EvalMetrics:
    held_out = made([tiny.reward, grader], ["reward", "success"])
    for texts in batches:
        rewards = grader(prompts=texts, completions=texts)
        scores = torch.tensor([torch.nan if reward is None else reward for reward in rewards])
        held_out.observe(torch.stack([torch.full_like(scores, 9.0), scores], 1))
    return held_out


def test_evaluation_order_names_the_rows_as_evaluated(make):
    asked: list[str] = []

    def success(prompts, **columns):
        asked.extend(prompts)
        return [1.0] * len(prompts)

    held_out = tiny.make_dataset(6)
    trainer = make(reward_funcs=success, eval_dataset=held_out, num_generations_eval=2)
    trainer.evaluate()
    order = seam.evaluation_order(trainer, held_out)
    assert [held_out[row]["prompt"] for row in order] == asked
    assert order != sorted(order)


def test_answers_are_kept_of_the_first_different_problems() -> None:
    held_out = made([tiny.reward, LastLetter()], ["reward", "success"])
    told = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "ask"}]}]
    prompts = ["a", "a", told, "c", "d", "e", "f"]
    said: list[Any] = [*"stuvwx", "y"]
    said[2] = [{"role": "assistant", "content": "said"}]
    rewards = torch.tensor([[9.0, 1.0]] * 3 + [[9.0, torch.nan]] + [[9.0, 0.0]] * 10)  # those of other processes follow
    held_out.keep_answers(prompts[:3], said[:3], rewards)
    held_out.keep_answers(prompts[3:], said[3:], rewards[3:])
    shown = [(each.question, each.text, each.success) for each in held_out.answers]
    assert shown == [("a", "s", 1.0), ("ask", "said", 1.0), ("c", "v", None), ("d", "w", 0.0), ("e", "x", 0.0)]
    held_out.start()
    assert held_out.answers == []


def test_problems_are_the_groups_of_completions():
    held_out = observed(LastLetter(), [["a", "z", "a", "z"], ["z", "z", "z", "b"]])
    metrics = held_out.metrics(4, 2)
    # 2 of 4 and 1 of 4; the first problem's vote is a tie, the second's is lost.
    shares = {"pass@1": 0.375, "pass@4": 1.0, "mean@4": 0.375, "maj@4": 0.25}
    means = {"reward": 9.75, "rewards/reward/mean": 9.0, REWARD_MEAN: 0.375}  # weights of 1 and 2
    assert metrics == pytest.approx(shares | means | {UNSCORED: 0.0})
    held_out.start()
    assert held_out.metrics(4, 2) == {}


def test_eval_metrics_ignore_what_fills_up_the_last_batch():
    metrics = observed(LastLetter(), [["a", "z"], ["a", "a"]]).metrics(1, 3)
    assert metrics["pass@1"] == metrics[REWARD_MEAN] == pytest.approx(2 / 3)
    assert metrics["reward"] == pytest.approx(9 + 4 / 3)


def test_a_short_last_batch_counts_by_its_completions(make):
    """TRL takes the mean of the means of batches."""

    def first(prompts, **columns):
        return [float(prompt == prompts_of[0]) for prompt in prompts]

    held_out = tiny.make_dataset(5)
    prompts_of = held_out["prompt"]
    trainer = make(reward_funcs=first, eval_dataset=held_out, num_generations_eval=1, per_device_eval_batch_size=4)
    metrics = trainer.evaluate()
    expected = prompts_of.count(prompts_of[0]) / 5
    assert metrics["eval_reward"] == metrics["eval_rewards/first/mean"] == pytest.approx(expected)


def test_a_function_named_success_has_no_votes():
    def success(prompts, completions, **columns):
        return [1.0, float("nan")]

    held_out = made([success], ["success"])
    held_out.observe(torch.tensor([[1.0], [torch.nan]]))
    expected = {"pass@1": 1.0, "mean@2": 1.0, REWARD_MEAN: 1.0}  # None is no failure
    assert without_means(held_out.metrics(2, 1)) == expected
    without = made([tiny.reward], ["reward"])
    without.observe(torch.ones(2, 1))
    assert without.metrics(2, 1) == {"reward": 1.0, "rewards/reward/mean": 1.0}, "other rewards have their means"


class HalfRight(Grader):
    """Half of every answer is right; nothing can be voted on."""

    def grade(self, completions, **columns: Any):
        return [Verdict(0.5, text, "") for text in completions]


def test_partial_credit_counts_in_the_mean():
    metrics = observed(HalfRight(), [["a", "b"]]).metrics(2, 1)
    shares = {"pass@1": 0.0, "pass@2": 0.0, "mean@2": 0.5, REWARD_MEAN: 0.0, UNSCORED: 0.0}
    assert without_means(metrics) == shares
    of_function = made([tiny.reward], ["success"])
    of_function.observe(torch.tensor([[0.5], [0.25]]))
    assert of_function.metrics(2, 1)[REWARD_MEAN] == 0.375


class Stuck(LastLetter):
    """What ends with a "?" cannot be judged."""

    def grade(self, completions, **columns: Any):
        verdicts = super().grade(completions)
        return [Verdict(None, "?", "") if each.answer == "?" else each for each in verdicts]


def test_eval_metrics_leave_out_and_count_unscored_completions():
    held_out = observed(Stuck(), [["a", "?", "z", "?"], ["?", "?", "a", "a"], ["?", "?", "?", "?"]])
    metrics = held_out.metrics(2, 5)
    # 1 of 1, 0 of 1, none, 2 of 2, none; and what fills up the last batch.
    rates = {"pass@1": 2 / 3, "pass@2": 1.0, "mean@2": 2 / 3, "maj@2": 2 / 3}
    assert without_means(metrics) == pytest.approx(rates | {REWARD_MEAN: 3 / 4, UNSCORED: 0.6})
    assert held_out.successes[:4] == [1.0, None, 0.0, None]
    held_out = observed(Stuck(), [["?", "?"]])
    assert without_means(held_out.metrics(2, 1)) == {UNSCORED: 1.0}


def test_eval_metrics_leave_out_what_another_grader_left():
    grader = LastLetter()
    held_out = made([Stuck(), grader], ["stuck", "success"])
    grader.latest = grader.grade(["a", "z"])
    held_out.observe(torch.tensor([[torch.nan, torch.nan], [0.0, 0.0]]))
    expected = dict.fromkeys(["pass@1", "mean@2", "maj@2", REWARD_MEAN], 0.0) | {UNSCORED: 0.5}
    assert without_means(held_out.metrics(2, 1)) == expected


def evaluate(make, samples: int = 4, **settings: Any):
    held_out = {"eval_dataset": tiny.make_dataset(4), "num_generations_eval": samples}
    return make(reward_funcs=LastLetter(), **held_out, **settings)


def test_several_data_sets_have_metrics_of_their_own(make):
    trainer = evaluate(make)
    trainer.eval_dataset = {"first": tiny.make_dataset(4), "second": tiny.make_dataset(8)}
    trainer.eval_metrics._verdicts = [Verdict(1.0, "a", "")] * 400  # of an interrupted evaluation
    metrics = trainer.evaluate()
    for name in ("first", "second"):
        assert metrics[f"eval_{name}_pass@1"] == pytest.approx(metrics[f"eval_{name}_rewards/success/mean"])
    assert "eval_reward" not in metrics
    assert len(trainer.eval_metrics._verdicts) == 32


def test_evaluation_ignores_the_metrics_of_an_interrupted_one(make):
    trainer = evaluate(make)
    trainer._metrics["eval"]["reward"].append(1000.0)
    trainer.evaluate()
    assert trainer.state.log_history[0]["eval_reward"] <= 1


def test_another_task_is_judged_by_its_own_rewards(make):
    seen: list[tuple[str, str]] = []

    def success(prompts, completions, color, **columns):
        seen.extend(zip(prompts, color, strict=True))
        return [1.0] * len(prompts)

    def more(prompts, completions, **columns):
        return [3.0] * len(prompts)

    trainer = evaluate(make, log_completions=True)
    swapped = "reward_funcs reward_func_names reward_processing_classes reward_weights eval_metrics ungraded _logs"
    before = {name: vars(trainer)[name] for name in [*swapped.split(), "log_completions"]}
    rows = tiny.make_dataset(4).add_column("color", list("abcd"))
    with judged_by(trainer, [success, more], [1.0, 0.5]):
        metrics = trainer.evaluate(rows, metric_key_prefix="eval_colors")
    assert [name for name, value in before.items() if vars(trainer)[name] is not value] == []
    with pytest.raises(KeyError), judged_by(trainer, [success], None):
        raise KeyError
    assert [name for name, value in before.items() if vars(trainer)[name] is not value] == []
    assert not trainer._logs["prompt"]
    assert not [*Path(trainer.args.output_dir).glob("completions/*")]
    assert (metrics["eval_colors_pass@4"], metrics["eval_colors_reward"]) == (1.0, 2.5)
    assert "eval_colors_maj@4" not in metrics
    assert metrics["eval_colors_rewards/more/mean"] == 3.0
    assert sorted(seen) == sorted([*zip(rows["prompt"], rows["color"], strict=True)] * 4)


def test_greedy_evaluation_repeats_itself(make):
    trainer = evaluate(make, samples=1, eval_temperature=0.0)
    texts = []
    for _ in range(2):
        trainer._logs["completion"].clear()
        trainer.evaluate()
        texts.append(list(trainer._logs["completion"]))
    assert texts[0] == texts[1]
    assert trainer.generation_config.do_sample


def test_vllm_samples_at_the_temperature_of_the_evaluation():
    trainer = SimpleNamespace(use_vllm=True, vllm_generation=SimpleNamespace(temperature=1.0))
    with sampling_temperature(trainer, 0.0):
        assert trainer.vllm_generation.temperature == 0.0
    assert trainer.vllm_generation.temperature == 1.0


@pytest.mark.parametrize(("rows", "settings"), [(0, {}), (3, DROPS)], ids=["none", "less than a batch"])
def test_an_evaluation_of_nothing_is_refused(make, rows, settings):
    trainer = make(eval_dataset=tiny.make_dataset(9).select(range(rows)), max_steps=2, **settings)
    trainer.train()  # which evaluates nothing
    with pytest.raises(ValueError, match=r"^the evaluation set has \d rows to evaluate"):
        trainer.evaluate()
