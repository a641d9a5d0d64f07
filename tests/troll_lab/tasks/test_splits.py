from unittest.mock import Mock

import pytest
from datasets.exceptions import DatasetGenerationError

from troll_lab.tasks import TaskConfig, TaskError
from troll_lab.tasks import splits as splits_module
from troll_lab.tasks.splits import Source, read_splits

HUB = ("hub/name", None)


def texts(count):
    return [{"text": str(number)} for number in range(count)]


def splits(path=None, eval_size=256, **source):
    """The texts of the training and of the held-out rows; `path` is the data's, by default the hub."""
    path = None if path is None else str(path)
    train, test = read_splits(TaskConfig(dataset_path=path, eval_size=eval_size), Source("hub/name", {}, **source))
    assert (train.split, test.split) == ("train", "test")
    return ["".join(map(str, rows.values("text"))) for rows in (train, test)]


def test_folder_has_a_train_and_a_test_file(tmp_path, write):
    write("train.jsonl", texts(5))
    write("test.json", texts(4))
    assert splits(tmp_path) == ["01234", "0123"]
    train, _ = read_splits(TaskConfig(dataset_path=str(tmp_path)), Source("hub/name", {}))
    assert train.origin == str(tmp_path / "train.jsonl")
    assert splits(tmp_path, train=None) == ["", "0123"]
    (tmp_path / "train.jsonl").unlink()
    assert splits(tmp_path, None) == ["", "0123"]
    (tmp_path / "test.json").unlink()
    with pytest.raises(TaskError, match=r"must have one test file .* found none"):
        splits(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        '{"text": "a\u2028b"}\n\n{"text": "c"}\n{"other": 1}',
        '\ufeff [{"text": "a\u2028b"},\n {"text":\n "c"}, {"other": 1}] ',
        '{"text": "a\u2028b"} {"text": "c"}\r\n[{"other": 1}]\n',
    ],
)
def test_json_objects_may_stand_anyhow(tmp_path, text):
    path = tmp_path / "rows.json"
    path.write_text(text)
    train, test = read_splits(TaskConfig(dataset_path=str(path), eval_size=1), Source("hub/name", {}))
    assert [*train.values("text"), *test.values("text")] == ["a\u2028b", "c", None]
    assert (train.features, test.values("other")) == ({"text": None, "other": None}, [1])


def test_one_file_holds_out_its_end(write):
    path = write("rows.jsonl", texts(10))
    assert splits(path, 3) == ["0123456", "789"]
    _, test = read_splits(TaskConfig(dataset_path=path, eval_size=3), Source("hub/name", {}))
    assert list(test.numbers) == [7, 8, 9]
    assert splits(path, train=None) == ["", "0123456789"]
    for size, wanted in ((10, 10), (None, 256)):
        with pytest.raises(TaskError, match=f"has 10 rows, not enough to hold out eval_size={wanted} of them"):
            splits(path, size)


def test_without_eval_size_as_many_rows_are_held_out_as_in_a_run(write, hub):
    rows = [{"text": "x"}] * 300
    hub(HUB, train=rows)
    for path in (write("rows.jsonl", rows), None):
        assert splits(path, None) == ["x" * 44, "x" * 256]


def test_source_may_divide_one_file(write):
    path = write("rows.jsonl", texts(5))
    assert splits(path, 2, divide=lambda rows: ([0, 4], [2])) == ["04", "2"]
    assert splits(path, 2, divide=lambda rows: None) == ["012", "34"]


def test_hub_with_and_without_a_held_out_split(hub):
    hub(HUB, train=texts(5), test=texts(4))
    assert splits(eval_size=9) == ["01234", "0123"]
    hub(HUB, train=texts(5), validation=texts(3))
    assert splits(eval_size=2) == ["012", "34"]
    assert splits(eval_size=2, held_out="validation") == ["01234", "012"]
    assert splits(train=None, held_out="train") == ["", "01234"]
    hub(HUB, all=texts(5))
    with pytest.raises(TaskError, match="hub/name has no split 'train', only all"):
        splits()


def test_only_rows_of_one_kind_are_read(write, hub):
    rows = [{"text": str(n), "ability": "code" if n % 2 else "math"} for n in range(6)]
    hub(HUB, train=rows)
    for path in (write("rows.jsonl", rows), None):
        assert splits(path, 2, only=("ability", "code")) == ["1", "35"]
        assert splits(path, 2, only=("kind", "code")) == ["0123", "45"]


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (ConnectionError("no way\nnetwork"), "hub: connect to the network, or give a local copy .*; no way"),
        (ValueError("BuilderConfig 'x' not found.\nAvailable: main"), "configuration x: BuilderConfig 'x' not found."),
        (RuntimeError("Dataset scripts are no longer supported"), "configuration x: Dataset scripts are no longer"),
        (DatasetGenerationError("An error occurred"), "configuration x: An error occurred"),
    ],
)
def test_hub_that_cannot_be_read_is_one_line(monkeypatch, raised, message):
    monkeypatch.setattr(splits_module, "load_dataset", Mock(side_effect=raised))
    with pytest.raises(TaskError, match=f"^cannot load hub/name from the Hugging Face .*{message}") as error:
        splits(config="x")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", b"a", "is not one of .json, .jsonl, .parquet"),
        ("rows.parquet", b"", "cannot read"),
        ("rows.jsonl", b"", "cannot read .*: it has no rows"),
        ("rows.json", b"[]", "cannot read .*: it has no rows"),
        ("rows.jsonl", b'{"text": 1}\n{"text"', "cannot read .*: it is not JSON: .* line 2 column 8"),
        ("rows.json", b"[{}", "cannot read .*: it is not JSON: .* line 1 column 4"),
        ("rows.json", b"[" * 100_000, "cannot read .*: .*recursion"),
        ("rows.jsonl", b'{"a": ' * 5000 + b"1" + b"}" * 5000, "cannot read .*: .*recursion"),
        ("rows.jsonl", b'{"text": "\xff"}', "cannot read .*: 'utf-8' codec can't decode byte 0xff"),
        ("rows.jsonl", b'{"text": 1, "text": 2}', "cannot read .*: found duplicate key 'text'"),
        ("rows.json", b'[{"text": 1}, 2]', "cannot read .*: a row must be a JSON object, got 2"),
        ("other", None, "no such file or folder"),
    ],
)
def test_unreadable_files_are_named(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TaskError, match=message) as error:
        splits(path)
    assert name in str(error.value)
    assert "\n" not in str(error.value)
