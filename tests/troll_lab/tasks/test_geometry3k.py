import json

import pytest
from datasets import Dataset, Image, List
from PIL import Image as PillowImage

from troll_lab.tasks import TaskConfig, TaskError, load_task


def write(tmp_path, name, problems, answers, pictures=None, columns=("images", "problem", "answer")):
    if pictures is None:
        pictures = [[PillowImage.new("RGB", (8, 8), color=(number, 0, 0))] for number in range(len(problems))]
    rows = Dataset.from_dict(dict(zip(columns, (pictures, problems, answers), strict=True)))
    rows.cast_column(columns[0], List(Image())).to_parquet(tmp_path / f"{name}.parquet")


def config(tmp_path, **settings):
    return TaskConfig("geometry3k", str(tmp_path), **settings)


def test_geometry3k_has_images_and_asks_for_a_box(tmp_path):
    write(tmp_path, "train", ["<image>Find x.", "<image>Find x.", "<image>Find y."], ["3", "4", r"2 \sqrt { 2 }"])
    write(tmp_path, "test", ["<image>Find z.", "<image>Find x."], ["1", "4"])
    task = load_task(config(tmp_path, eval_size=1), conversational=True)
    assert task.eval_dataset["answer"] == ["1"]
    # The same text with another answer is about another diagram.
    assert task.train_dataset["answer"] == ["3", r"2 \sqrt { 2 }"]
    row = task.train_dataset[1]
    (message,) = row["prompt"]
    assert message["role"] == "user"
    assert message["content"].startswith("Find y.\n") and r"\boxed{}" in message["content"]
    (image,) = row["images"]
    assert image.getpixel((0, 0)) == (2, 0, 0)
    (success,) = task.reward_funcs
    completions = [[{"role": "assistant", "content": r"\boxed{\sqrt{8}}"}], [{"role": "assistant", "content": "3"}]]
    assert success(prompts=[None] * 2, completions=completions, answer=[r"2 \sqrt { 2 }", "3"]) == [1.0, 0.0]


SOME = [PillowImage.new("RGB", (8, 8))]


@pytest.mark.parametrize(
    ("answers", "pictures", "message"),
    [
        (["3", " "], None, "train row 1 .* no answer in its field 'answer'"),
        (["3", "4"], [SOME, []], "train row 1 .* has no image in its field 'images'"),
        (["3", "4"], [SOME, None], "train row 1 .* has no image in its field 'images'"),
    ],
)
def test_row_that_lacks_something_is_named(tmp_path, answers, pictures, message):
    write(tmp_path, "train", ["<image>Find x."] * 2, answers, pictures)
    write(tmp_path, "test", ["<image>Find x."], ["4"])
    with pytest.raises(TaskError, match=message):
        load_task(config(tmp_path), conversational=True)


def test_geometry3k_needs_images_and_a_chat_template(tmp_path):
    Dataset.from_dict({"problem": ["<image>Find x."], "answer": ["3"]}).to_parquet(tmp_path / "train.parquet")
    write(tmp_path, "test", ["<image>Find x."], ["4"])
    with pytest.raises(TaskError, match=r"the train rows of .* have no column 'images', only problem, answer"):
        load_task(config(tmp_path), conversational=True)
    write(tmp_path, "train", ["<image>Find x."], ["3"])
    with pytest.raises(TaskError, match="take a vision-language model with a chat template"):
        load_task(config(tmp_path))
    with pytest.raises(TaskError, match="task 'geometry3k' has no setting 'a'; it has columns"):
        load_task(TaskConfig(task="geometry3k", task_options={"a": 1}))


def test_columns_option_names_the_images(tmp_path):
    for name in ("train", "test"):
        write(tmp_path, name, [f"Find {name}."], ["3"], columns=("diagram", "text", "answer"))
    options = {"columns": {"images": "diagram", "problem": "text"}}
    task = load_task(config(tmp_path, task_options=options), conversational=True)
    assert sorted(task.train_dataset.column_names) == ["answer", "images", "prompt"]
    assert task.eval_dataset[0]["prompt"][0]["content"].startswith("Find test.")


def test_images_of_json_are_paths(tmp_path):
    PillowImage.new("RGB", (8, 8), color=(5, 0, 0)).save(tmp_path / "x.png")
    row = {"images": [str(tmp_path / "x.png")], "problem": "<image>Find x.", "answer": 4.50}
    (tmp_path / "test.jsonl").write_text(json.dumps(row))
    task = load_task(config(tmp_path), conversational=True)
    assert (len(task.train_dataset), task.eval_dataset["answer"]) == (0, ["4.5"])
    assert task.eval_dataset[0]["images"][0].getpixel((0, 0)) == (5, 0, 0)
