import pytest
import torch

from troll_lab.tasks import TaskConfig, TaskError, load_task
from troll_lab.tasks.reasoning_gym import questions
from troll_lab.tasks.splits import Split

_SPLITS: tuple[Split, ...] = ("eval", "warmup", "train")
SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # 200 questions
EXPRESSION = {**SMALL, "prompt": "{expression} ="}


def _load(data_set="chain_sum", options=None, train_size=200, eval_size=50):
    sizes = {"train_size": train_size, "eval_size": eval_size}
    return load_task(TaskConfig(f"reasoning_gym:{data_set}", task_options=options or {}, **sizes))


def _score(task, rows, completions):
    return task.reward_funcs[0](prompts=rows["prompt"], completions=completions, question_id=rows["question_id"])


def test_reasoning_gym_has_sizes_columns_and_its_prompt():
    task = _load(options=SMALL)
    assert (len(task.train_dataset), len(task.eval_dataset)) == (200, 50)
    assert task.train_dataset.column_names == ["prompt", "question_id"]
    assert task.train_dataset[0]["prompt"].startswith("State the final answer")
    assert task.reward_funcs[0].__name__ == "success"
    task = load_task(TaskConfig("reasoning_gym:chain_sum", train_size=4, eval_size=None))
    assert (len(task.train_dataset), len(task.eval_dataset)) == (4, 256)


def test_splits_share_no_question_even_of_200():
    drawn = {split: {q.prompt for q in questions("chain_sum", SMALL, split=split, size=5000)} for split in _SPLITS}
    assert sum(map(len, drawn.values())) == len(set.union(*drawn.values())) > 190
    assert all(drawn.values())


def test_splits_have_the_distribution_of_the_generator():
    for split in _SPLITS:
        drawn = questions("chain_sum", {"max_terms": 5}, split=split, size=2000)
        terms = [question.entry["metadata"]["num_terms"] for question in drawn]
        assert [terms.count(count) / 2000 for count in range(2, 6)] == pytest.approx([0.25] * 4, abs=0.04)


def test_longer_draw_starts_with_the_shorter():
    short = questions("chain_sum", EXPRESSION, split="train", size=20)
    assert questions("chain_sum", EXPRESSION, split="train", size=50)[:20] == short


def test_success_is_the_full_score_of_the_verifier():
    task = _load(options=EXPRESSION)
    for rows in (task.train_dataset[:100], task.eval_dataset[:]):
        right = [str(eval(prompt.removesuffix("="))) for prompt in rows["prompt"]]
        assert _score(task, rows, [f" {answer}\n" for answer in right]) == [1.0] * len(right)
        assert _score(task, rows, [str(int(answer) + 1) for answer in right]) == [0.0] * len(right)
        # The verifier itself gives a part of the score for an answer that contains the right one.
        assert _score(task, rows, [f"it is {answer}" for answer in right]) == [0.0] * len(right)


def test_success_reads_the_last_tag_and_conversations():
    task = _load(options=EXPRESSION)
    rows = task.train_dataset[:1]
    right = str(eval(rows["prompt"][0].removesuffix("=")))
    reply = f"It goes into the <answer> tag: <answer>no</answer> ... <answer>{right}</answer>"
    assert _score(task, rows, [reply]) == [1.0]
    assert _score(task, rows, [[{"role": "assistant", "content": reply}]]) == [1.0]


def test_success_needs_the_answer_format():
    task = _load(options={**EXPRESSION, "answer_format": "<{answer}>"})
    assert [reward.__name__ for reward in task.reward_funcs] == ["success", "formatted", "right"]
    assert task.reward_weights == [1.0, 0.0, 0.0]
    rows = task.eval_dataset[:1]
    right = str(eval(rows["prompt"][0].removesuffix("=")))
    scores = {
        f"<{right}>": [1.0, 1.0, 1.0],
        f" <{right}>\n": [1.0, 1.0, 1.0],
        right: [0.0, 0.0, 1.0],
        f"<{right}9>": [0.0, 1.0, 0.0],
        f"<{right}": [0.0, 0.0, 0.0],
        f"{right}>": [0.0, 0.0, 0.0],
        f"<<{right}>>": [0.0, 1.0, 0.0],
        "<": [0.0, 0.0, 0.0],
        "<>": [0.0, 1.0, 0.0],
        f"< {right} >": [1.0, 1.0, 1.0],
        f"<{right}> or <{right}>": [0.0, 1.0, 0.0],
        f"<answer>{right}</answer>": [0.0, 0.0, 1.0],
        f"I think <answer> <{right}> </answer>": [1.0, 1.0, 1.0],
        "": [0.0, 0.0, 0.0],
    }
    for completion, expected in scores.items():
        arguments = {"prompts": rows["prompt"], "completions": [completion], "question_id": rows["question_id"]}
        assert [reward(**arguments)[0] for reward in task.reward_funcs] == expected, completion


def test_examples_stand_after_the_system_prompt():
    options = {**EXPRESSION, "system_prompt": "Be brief.", "examples": [["1 + 1 =", "2"], ["5 - 2 =", "3"]]}
    config = TaskConfig("reasoning_gym:chain_sum", task_options=options, train_size=2, eval_size=2)
    chat, plain = load_task(config, conversational=True), load_task(config)
    asked = _load(options=EXPRESSION, train_size=2, eval_size=2)
    for split in ("train_dataset", "eval_dataset"):
        questions = getattr(asked, split)["prompt"]
        assert getattr(plain, split)["prompt"] == [f"Be brief.\n\n1 + 1 = 2\n\n5 - 2 = 3\n\n{q}" for q in questions]
        said = [[(message["role"], message["content"]) for message in each] for each in getattr(chat, split)["prompt"]]
        roles = ("system", "user", "assistant", "user", "assistant", "user")
        before = ("Be brief.", "1 + 1 =", "2", "5 - 2 =", "3")
        assert said == [list(zip(roles, (*before, question), strict=True)) for question in questions]
    assert chat.train_questions == plain.train_questions == list(asked.train_dataset["prompt"])


def test_answer_format_takes_metadata_of_the_question():
    options = {**EXPRESSION, "answer_format": "{expression} = {answer} {so} {{expression}}"}
    task = _load(options=options, eval_size=2)
    rows = task.eval_dataset[:2]
    expressions = [prompt.removesuffix("=").strip() for prompt in rows["prompt"]]
    first, second = (f"{each} = {eval(each)} {{so}} {{{each}}}" for each in expressions)
    for completions, expected in (([first, second], [1.0, 1.0]), ([second, first], [0.0, 0.0])):
        for reward in task.reward_funcs[:2]:  # success, formatted
            assert reward(prompts=[""] * 2, completions=completions, question_id=rows["question_id"]) == expected
    (question,) = questions("chain_sum", options, split="eval", size=1)
    assert question.formatted_answer == first


def test_random_reward_is_trained_on_and_success_logged():
    task = _load(options={**EXPRESSION, "random_reward": 0.25})
    assert [reward.__name__ for reward in task.reward_funcs] == ["success", "random_reward"]
    assert task.reward_weights == [0.0, 1.0]
    torch.manual_seed(0)
    rewards = task.reward_funcs[1](prompts=[], completions=[""] * 4000)
    assert set(rewards) == {0.0, 1.0}
    # Five standard deviations of a binomial share.
    assert sum(rewards) / 4000 == pytest.approx(0.25, abs=5 * (0.25 * 0.75 / 4000) ** 0.5)
    torch.manual_seed(0)
    assert task.reward_funcs[1](prompts=[], completions=[""] * 4000) == rewards


@pytest.mark.parametrize(
    ("data_set", "options", "message"),
    [
        ("chain_sums", {}, "data set 'chain_sums', did you mean chain_sum\\? it has ab, acre, aiw"),
        ("chain_sum", {"terms": 3}, "no option 'terms', did you mean min_terms\\? it has allow_negation, answer_"),
        ("chain_sum", {"seed": 3}, "'seed' is not for reasoning-gym tasks"),
        ("chain_sum", {"min_terms": 5, "max_terms": 3}, "max_terms must be >= min_terms"),
        ("chain_sum", {"max_terms": "many"}, "does not accept the options"),
        ("chain_sum", {"prompt": "{term}"}, "does not fit 'chain_sum' .*; it knows difficulty, expression"),
        ("chain_sum", {"prompt": "{"}, "does not fit 'chain_sum'"),
        ("chain_sum", {"answer_format": "<>"}, "answer_format must be a text with {answer} in it, once, .* got '<>'"),
        ("chain_sum", {"answer_format": "<answer>{answer}</answer>"}, "without <answer> tags, in which it is read"),
        ("chain_sum", {"system_prompt": 3}, "system_prompt of task 'reasoning_gym:chain_sum' must be a text, got 3"),
        (
            "chain_sum",
            {"examples": [["3 + 4 ="]]},
            "examples of task .* must be a list of pairs of texts, such as .*, got",
        ),
        ("chain_sum", {"random_reward": 2}, r"random_reward of task .* must be in \(0, 1\), got 2"),
        ("chain_sum", {"min_terms": 1, "max_terms": 1, "max_digits": 1}, "too few different questions for its eval"),
    ],
)
def test_reasoning_gym_refuses_options(data_set, options, message):
    with pytest.raises(TaskError, match=message) as error:
        _load(data_set, options)
    assert "\n" not in str(error.value)


def test_reasoning_gym_refuses_a_dataset_path():
    with pytest.raises(TaskError, match="remove dataset_path=data"):
        load_task(TaskConfig(dataset_path="data"))
