import json
from typing import Any

import pytest

from tests.troll_lab.rewards.test_preference import save
from troll_lab.tasks import TaskConfig, TaskError, load_task


def config(tmp_path, train, test, **settings):
    for name, prompts in (("train", train), ("test", test)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    return TaskConfig("prompts:hub/name", dataset_path=str(tmp_path), **settings)


def said(text, role="user"):
    return [{"role": role, "content": text}]


def test_texts_and_conversations_of_one_message(tmp_path):
    model = save(tmp_path / "judge", template="{{ messages[0].content }}")
    for train, test in ((["a", "b", "c"], ["b"]), ([said("a"), said("b"), said("c")], [said("b")])):
        task = load_task(config(tmp_path, train, test, reward_model=model))
        assert (task.train_dataset["prompt"], task.eval_dataset["prompt"]) == (["a", "c"], ["b"])
        task = load_task(config(tmp_path, train, test, reward_model=model), conversational=True)
        assert task.train_dataset["prompt"] == [said("a"), said("c")]
        rewards: list[Any] = task.reward_funcs
        assert [reward.config.num_labels for reward in rewards] == [1]


def test_rows_without_a_prompt_can_be_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("troll_lab.tasks.loading.load_reward_model", lambda name, conversational: name)
    mine = config(tmp_path, ["a", ""], ["b"], reward_model="judge")
    with pytest.raises(TaskError, match="skip_unanswered: true"):
        load_task(mine)
    mine.task_options = {"skip_unanswered": True}
    with pytest.warns(UserWarning, match="^1 of 2 rows left out"):
        assert load_task(mine).train_dataset["prompt"] == ["a"]


def test_local_prompts_need_no_name(tmp_path):
    model = save(tmp_path / "judge")
    local = config(tmp_path, ["a", "b"], ["c"], reward_model=model)
    local.task = "prompts"
    assert load_task(local).train_dataset["prompt"] == ["a", "b"]
    with pytest.raises(TaskError, match="name a hub data set, prompts:<hub data set>, or --dataset_path"):
        load_task(TaskConfig("prompts", reward_model=model))


def test_a_reward_model_is_needed_and_mistakes_are_named(tmp_path):
    with pytest.raises(TaskError, match="name a reward model with --reward_model"):
        load_task(config(tmp_path, ["a"], ["b"]))
    with pytest.raises(TaskError, match="has no option 'words'; it has prompt, system_prompt, examples, col"):
        load_task(config(tmp_path, ["a"], ["b"], reward_model="x", task_options={"words": 3}))
    dialogue = [*said("a"), *said("b", "assistant"), *said("c")]
    with pytest.raises(TaskError, match=r"test row 0 .* no text in its field 'prompt'"):
        load_task(config(tmp_path, [said("x")], [dialogue], reward_model="x"))
    with pytest.raises(TaskError, match="cannot load the reward model"):
        load_task(config(tmp_path, ["a"], ["b"], reward_model=str(tmp_path / "nowhere")))
