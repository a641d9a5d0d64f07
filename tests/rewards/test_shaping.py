import copy
import pickle

import pytest

from troll.rewards.shaping import FormatReward


def test_the_format_alone_counts():
    texts = [r"\boxed{1}", r"\boxed{}", "1", "#### 1", "<answer>1</answer>"]
    for answer_format, rewards in {"boxed": [1, 0, 0, 0, 0], "hash": [0, 0, 0, 1, 0], "tag": [0, 0, 0, 0, 1]}.items():
        reward = FormatReward(answer_format)  # type: ignore[arg-type]
        assert reward(prompts=["?"] * 5, completions=texts, answer=["2"] * 5) == rewards
        assert (
            reward(prompts=["?"] * 5, completions=[[{"role": "assistant", "content": text}] for text in texts])
            == rewards
        )


def test_it_is_named_and_travels():
    reward = FormatReward("tag")
    assert reward.__name__ == "format"
    for copied in (copy.deepcopy(reward), pickle.loads(pickle.dumps(reward))):
        assert copied([], ["<answer>1</answer>"]) == [1.0]


def test_an_unknown_format():
    with pytest.raises(ValueError, match="answer_format must be one of boxed, hash, tag"):
        FormatReward("xml")  # type: ignore[arg-type]
