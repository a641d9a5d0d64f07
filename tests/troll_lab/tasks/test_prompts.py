import json

import pytest

from troll_lab.tasks import TaskConfig, TaskError, load_task


@pytest.fixture(autouse=True)
def any_reward_model(monkeypatch):
    """Any name is that of a reward model."""
    monkeypatch.setattr("troll_lab.tasks.loading.load_reward_model", lambda name, conversational: name)


def config(tmp_path, train, test, task="prompts:hub/name", **settings):
    for name, prompts in (("train", train), ("test", test)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    return TaskConfig(task, str(tmp_path), **{"reward_model": "judge", **settings})


def said(text, role="user"):
    return [{"role": role, "content": text}]


@pytest.mark.parametrize("task", ["prompts:hub/name", "prompts"])
@pytest.mark.parametrize("form", [str, said])
def test_prompts_are_texts_or_conversations_of_one_message(tmp_path, task, form):
    mine = config(tmp_path, [form("a"), form("b"), form("c")], [form("b")], task)
    plain, chat = (load_task(mine, conversational=each) for each in (False, True))
    assert (plain.train_dataset["prompt"], plain.eval_dataset["prompt"]) == (["a", "c"], ["b"])
    assert chat.train_dataset["prompt"] == [said("a"), said("c")]
    assert chat.reward_funcs == ["judge"]


def test_prompts_need_a_reward_model_and_data(tmp_path):
    with pytest.raises(TaskError, match="name a reward model with --reward_model"):
        load_task(config(tmp_path, ["a"], ["b"], reward_model=None))
    with pytest.raises(TaskError, match="name a hub data set, prompts:<hub data set>, or --dataset_path"):
        load_task(TaskConfig("prompts", reward_model="judge"))
    with pytest.raises(TaskError, match="has no setting 'words'; it has columns, prompt, system_prompt, examples"):
        load_task(config(tmp_path, ["a"], ["b"], task_options={"words": 3}))
    dialogue = [*said("a"), *said("b", "assistant"), *said("c")]
    with pytest.raises(TaskError, match=r"test row 0 .* no text in its field 'prompt'"):
        load_task(config(tmp_path, [said("x")], [dialogue]))


def test_long_completions_are_punished_next_to_the_reward_model(tmp_path):
    task = load_task(config(tmp_path, ["a"], ["b"], task_options={"overlong": {"length": 10, "cache": 5}}))
    overlong, model = task.reward_funcs
    assert (model, task.reward_weights) == ("judge", None)
    assert overlong(completion_ids=[[1] * 5, [1] * 10, [1] * 20]) == [0, -1, -1]
