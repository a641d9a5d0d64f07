import pytest
from datasets import Dataset

from troll_lab.tasks import TaskError
from troll_lab.tasks.rows import Column, Row, Rows

ROWS = Dataset.from_list([{"q": "x", "a.b": "dotted", "reward_model": {"ground_truth": "3", "style": "rule"}}])


def columns_of(wanted):
    return Rows.of(ROWS, "train", "rows.jsonl").columns(wanted)


def row(value):
    return Row({"a": value}, {"answer": "a"}, "test row 2 (counted from 0) of rows.jsonl")


def test_columns_in_order_of_preference_and_nested():
    wanted = {
        "prompt": Column(("question", "q")),
        "answer": Column(("reward_model.ground_truth",)),
        "plain": Column(("a.b",)),
        "setup": Column(("setup", "reward_model.none"), required=False),
    }
    found = columns_of(wanted)
    assert found == {"prompt": "q", "answer": "reward_model.ground_truth", "plain": "a.b"}
    values = Row(ROWS[0], found, "row 0")
    assert [values.value(field) for field in ("prompt", "answer", "plain", "setup")] == ["x", "3", "dotted", None]


@pytest.mark.parametrize("names", [("question", "text"), ("reward_model.answer",), ("q.length",)])
def test_a_missing_column_is_named_with_those_there_are(names):
    with pytest.raises(TaskError) as error:
        columns_of({"prompt": Column(names)})
    assert str(error.value) == (
        f"the train rows of rows.jsonl have no column {' or '.join(map(repr, names))}, only q, a.b, reward_model; "
        "name it with task_options {columns: {prompt: NAME}}"
    )


@pytest.mark.parametrize(
    ("value", "answer"), [(" 7 ", "7"), (27.0, "27"), (27, "27"), (-3, "-3"), (0.1, "0.1"), (r"\frac12", r"\frac12")]
)
def test_answers_are_text_or_numbers(value, answer):
    assert row(value).answer("answer") == answer


@pytest.mark.parametrize("value", [None, "", " ", True, float("nan"), float("inf"), ["7"], {"x": 1}])
def test_a_row_without_an_answer_is_named(value):
    with pytest.raises(TaskError, match=r"test row 2 \(counted from 0\) of rows.jsonl has no answer in its field 'a'"):
        row(value).answer("answer")


def test_text_of_a_conversation_is_the_users_message():
    def said(*roles):
        return [{"role": role, "content": f"by {role}"} for role in roles]

    assert row("x ").text("answer") == "x "
    assert row(said("user")).text("answer") == row(said("system", "user")).text("answer") == "by user"
    for value in (None, " ", 3, [], said("user", "assistant", "user"), said("system"), [{"role": "user"}], "\ud800"):
        with pytest.raises(TaskError, match="has no text in its field 'a', got") as error:
            row(value).text("answer")
        assert len(str(error.value)) < 200
