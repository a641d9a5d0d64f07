import pytest

from troll_lab.tasks import TaskConfig, TaskError, load_task
from troll_lab.tasks.free_text import paragraphs


def test_free_text_has_beginnings_and_two_rewards():
    task = load_task(TaskConfig("free_text", task_options={"words": 3, "tolerance": 0, "prompt_words": 5}))
    assert task.train_dataset.column_names == ["prompt"]
    assert {len(prompt.split()) for prompt in task.train_dataset["prompt"]} == {5}
    assert len(task.train_dataset) > 500 and len(task.eval_dataset) == 256
    success, style = task.reward_funcs
    assert (success.__name__, style.__name__) == ("success", "style")
    completions = [" is three words.", [{"role": "assistant", "content": "one two three"}]]
    assert success(prompts=["", ""], completions=completions) == [1.0, 0.0]
    assert style(prompts=["", ""], completions=completions) == pytest.approx([1.0, 2 / 3])


def test_free_text_trains_on_no_held_out_prompt():
    task = load_task(TaskConfig("free_text", train_size=40, eval_size=10))
    everything = load_task(TaskConfig("free_text", eval_size=100_000))
    train, held_out = everything.train_dataset["prompt"], everything.eval_dataset["prompt"]
    assert (task.train_dataset["prompt"], task.eval_dataset["prompt"]) == (train[:40], held_out[:10])
    assert set(held_out) == task.held_out_questions
    assert not set(train) & set(held_out)
    assert len(set(train)) == len(train)


def test_paragraphs_of_splits_differ_and_are_prose():
    splits = [{" ".join(sentences) for sentences in paragraphs(split)} for split in ("eval", "train", "warmup")]
    assert sum(map(len, splits)) == len(set.union(*splits))
    assert sum(map(len, splits[2])) > 200_000  # characters: the language model needs most of the text
    for text in set.union(*splits):
        assert text[-1] in ".:"
        assert len(text.split()) >= 12


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"task_options": {"length": 3}}, "has no setting 'length'; it has words, tolerance, prompt_words"),
        ({"task_options": {"words": 0}}, "words of task 'free_text' must be an integer, at least 1, got 0"),
        (
            {"task_options": {"prompt_words": "x"}},
            "prompt_words of task 'free_text' must be an integer, at least 1, got 'x'",
        ),
        ({"dataset_path": "here"}, "remove dataset_path=here"),
    ],
)
def test_free_text_refuses_settings(config, message):
    with pytest.raises(TaskError, match=message):
        load_task(TaskConfig("free_text", **config))
