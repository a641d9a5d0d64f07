import json
import random
from pathlib import Path

import pytest

from troll.rewards.math import success
from troll.tasks import TaskConfig, TaskError, load_task
from troll.tasks import splits as splits_module
from troll.tasks.gsm8k import gold_answer

DATA = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="no GSM8K beside the project, in ../shared/data/gsm8k")


@pytest.fixture(autouse=True)
def own_datasets_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets-cache")


def _rows(count, first=0):
    return [
        {"question": f"How much is {n} + 1000?", "answer": f"Add.\n#### {n + 1000:,}"}
        for n in range(first, first + count)
    ]


def _write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def _folder(tmp_path, train, test):
    _write(tmp_path / "train.jsonl", train)
    _write(tmp_path / "test.jsonl", test)
    return str(tmp_path)


def test_a_folder(tmp_path):
    task = load_task(
        TaskConfig(task="gsm8k", dataset_path=_folder(tmp_path, _rows(5), _rows(4, first=50)), eval_size=3)
    )
    assert task.train_dataset.column_names == ["prompt", "answer"]
    assert task.train_dataset["answer"] == ["1000", "1001", "1002", "1003", "1004"]
    assert task.eval_dataset["answer"] == ["1050", "1051", "1052"]
    assert task.train_dataset[0]["prompt"].startswith("How much is 0 + 1000?\n")
    assert r"\boxed{}" in task.train_dataset[0]["prompt"]
    assert [reward.__name__ for reward in task.reward_funcs] == ["success"]


def test_conversational_and_sizes(tmp_path):
    config = TaskConfig(task="gsm8k", dataset_path=_folder(tmp_path, _rows(5), _rows(4, first=50)), train_size=2)
    task = load_task(config, conversational=True)
    assert (len(task.train_dataset), len(task.eval_dataset)) == (2, 4)
    assert [message["role"] for message in task.train_dataset[0]["prompt"]] == ["user"]


def test_one_file_holds_out_its_end(tmp_path):
    path = _write(tmp_path / "rows.jsonl", _rows(10))
    task = load_task(TaskConfig(task="gsm8k", dataset_path=str(path), eval_size=4))
    assert (len(task.train_dataset), len(task.eval_dataset)) == (6, 4)
    assert task.eval_dataset["answer"][-1] == "1009"
    with pytest.raises(TaskError, match="has 10 rows, not enough to hold out eval_size=10"):
        load_task(TaskConfig(task="gsm8k", dataset_path=str(path), eval_size=10))


def test_held_out_questions_are_dropped_from_training(tmp_path):
    task = load_task(TaskConfig(task="gsm8k", dataset_path=_folder(tmp_path, _rows(5), _rows(2))))
    assert task.train_dataset["answer"] == ["1002", "1003", "1004"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "How?", "answer": "So."}, r"train row 1 \(counted from 0\): field 'answer' must end in '####"),
        ({"question": "How?", "answer": "#### many"}, r"train row 1 .*'#### many'"),
        ({"question": "How?", "answer": "####"}, "train row 1"),
        ({"question": "How?", "answer": None}, "train row 1 .* no text in its field 'answer', got None"),
        ({"question": " ", "answer": "#### 1"}, "train row 1 .* no text in its field 'question', got ' '"),
    ],
)
def test_a_row_without_an_answer_is_named(tmp_path, row, message):
    path = _folder(tmp_path, [*_rows(1), row], _rows(1, first=9))
    with pytest.raises(TaskError, match=message) as error:
        load_task(TaskConfig(task="gsm8k", dataset_path=path))
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_used_are_one_line_errors(tmp_path):
    (tmp_path / "broken.jsonl").write_text("not json\n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "folder").mkdir()
    for name, message in [
        ("missing", "no such file or folder"),
        ("broken.jsonl", "cannot read .*JSON"),
        ("empty.jsonl", "cannot read .*: it (is empty|has no rows)"),
        ("notes.txt", "is not one of .json, .jsonl, .parquet"),
        ("folder", "must have one train file .*, found none"),
    ]:
        with pytest.raises(TaskError, match=message) as error:
            load_task(TaskConfig(task="gsm8k", dataset_path=str(tmp_path / name)))
        assert "\n" not in str(error.value)


def test_without_a_network_the_local_copy_is_suggested(monkeypatch):
    def unreachable(*arguments, **options):
        raise ConnectionError("Couldn't reach the Hub\nover two lines")

    monkeypatch.setattr(splits_module, "load_dataset", unreachable)
    with pytest.raises(TaskError, match="connect to the network, or give a local copy with --dataset_path") as error:
        load_task(TaskConfig(task="gsm8k"))
    assert "\n" not in str(error.value)


def test_options_are_refused():
    with pytest.raises(TaskError, match="takes no task_options, got level"):
        load_task(TaskConfig(task="gsm8k", task_options={"level": 3}))


def _check_golds_against_solutions(rows):
    golds = [gold_answer(row["answer"]) for row in rows]
    solutions = [row["answer"].rpartition("####")[0] for row in rows]
    written = [row["answer"].rpartition("####")[2].strip() for row in rows]
    right = [rf"{text}\boxed{{{answer}}}" for text, answer in zip(solutions, written, strict=True)]
    # The right number stands in the solution still: only the final answer may count.
    wrong = [rf"{text}\boxed{{{float(gold) + 1:g}}}" for text, gold in zip(right, golds, strict=True)]
    assert success(prompts=[], completions=right, answer=golds) == [1.0] * len(rows)
    assert success(prompts=[], completions=wrong, answer=golds) == [0.0] * len(rows)
    assert success(prompts=[], completions=solutions, answer=golds) == [0.0] * len(rows)


def _all_rows():
    return [
        json.loads(line) for split in ("train", "test") for line in (DATA / f"{split}.jsonl").read_text().splitlines()
    ]


@needs_data
def test_real_solutions_score_one_and_corrupted_ones_zero():
    _check_golds_against_solutions(random.Random(0).sample(_all_rows(), 300))


@needs_data
@pytest.mark.slow
def test_all_real_solutions_score_one_and_corrupted_ones_zero():
    _check_golds_against_solutions(_all_rows())


@needs_data
def test_the_real_data_loads():
    task = load_task(TaskConfig(task="gsm8k", dataset_path=str(DATA), eval_size=2000))
    assert (len(task.train_dataset), len(task.eval_dataset)) == (7473, 1319)
