import json

import pytest
from datasets import Dataset, DatasetDict

from troll.tasks import TaskConfig, TaskError
from troll.tasks import splits as splits_module
from troll.tasks.splits import read_splits, text_of


@pytest.fixture(autouse=True)
def own_datasets_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets-cache")


def write(path, count):
    path.write_text("\n".join(json.dumps({"text": str(number)}) for number in range(count)))
    return str(path)


def hub(monkeypatch, **splits):
    sizes = {name: Dataset.from_dict({"text": [str(n) for n in range(size)]}) for name, size in splits.items()}
    monkeypatch.setattr(splits_module, "load_dataset", lambda *_: DatasetDict(sizes))


def test_a_folder(tmp_path):
    write(tmp_path / "train.jsonl", 5)
    write(tmp_path / "test.json", 4)
    train, test = read_splits(TaskConfig(dataset_path=str(tmp_path), train_size=3, eval_size=2), "hub/name")
    assert (train["text"], test["text"]) == (["0", "1", "2"], ["0", "1"])


def test_one_file_holds_out_its_end(tmp_path):
    path = write(tmp_path / "rows.jsonl", 10)
    train, test = read_splits(TaskConfig(dataset_path=path, eval_size=3), "hub/name")
    assert (len(train), test["text"]) == (7, ["7", "8", "9"])
    with pytest.raises(TaskError, match="has 10 rows, not enough to hold out eval_size=10"):
        read_splits(TaskConfig(dataset_path=path, eval_size=10), "hub/name")


def test_the_hub_with_and_without_a_test_split(monkeypatch):
    hub(monkeypatch, train=5, test=4)
    assert [len(rows) for rows in read_splits(TaskConfig(eval_size=9), "hub/name")] == [5, 4]
    hub(monkeypatch, train=5)
    assert [len(rows) for rows in read_splits(TaskConfig(eval_size=2), "hub/name")] == [3, 2]
    hub(monkeypatch, all=5)
    with pytest.raises(TaskError, match="hub/name has no split 'train', only all"):
        read_splits(TaskConfig(), "hub/name")


def test_an_unreachable_hub_is_one_line(monkeypatch):
    def unreachable(*_):
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(splits_module, "load_dataset", unreachable)
    with pytest.raises(TaskError, match="cannot load hub/name from the Hugging Face hub") as error:
        read_splits(TaskConfig(), "hub/name")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", "a", "is not one of .json, .jsonl, .parquet"),
        ("rows.jsonl", "{", "cannot read"),
        ("rows.jsonl", "", "cannot read"),
        ("other", None, "no such file or folder"),
    ],
)
def test_unreadable_files_are_named(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(TaskError, match=message) as error:
        read_splits(TaskConfig(dataset_path=str(path)), "hub/name")
    assert name in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_without_its_files(tmp_path):
    write(tmp_path / "train.jsonl", 5)
    with pytest.raises(TaskError, match=r"must have one test file .* found none"):
        read_splits(TaskConfig(dataset_path=str(tmp_path)), "hub/name")


@pytest.mark.parametrize("row", [{}, {"text": None}, {"text": " "}, {"text": 3}])
def test_a_row_without_text_is_named(row):
    with pytest.raises(TaskError, match=r"test row 2 \(counted from 0\) has no text in its field 'text'"):
        text_of(row, "text", "test", 2)
    assert text_of({"text": "x "}, "text", "test", 2) == "x "
