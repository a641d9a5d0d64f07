import pickle
import time

import pytest

from troll_lab.rewards.answers import INSTRUCTIONS, FormatReward, final_answer, marked

ANSWERS = {
    "boxed": [
        (r"so \boxed{72}.", "72"),
        (r"\boxed{1} then \boxed{72}", "72"),
        (r"\boxed{ 72 }", "72"),
        (r"\boxed {72}", "72"),
        (r"$\boxed{72}$", "72"),
        (r"\\boxed{72}", "72"),
        (r"first \\\boxed{72}", "72"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{1\right.}", r"\left\{1\right."),
        (r"\boxed{\begin{matrix}1\\2\end{matrix}}", r"\begin{matrix}1\\2\end{matrix}"),
        (r"} } \boxed{72} {", "72"),
        (r"\boxed{\boxed{72}}", "72"),
        (r"\boxed{$\boxed{72}$}", "72"),
        (r"\boxed{\boxed{17} 18}", r"\boxed{17} 18"),
        (r"\boxed{17 \boxed{18}}", r"17 \boxed{18}"),
        (r"\boxed{ \boxed{72}", "72"),
        (r"\boxed{72} and an open \boxed{7", "72"),
        (r"\boxed{72} \boxed{}", None),
        (r"\boxed{ }", None),
        (r"\boxed{72", None),
        (r"\boxed72", None),
        (r"\fbox{72}", None),
        (r"\boxedx{72}", None),
        ("#### 72", None),
        ("72", None),
        ("", None),
    ],
    "hash": [
        ("so\n#### 72", "72"),
        ("#### 1\nno\n#### 72 \nbye", "72"),
        ("#### 1 #### 72", "72"),
        ("####72", "72"),
        (r"#### $\boxed{72}$.", "72"),
        ("#### **72**", "72"),
        ("**#### 72**", "72"),
        ("***#### 72***\nbye", "72"),
        ("#### *72*.", "72."),
        ("#### `72`", "72"),
        (r"#### **\$72**", r"\$72"),
        (r"#### \[72\]", r"\[72\]"),
        (r"#### \(72\)", r"\(72\)"),
        ("#### $$72$$", "$$72$$"),
        ("#### $72$", "$72$"),
        ("#### \\[\n72\n\\]\nbye", "72"),
        ("#### $$\n  72\n$$", "72"),
        ("#### 2*3", "2*3"),
        ("#### **72", "**72"),
        ("#### 72\n####", None),
        ("#### \n72", None),
        ("##### 72", None),
        ("### 72", None),
        (r"\boxed{72}", None),
    ],
    "tag": [
        ("<answer>72</answer>", "72"),
        ("<answer>1</answer> no <answer>\n72\n</answer>", "72"),
        ("<answer>17 <answer>18</answer>", "18"),
        ("<answer>72</answer> </answer>", "72"),
        ("<answer>72</answer> <answer>7", "72"),
        (r"<answer>\boxed{72}</answer>", "72"),
        ("<answer> **72** </answer>", "72"),
        ("<answer>72</answer><answer></answer>", None),
        ("<answer>72", None),
        ("</answer>72<answer>", None),
        ("72", None),
    ],
}


@pytest.mark.parametrize(
    ("answer_format", "text", "answer"),
    [(answer_format, *row) for answer_format, rows in ANSWERS.items() for row in rows],
)
def test_final_answer_is_the_last_marked_one(answer_format, text, answer):
    assert final_answer(text, answer_format) == answer
    assert answer_format != "boxed" or final_answer(text) == answer  # by default


@pytest.mark.parametrize("answer_format", INSTRUCTIONS)
@pytest.mark.parametrize(
    "part",
    ["{", "}", "\\", "$", " ", "\n", "#", "<", "\\boxed", "\\boxed ", "\\boxed{", "\\boxed{}",
     "\\boxed{\\boxed{1}}", "#### ", "####\n", "<answer>", "</answer>", "<answer></answer>", "$\\boxed{",
     "\\boxed{a}$\\"],
)  # fmt: skip
def test_final_answer_takes_linear_time(part, answer_format):
    text = part * (200_000 // len(part))
    start = time.process_time()
    final_answer(text, answer_format)
    final_answer(rf"<answer>\boxed{{{text}</answer>", answer_format)
    assert time.process_time() - start < 1  # a tenth of a second at most, on a quiet machine


@pytest.mark.parametrize(
    ("answer_format", "mark"), [("boxed", r"\boxed{}"), ("hash", "####"), ("tag", "<answer></answer>")]
)
def test_instructions_and_marked_have_the_format(answer_format, mark):
    assert mark in INSTRUCTIONS[answer_format]
    for answer in ("18", r"\frac{1}{2}", r"\{1, 2\}", "%s"):
        assert final_answer(f"So it is {marked(answer, answer_format)}", answer_format) == answer


@pytest.mark.parametrize("use", [lambda name: final_answer("72", name), lambda name: marked("72", name), FormatReward])
def test_unknown_answer_format_is_refused(use):
    with pytest.raises(ValueError, match="answer_format must be one of boxed, hash, tag, got 'xml'"):
        use("xml")


@pytest.mark.parametrize(
    ("answer_format", "rewards"), [("boxed", [1, 0, 0, 0, 0]), ("hash", [0, 0, 0, 1, 0]), ("tag", [0, 0, 0, 0, 1])]
)
def test_format_reward_does_not_judge_the_answer(answer_format, rewards):
    texts = [r"\boxed{1}", r"\boxed{}", "1", "#### 1", "<answer>1</answer>"]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    reward = pickle.loads(pickle.dumps(FormatReward(answer_format)))
    assert reward.__name__ == "format"
    assert reward(prompts=["?"] * 5, completions=texts, answer=["2"] * 5) == rewards
    assert reward(prompts=["?"] * 5, completions=chats) == rewards
