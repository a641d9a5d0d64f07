"""Golds that the readers of `datasets` would change: numbers too long for a float, dates, truth values."""

import datetime
import decimal
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, Value

from troll_lab import cli
from troll_lab.tasks import TaskConfig, TaskError, load_task

#: Numbers as a file has them, next to 0.5 in the same column, and the answers to grade.
NUMBERS = {
    "12345678901234567890": "12345678901234567890",
    "-12345678901234567890": "-12345678901234567890",
    "9007199254740993": "9007199254740993",
    "9007199254740993.0": "9007199254740993",
    "123456789012345678901234567890123": "123456789012345678901234567890123",
    "0.1234567890123456789": "0.1234567890123456789",
    "0.12345678901234567": "0.12345678901234567",
    "1e23": "100000000000000000000000",
    "1E-7": "1e-07",
    "1e-400": "1e-400",
    "1e400": "1e+400",
    "-1e999": "-1e+999",
    "27.0": "27",
    "-0.0": "0",
    "2.50": "2.5",
}


@pytest.fixture
def golds(tmp_path):
    """The answers of a task over a file, as a list; `reward` is `math`, or a function of the user's."""
    (tmp_path / "own.py").write_text("def success(prompts, completions, **columns): return [0.0] * len(prompts)\n")

    def load(path, column="answer", reward="math", **options):
        name = "answer" if reward == "math" else "gold"
        task = tmp_path / "task.yaml"
        task.write_text(f"dataset: {path}\ncolumns: {{prompt: q, {name}: {column}}}\nreward: {reward}\n")
        loaded = load_task(TaskConfig(str(task), eval_size=1, task_options=options))
        return [*loaded.train_dataset[name], *loaded.eval_dataset[name]]

    return load


def json_lines(path, *answers, shape='"answer": {}'):
    rows = [f'{{"q": "question {n}", {shape.replace("{}", answer)}}}' for n, answer in enumerate(answers)]
    path.write_text("[\n" + ",\n".join(rows) + "\n]\n" if path.suffix == ".json" else "\n".join(rows) + "\n")
    return path


@pytest.mark.parametrize("reward", ["math", "own.py:success"])
def test_numbers_are_graded_as_the_file_has_them(tmp_path, golds, reward):
    path = json_lines(tmp_path / "rows.jsonl", "0.5", *NUMBERS, "3")
    assert golds(path, reward=reward) == ["0.5", *NUMBERS.values(), "3"]
    path.write_text("\ufeff" + path.read_text().replace("\n", "\n\n"))
    assert golds(path, reward=reward) == ["0.5", *NUMBERS.values(), "3"]


@pytest.mark.parametrize(
    ("column", "shape"),
    [
        ("r.gold", '"r": {"gold": {}, "kind": "x"}'),
        ("r.s.gold", '"r": {"s": {"gold": {}}}'),
        ("r.gold", '"r.gold": {}'),
    ],
)
def test_nested_numbers_are_graded_as_the_file_has_them(tmp_path, golds, column, shape):
    path = json_lines(tmp_path / "rows.jsonl", "0.5", *NUMBERS, "3", shape=shape)
    assert golds(path, column) == ["0.5", *NUMBERS.values(), "3"]


def test_numbers_of_a_list_of_rows_and_next_to_texts_are_graded_as_the_file_has_them(tmp_path, golds):
    assert golds(json_lines(tmp_path / "rows.json", "0.5", *NUMBERS, "3")) == ["0.5", *NUMBERS.values(), "3"]
    mixed = json_lines(tmp_path / "mixed.jsonl", "0.5", '"two"', *NUMBERS)
    assert golds(mixed) == ["0.5", "two", *NUMBERS.values()]


def test_dates_in_quotes_are_texts_of_ones_own_reward_and_refused_in_mathematics(tmp_path, golds):
    for texts in (["2024-05-01", "2023-01-02"], ["2024-05-01 10:30:00", "2023-01-02 00:00:00"], ["2024-05-01", "five"]):
        path = json_lines(tmp_path / "rows.jsonl", *(json.dumps(text) for text in texts))
        assert golds(path, reward="own.py:success") == texts
        with pytest.raises(TaskError, match=r"in its field 'answer', but a date, .* write it in words") as error:
            golds(path)
        assert "skip_unanswered" not in str(error.value)


@pytest.mark.parametrize("reward", ["math", "own.py:success"])
@pytest.mark.parametrize(
    "values",
    [
        [True, False],
        [datetime.date(2024, 5, 1)] * 2,
        [datetime.datetime(2024, 5, 1, 10)] * 2,
        [datetime.time(10, 30)] * 2,
        [datetime.timedelta(3)] * 2,
        [1e19, 0.5],
        [2.0**53, 0.5],
        pa.array([2.0**24, 0.5], pa.float32()),
        [b"1", b"2"],
        pa.array([[1], [2]]),
        pa.array([["one"], ["two"]]),
        pa.array([{"value": 1}] * 2),
    ],
)
def test_columns_of_other_types_are_refused_with_the_remedy(tmp_path, golds, values, reward):
    table = pa.table({"q": ["a", "b"], "r": pa.StructArray.from_arrays([pa.array(values)], ["gold"])})
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(
        TaskError, match=r"row [01] \(counted from 0\) of .* field 'r\.gold'.*as text(, in quotes)?$"
    ) as error:
        golds(tmp_path / "rows.parquet", "r.gold", reward)
    assert "skip_unanswered" not in str(error.value)


def test_truth_values_of_json_are_refused_with_the_remedy(tmp_path, golds):
    for answers in (("true", "false"), ("1", "true"), ('"a"', "true")):
        with pytest.raises(TaskError, match=r"field 'answer', but true or false, True: .* in quotes$"):
            golds(json_lines(tmp_path / "rows.jsonl", *answers[::-1]))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pa.array([0.1, 27, 1e-7], pa.float32()), ["0.1", "27", "1e-07"]),
        (pa.array([0.1, 27, 1e-7]), ["0.1", "27", "1e-07"]),
        (pa.array([2**64 - 1, 1, 2], pa.uint64()), ["18446744073709551615", "1", "2"]),
        (
            pa.array([decimal.Decimal("12345678901234567890.50"), decimal.Decimal(27), decimal.Decimal("0.1")]),
            ["12345678901234567890.5", "27", "0.1"],
        ),
    ],
)
def test_numbers_of_parquet_are_graded_as_their_type_has_them(tmp_path, golds, values, expected):
    pq.write_table(pa.table({"q": ["a", "b", "c"], "answer": values}), tmp_path / "rows.parquet")
    assert golds(tmp_path / "rows.parquet") == expected


def test_the_number_of_a_class_is_refused(tmp_path, golds):
    features = Features({"q": Value("string"), "answer": ClassLabel(names=["no", "yes"])})
    Dataset.from_dict({"q": ["a", "b"], "answer": [0, 1]}, features=features).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(TaskError, match=r"row 1 .* field 'answer', but the number of a class, 1: .* in quotes$"):
        golds(tmp_path / "rows.parquet")


@pytest.mark.parametrize("answers", [("[12]", "[13]"), ('["12"]', '["13"]'), ("[1.5]", "3"), ('{"x": 1}', '{"x": 2}')])
def test_golds_of_json_that_hold_several_values_are_refused(tmp_path, golds, answers):
    with pytest.raises(TaskError, match=r"field 'answer', but (a list|several fields), .*name one that holds one"):
        golds(json_lines(tmp_path / "rows.jsonl", *answers[::-1]), skip_unanswered=False)


def test_integers_of_any_length_are_read(tmp_path, golds):
    long = f"-1{'2' * 5000}"
    path = json_lines(tmp_path / "rows.jsonl", "0.5", long)
    assert golds(path, reward="own.py:success") == ["0.5", long]
    with pytest.raises(TaskError, match=r"row 1 .* field 'answer'"):  # longer than an answer of mathematics
        golds(path)


def test_tasks_check_says_the_same(tmp_path, capsys):
    rows = json_lines(tmp_path / "rows.jsonl", "12345678901234567890", "0.5", shape='"problem": "?{}", "answer": {}')
    assert cli.main(["tasks", "check", "math500", "--dataset_path", str(rows)]) == 0
    json_lines(rows, "true", "false", shape='"problem": "?{}", "answer": {}')
    assert cli.main(["tasks", "check", "math500", "--dataset_path", str(rows)]) == 2
    shown = capsys.readouterr().err.splitlines()[-1]
    assert "in its field 'answer', but true or false, True: write the answers of this column as text" in shown
