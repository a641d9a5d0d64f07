"""Golds that the readers of `datasets` would change: numbers too long for a float, dates, truth values."""

import datetime
import decimal
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, Value

from troll_lab.tasks import TaskConfig, TaskError, load_task

#: Numbers as a file has them, next to 0.5 in the same column, and the answers to grade.
NUMBERS = {
    "0.5": "0.5",
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
    "3": "3",
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


@pytest.mark.parametrize(
    ("name", "column", "shape", "reward"),
    [
        ("rows.jsonl", "answer", '"answer": {}', "math"),
        ("rows.jsonl", "answer", '"answer": {}', "own.py:success"),
        ("rows.json", "answer", '"answer": {}', "math"),
        ("rows.jsonl", "r.gold", '"r": {"gold": {}, "kind": "x"}', "math"),
        ("rows.jsonl", "r.s.gold", '"r": {"s": {"gold": {}}}', "math"),
        ("rows.jsonl", "r.gold", '"r.gold": {}', "math"),
    ],
)
def test_numbers_of_json_keep_their_digits(tmp_path, golds, name, column, shape, reward):
    path = json_lines(tmp_path / name, *NUMBERS, '"two"', shape=shape)
    path.write_text("\ufeff" + path.read_text().replace("\n", "\n\n"))
    assert golds(path, column, reward) == [*NUMBERS.values(), "two"]


@pytest.mark.parametrize("texts", [["2024-05-01", "2023-01-02"], ["2024-05-01 10:30:00"] * 2, ["2024-05-01", "five"]])
def test_dates_are_texts_but_no_mathematics(tmp_path, golds, texts):
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
def test_columns_of_other_types_are_refused(tmp_path, golds, values, reward):
    table = pa.table({"q": ["a", "b"], "r": pa.StructArray.from_arrays([pa.array(values)], ["gold"])})
    pq.write_table(table, tmp_path / "rows.parquet")
    message = r"row [01] \(counted from 0\) of .* field 'r\.gold'.*as text(, in quotes)?$"
    with pytest.raises(TaskError, match=message) as error:
        golds(tmp_path / "rows.parquet", "r.gold", reward)
    assert "skip_unanswered" not in str(error.value)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (("false", "true"), r"but true or false, True: .* in quotes$"),
        (("true", "1"), r"but true or false, True: .* in quotes$"),
        (("true", '"a"'), r"but true or false, True: .* in quotes$"),
        (("[13]", "[12]"), "but a list, .*name one that holds one"),
        (('["13"]', '["12"]'), "but a list, .*name one that holds one"),
        (("3", "[1.5]"), "but a list, .*name one that holds one"),
        (('{"x": 2}', '{"x": 1}'), "but several fields, .*name one that holds one"),
    ],
)
def test_other_values_of_json_are_refused(tmp_path, golds, answers, message):
    with pytest.raises(TaskError, match=f"in its field 'answer', {message}"):
        golds(json_lines(tmp_path / "rows.jsonl", *answers))


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
def test_numbers_of_parquet_are_those_of_their_type(tmp_path, golds, values, expected):
    pq.write_table(pa.table({"q": ["a", "b", "c"], "answer": values}), tmp_path / "rows.parquet")
    assert golds(tmp_path / "rows.parquet") == expected


def test_number_of_a_class_is_refused(tmp_path, golds):
    features = Features({"q": Value("string"), "answer": ClassLabel(names=["no", "yes"])})
    Dataset.from_dict({"q": ["a", "b"], "answer": [0, 1]}, features=features).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(TaskError, match=r"row 1 .* field 'answer', but the number of a class, 1: .* in quotes$"):
        golds(tmp_path / "rows.parquet")


def test_integers_of_any_length_are_read(tmp_path, golds):
    long = f"-1{'2' * 5000}"
    path = json_lines(tmp_path / "rows.jsonl", "0.5", long)
    assert golds(path, reward="own.py:success") == ["0.5", long]
    with pytest.raises(TaskError, match=r"row 1 .* field 'answer'"):  # longer than an answer of mathematics
        golds(path)
