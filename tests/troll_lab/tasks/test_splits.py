import re
from unittest.mock import Mock

import pytest
from datasets.exceptions import DatasetGenerationError

from troll_lab.tasks import TaskConfig, TaskError
from troll_lab.tasks import splits as splits_module
from troll_lab.tasks.splits import Source, read_splits

HUB = ("hub/name", None)


def texts(count):
    return [{"text": str(number)} for number in range(count)]


def sizes(config=None, **source):
    return [len(rows) for rows in read_splits(config or TaskConfig(), Source("hub/name", {}, **source))]


def test_a_folder(tmp_path, write):
    write("train.jsonl", texts(5))
    write("test.json", texts(4))
    train, test = read_splits(TaskConfig(dataset_path=str(tmp_path)), Source("hub/name", {}))
    assert (train.values("text"), test.values("text")) == (list("01234"), list("0123"))
    assert (train.split, train.origin) == ("train", str(tmp_path / "train.jsonl"))
    (tmp_path / "train.jsonl").unlink()
    assert sizes(TaskConfig(dataset_path=str(tmp_path), eval_size=None)) == [0, 4]


def test_read_splits_reads_json_objects_that_stand_anyhow(tmp_path):
    path = tmp_path / "rows.json"
    for text in (
        '{"text": "a\u2028b"}\n\n{"text": "c"}\n{"other": 1}',
        '\ufeff [{"text": "a\u2028b"},\n {"text":\n "c"}, {"other": 1}] ',
        '{"text": "a\u2028b"} {"text": "c"}\r\n[{"other": 1}]\n',
    ):
        path.write_text(text)
        train, test = read_splits(TaskConfig(dataset_path=str(path), eval_size=1), Source("hub/name", {}))
        assert [*train.values("text"), *test.values("text")] == ["a\u2028b", "c", None]
        assert (train.features, test.values("other")) == ({"text": None, "other": None}, [1])


def test_one_file_holds_out_its_end(write):
    path = write("rows.jsonl", texts(10))
    train, test = read_splits(TaskConfig(dataset_path=path, eval_size=3), Source("hub/name", {}))
    assert (len(train), test.values("text"), list(test.numbers), test.split) == (7, ["7", "8", "9"], [7, 8, 9], "test")
    for size, wanted in ((10, 10), (None, 256)):
        with pytest.raises(TaskError, match=f"has 10 rows, not enough to hold out eval_size={wanted} of them"):
            sizes(TaskConfig(dataset_path=path, eval_size=size))


def test_read_splits_without_eval_size_holds_out_as_many_rows_as_a_run(write, hub):
    path = write("rows.jsonl", texts(300))
    train, test = read_splits(TaskConfig(dataset_path=path, eval_size=None), Source("hub/name", {}))
    assert (len(train), list(test.numbers)) == (44, list(range(44, 300)))
    hub(HUB, train=texts(300))
    assert sizes(TaskConfig(eval_size=None)) == [44, 256]


def test_of_a_benchmark_everything_is_held_out(tmp_path, write, hub):
    path = write("test.jsonl", texts(10))
    assert sizes(TaskConfig(dataset_path=path), train=None) == [0, 10]
    assert sizes(TaskConfig(dataset_path=str(tmp_path)), train=None) == [0, 10]
    hub(HUB, train=texts(5))
    assert sizes(train=None, held_out="train") == [0, 5]


def test_one_file_may_say_itself_how_it_is_divided(write):
    config = TaskConfig(dataset_path=write("rows.jsonl", texts(5)), eval_size=2)
    train, test = read_splits(config, Source("hub/name", {}, divide=lambda rows: ([0, 4], [2])))
    assert (train.values("text"), test.values("text"), list(test.numbers)) == (["0", "4"], ["2"], [2])
    train, test = read_splits(config, Source("hub/name", {}, divide=lambda rows: None))
    assert (len(train), len(test)) == (3, 2)


def test_the_hub_with_and_without_a_test_split(hub):
    hub(HUB, train=texts(5), test=texts(4))
    assert sizes(TaskConfig(eval_size=9)) == [5, 4]
    hub(HUB, train=texts(5), validation=texts(3))
    assert sizes(TaskConfig(eval_size=2)) == [3, 2]
    assert sizes(TaskConfig(eval_size=2), held_out="validation") == [5, 3]
    hub(HUB, all=texts(5))
    with pytest.raises(TaskError, match="hub/name has no split 'train', only all"):
        sizes()


def test_the_rows_of_one_kind(write, hub):
    rows = [{"text": str(n), "ability": "code" if n % 2 else "math"} for n in range(6)]
    config = TaskConfig(dataset_path=write("rows.jsonl", rows), eval_size=2)
    train, test = read_splits(config, Source("hub/name", {}, only=("ability", "code")))
    assert (train.values("text"), list(train.numbers), test.values("text")) == (["1"], [1], ["3", "5"])
    hub(HUB, train=rows)
    assert sizes(TaskConfig(eval_size=2), only=("ability", "code")) == [1, 2]
    assert sizes(TaskConfig(eval_size=2), only=("kind", "code")) == [4, 2]


def test_an_unreachable_hub_is_one_line(monkeypatch):
    monkeypatch.setattr(splits_module, "load_dataset", Mock(side_effect=ConnectionError("no way\nnetwork")))
    with pytest.raises(TaskError, match=r"cannot load hub/name .* or give a local copy .*; no way") as error:
        sizes()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "raised",
    [
        ValueError("BuilderConfig 'x' not found.\nAvailable: main"),
        RuntimeError("Dataset scripts are no longer supported, but found x.py"),
        DatasetGenerationError("An error occurred while generating the dataset"),
    ],
)
def test_read_splits_gives_one_line_for_unreadable_data_of_the_hub(monkeypatch, raised):
    monkeypatch.setattr(splits_module, "load_dataset", Mock(side_effect=raised))
    message = f"cannot load hub/name from the Hugging Face hub, configuration x: {str(raised).splitlines()[0]}"
    with pytest.raises(TaskError, match=f"^{re.escape(message)}$"):
        read_splits(TaskConfig(), Source("hub/name", {}, "x"))


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
        sizes(TaskConfig(dataset_path=str(path)))
    assert name in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_without_its_files(tmp_path, write):
    write("train.jsonl", texts(5))
    with pytest.raises(TaskError, match=r"must have one test file .* found none"):
        sizes(TaskConfig(dataset_path=str(tmp_path)))
