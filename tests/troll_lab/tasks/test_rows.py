import pytest
from datasets import Dataset

from troll_lab.tasks import TaskError
from troll_lab.tasks.rows import Column, Row, Rows

ROWS = Dataset.from_list([{"q": "x", "a.b": "dotted", "reward_model": {"ground_truth": "3", "style": "rule"}}])


def row(value):
    return Row({"a": value}, {"answer": "a"}, "test row 2 (counted from 0) of rows.jsonl")


def said(*roles):
    return [{"role": role, "content": f"by {role}"} for role in roles]


def test_columns_are_found_in_order_of_preference_and_nested():
    wanted = {
        "prompt": Column(("question", "q")),
        "answer": Column(("reward_model.ground_truth",)),
        "plain": Column(("a.b",)),
        "setup": Column(("setup", "reward_model.none"), required=False),
    }
    found = Rows.of(ROWS, "train", "rows.jsonl").columns(wanted)
    assert found == {"prompt": "q", "answer": "reward_model.ground_truth", "plain": "a.b"}
    values = Row(ROWS[0], found, "row 0")
    assert [values.value(field) for field in wanted] == ["x", "3", "dotted", None]


@pytest.mark.parametrize("names", [("question", "text"), ("reward_model.answer",), ("q.length",)])
def test_missing_column_is_named_with_those_there_are(names):
    missing = " or ".join(map(repr, names))
    with pytest.raises(TaskError, match=rf"train rows .* no column {missing}, only q, a\.b, .*{{columns: {{prompt: NA"):
        Rows.of(ROWS, "train", "rows.jsonl").columns({"prompt": Column(names)})


@pytest.mark.parametrize(
    ("value", "answer"), [(" 7 ", "7"), (27.0, "27"), (27, "27"), (-3, "-3"), (0.1, "0.1"), (r"\frac12", r"\frac12")]
)
def test_answers_are_texts_or_numbers(value, answer):
    assert row(value).answer("answer") == answer


@pytest.mark.parametrize("value", [None, "", " ", True, float("nan"), float("inf"), ["7"], {"x": 1}])
def test_row_without_an_answer_is_named(value):
    with pytest.raises(TaskError, match=r"test row 2 \(counted from 0\) of rows.jsonl has no answer in its field 'a'"):
        row(value).answer("answer")


@pytest.mark.parametrize(
    ("value", "text"), [("x ", "x "), (said("user"), "by user"), (said("system", "user"), "by user")]
)
def test_text_may_be_the_users_only_message(value, text):
    assert row(value).text("answer") == text


@pytest.mark.parametrize(
    "value",
    [None, " ", 3, [], said("user", "assistant", "user"), said("system"), [{"role": "user"}], "\ud800", "\ud800" * 999],
)
def test_row_without_a_text_is_named(value):
    with pytest.raises(TaskError, match="has no text in its field 'a', got") as error:
        row(value).text("answer")
    assert len(str(error.value)) < 200
