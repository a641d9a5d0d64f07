import pytest

from troll_lab.tasks import TaskConfig, TaskError, load_task
from troll_lab.tasks.free_text import paragraphs


def test_it_loads_prompts_and_two_rewards():
    task = load_task(TaskConfig(task="free_text", task_options={"words": 3, "tolerance": 0, "prompt_words": 5}))
    assert task.train_dataset.column_names == ["prompt"]
    assert {len(prompt.split()) for prompt in task.train_dataset["prompt"]} == {5}
    assert len(task.train_dataset) > 500
    assert len(task.eval_dataset) == 256
    success, style = task.reward_funcs
    assert (success.__name__, style.__name__) == ("success", "style")
    completions = [" is three words.", [{"role": "assistant", "content": "one two three"}]]
    assert success(prompts=["", ""], completions=completions) == [1.0, 0.0]
    assert style(prompts=["", ""], completions=completions) == pytest.approx([1.0, 2 / 3])


def test_sizes_and_no_prompt_in_common():
    task = load_task(TaskConfig(task="free_text", train_size=40, eval_size=10))
    assert (len(task.train_dataset), len(task.eval_dataset)) == (40, 10)
    everything = load_task(TaskConfig(task="free_text", eval_size=100_000))
    train, held_out = everything.train_dataset["prompt"], everything.eval_dataset["prompt"]
    assert not set(train) & set(held_out)
    assert everything.train_dataset["prompt"][:40] == task.train_dataset["prompt"]
    assert set(held_out) == task.held_out_questions
    assert len(set(train)) == len(train)


def test_splits_share_no_paragraph_and_are_prose():
    splits = [{" ".join(sentences) for sentences in paragraphs(split)} for split in ("eval", "train", "warmup")]
    assert sum(map(len, splits)) == len(set.union(*splits))
    # Mostly for the language model, which needs the text.
    assert sum(map(len, splits[2])) > 200_000
    for text in set.union(*splits):
        assert text[-1] in ".:"
        assert len(text.split()) >= 12
    assert paragraphs("eval") == paragraphs("eval")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"task_options": {"length": 3}}, "has no option 'length'; it has words, tolerance, prompt_words"),
        ({"task_options": {"words": 0}}, "task option words must be a whole number of at least 1, got 0"),
        ({"task_options": {"prompt_words": "x"}}, "prompt_words must be a whole number of at least 1, got 'x'"),
        ({"dataset_path": "here"}, "remove dataset_path=here"),
    ],
)
def test_mistakes_are_named(config, message):
    with pytest.raises(TaskError, match=message):
        load_task(TaskConfig(task="free_text", **config))
