import json

import pytest

from tests.troll_lab.rewards import datasets
from troll_lab.tasks import TaskConfig, TaskError, load_task
from troll_lab.tasks.mathematics import boxed_or_whole

BOXED = r"Reason step by step, and put the final answer in \boxed{}."

FILES = {
    "gsm8k": ("gsm8k", 7473, 1319),
    "aime24": ("math_eval/aime24.jsonl", 0, 30),
    "amc23": ("math_eval/amc23.jsonl", 0, 40),
    "minerva_math": ("math_eval/minerva_math.jsonl", 0, 272),
}


def real(name):
    path = datasets.DATA / FILES[name][0]
    if not path.exists():
        pytest.skip(f"no {FILES[name][0]} next to the project, in ../shared/data")
    return str(path)


def rows(count, first=0):
    numbers = range(first, first + count)
    return [{"question": f"How much is {n} + 1000?", "answer": f"Add.\n#### {n + 1000:,}"} for n in numbers]


@pytest.fixture
def gsm8k(write, tmp_path):
    """The configuration of GSM8K in a folder with these rows."""

    def config(train, test, **settings):
        write("train.jsonl", train)
        write("test.jsonl", test)
        return TaskConfig("gsm8k", str(tmp_path), **settings)

    return config


def test_gsm8k_reads_questions_and_answers(gsm8k, hub):
    train, test = rows(5), rows(4, first=50)
    hub(("openai/gsm8k", "main"), train=train, test=test)
    for config, source in ((gsm8k(train, test, eval_size=3), None), (TaskConfig("gsm8k", eval_size=3), "openai/gsm8k")):
        task = load_task(config)
        assert task.train_dataset.column_names == ["prompt", "answer"]
        assert task.train_dataset["answer"] == ["1000", "1001", "1002", "1003", "1004"]
        assert task.eval_dataset["answer"] == ["1050", "1051", "1052"]
        assert task.train_dataset[0]["prompt"] == f"How much is 0 + 1000?\n{BOXED}"
        assert [reward.__name__ for reward in task.reward_funcs] == ["success"]
        assert (task.reward_weights, task.system_prompt, task.hub_dataset) == (None, None, source)


@pytest.mark.parametrize("eval_size", [1, 3])  # what is not evaluated today may be tomorrow
@pytest.mark.parametrize(("train_size", "answers"), [(None, ["1002", "1003", "1004"]), (2, ["1002", "1003"])])
def test_held_out_questions_are_dropped_from_training(gsm8k, eval_size, train_size, answers):
    test = [{"question": " How  much is\n0 + 1000?", "answer": "#### 1000"}, *rows(2)]
    task = load_task(gsm8k([*rows(5), rows(5)[4]], test, train_size=train_size, eval_size=eval_size))
    assert task.train_dataset["answer"] == answers
    assert len(task.eval_dataset) == eval_size


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "How?", "answer": "So."}, r"train row 1 \(counted from 0\) of .* 'answer': it must end in '####"),
        ({"question": "How?", "answer": "#### many"}, "train row 1 .*'#### many'"),
        ({"question": "How?", "answer": "#### nan"}, "train row 1 .*'#### nan'"),
        ({"question": "How?", "answer": "####"}, "train row 1"),
        ({"question": " ", "answer": "#### 1"}, "train row 1 .* no text in its field 'question', got ' '"),
    ],
)
def test_row_without_an_answer_is_named_or_left_out(gsm8k, row, message):
    config = gsm8k([*rows(1), row], rows(1, first=9))
    with pytest.raises(TaskError, match=f"{message}.*skip_unanswered: true") as error:
        load_task(config)
    assert "train.jsonl" in str(error.value)
    config.task_options = {"skip_unanswered": True}
    with pytest.warns(UserWarning, match=f"^1 of 2 rows left out; the first: .*{message}"):
        assert load_task(config).train_dataset["answer"] == ["1000"]


def test_columns_option_names_the_columns_to_read(write):
    path = write("rows.jsonl", [{"q": f"{n}?", "meta": {"result": f"#### {n}"}} for n in range(3)])
    options = {"columns": {"prompt": "q", "answer": "meta.result"}}
    assert load_task(TaskConfig("gsm8k", path, options, eval_size=1)).train_dataset["answer"] == ["0", "1"]


@pytest.mark.parametrize(
    ("answer_format", "instruction", "completion"),
    [
        ("boxed", r"\boxed{}", r"so \boxed{1000}"),
        ("hash", "####", "so\n#### 1,000"),
        ("tag", "<answer></answer>", "so <answer>1000.0</answer>"),
    ],
)
def test_answer_format_is_asked_for_and_read(gsm8k, answer_format, instruction, completion):
    task = load_task(gsm8k(rows(1), rows(1, 9), task_options={"answer_format": answer_format}))
    assert instruction in task.train_dataset[0]["prompt"]
    (success,) = task.reward_funcs
    assert success(prompts=[""] * 2, completions=[completion, "1000"], answer=["1000"] * 2) == [1.0, 0.0]


def test_prompt_template_keeps_the_braces_of_latex(write):
    given = [{"problem": r"Find $\frac{1}{x}$ in {question} {0} {instruction}" + str(n), "answer": 1} for n in range(2)]
    options = {"prompt": "{question} [{instruction}] {so} \\frac{1}{2}", "system_prompt": "Be {brief}."}
    config = TaskConfig("math", write("rows.jsonl", given), options, eval_size=1)
    expected = rf"Find $\frac{{1}}{{x}}$ in {{question}} {{0}} {{instruction}}0 [{BOXED}] {{so}} \frac{{1}}{{2}}"
    assert load_task(config).train_dataset[0]["prompt"] == f"Be {{brief}}.\n\n{expected}"
    assert load_task(config, conversational=True).train_dataset[0]["prompt"] == [
        {"role": "system", "content": "Be {brief}."},
        {"role": "user", "content": expected},
    ]
    config.task_options = {"prompt": "Solve."}
    with pytest.raises(TaskError, match=r"prompt must have the placeholder \{question\}"):
        load_task(config)


def test_shaping_rewards_are_added_with_their_weights(gsm8k):
    options = {"format_reward": 0.1, "overlong": {"length": 10, "cache": 5}}
    task = load_task(gsm8k(rows(1), rows(1, 9), task_options=options))
    _, shape, overlong = task.reward_funcs
    assert task.reward_weights == [1.0, 0.1, 1.0]
    assert shape(prompts=[""] * 2, completions=[r"\boxed{7}", "7"], answer=["1000"] * 2) == [1.0, 0.0]
    assert overlong(completion_ids=[[1] * 5, [1] * 10, [1] * 20]) == [0, -1, -1]


@pytest.mark.parametrize("options", [{"format_reward": -1}, {"level": 3}, {"answer_format": "box"}])
def test_mathematics_refuses_options(gsm8k, options):
    with pytest.raises(TaskError, match=next(iter(options))):
        load_task(gsm8k(rows(1), rows(1, 9), task_options=options))


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"so $\boxed{\frac{1}{2}}$, not \boxed{ 3 }", "3"),
        (r"\boxed{7}. also \boxed 8", "8"),
        (r"put it in \boxed: $\boxed5$.", "5"),
        (r"\boxed 7, no, \boxed{8}", "8"),
        (r"$\boxed \pi$", r"\pi"),
        (r"\boxed{7}, or \fbox{8}", "8"),
    ],
)
def test_boxed_or_whole_reads_the_last_box(solution, answer):
    assert boxed_or_whole(solution) == answer


@pytest.mark.parametrize(
    ("solution", "message"),
    [
        (r"so \boxed{3", "its last box is empty or open"),
        (r"\boxed{3} so \boxed{4", "its last box is empty or open"),
        (r"\boxed 3.5", "its last box is empty or open"),
        (r"\boxed\frac{1}{2}", "its last box is empty or open"),
        (r"\boxed{1}, or \boxed 12", "its last box is empty or open"),
        ("It is 2.\n2", r"a solution without a \\boxed\{\}, .*; name the column that holds only"),
        ("2 #### 2", r"a solution without a \\boxed\{\}, .*; name the column that holds only"),
        ("2" * 201, r"a solution without a \\boxed\{\}, .*; name the column that holds only"),
    ],
)
def test_boxed_or_whole_refuses_solutions_without_a_box(solution, message):
    with pytest.raises(ValueError, match=message):
        boxed_or_whole(solution)


# What follows has the columns that the data sets have on the hub (docs/tasks.md).


def test_math_is_trained_without_math_500(hub):
    def problem(text, answer):
        kinds = {"subject": "Algebra", "level": 2, "unique_id": "train/algebra/1.json"}
        return {"problem": text, "solution": rf"So $\boxed{{{answer}}}$.", "answer": answer, **kinds}

    train, test = [problem("a", "1"), problem("b", r"\frac{1}{2}")], [problem("a ", "1")]
    hub(("nlile/hendrycks-MATH-benchmark", None), train=train, test=test)
    assert load_task(TaskConfig("math")).train_dataset["answer"] == [r"\frac{1}{2}"]
    hub(("HuggingFaceH4/MATH-500", None), test=test)
    assert load_task(TaskConfig("math500")).eval_dataset["answer"] == ["1"]


def test_dapo_asks_for_an_answer_once(hub):
    said = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    )

    def row(text, answer, prompt):
        judged = {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"}
        source = [{"content": said.format(text), "role": "user"}]
        return {"prompt": prompt, "solution": answer, "source_prompt": source, "reward_model": judged}

    given = [row("Find $x$.", "34", said.format("Find $x$.")), row("Find $y$.", "5", "Find $y$."), row("z", "6", "z")]
    hub(("open-r1/DAPO-Math-17k-Processed", "all"), train=given)
    task = load_task(TaskConfig("dapo_math", eval_size=1))
    assert task.train_dataset["prompt"] == [f"Find $x$.\n{BOXED}", f"Find $y$.\n{BOXED}"]
    assert task.train_dataset["answer"] == ["34", "5"]


def test_eurus_is_divided_by_ability(hub):
    def row(text, truth, ability):
        prompt = [{"role": "system", "content": "[ASSESS]"}, {"role": "user", "content": text}]
        judged = {"ground_truth": truth, "style": "rule"}
        return {"data_source": "numina_olympiads", "prompt": prompt, "ability": ability, "reward_model": judged}

    asked = "\n\nPresent the answer in LaTex format: \\boxed{Your answer}"
    train = [row(f"Find $x$.{asked}", r"\frac{1}{3}", "math"), row("Write.", "{}", "code")]
    validation = [row("Write.", "{}", "code"), row(f"Find $y$.{asked}", "5", "math")]
    hub(("PRIME-RL/Eurus-2-RL-Data", None), train=train, validation=validation)
    task = load_task(TaskConfig("eurus_math"))
    assert task.train_dataset[:] == {"prompt": [f"Find $x$.\n{BOXED}"], "answer": [r"\frac{1}{3}"]}
    assert task.eval_dataset["answer"] == ["5"]


@pytest.mark.parametrize(
    ("name", "data_set", "split", "rows"),
    [
        ("aime24", "HuggingFaceH4/aime_2024", "train", [{"id": 60, "problem": "p", "solution": "s", "answer": "204"}]),
        ("amc23", "math-ai/amc23", "test", [{"id": 0, "question": "p", "answer": "204", "url": "u"}]),
        ("minerva_math", "math-ai/minervamath", "test", [{"question": "p", "answer": "204"}]),
        ("omni_math", "KbsdJames/Omni-MATH", "test", [{"problem": "p", "answer": each} for each in ("204", "")]),
    ],
)
def test_benchmarks_have_only_held_out_rows(hub, name, data_set, split, rows):
    hub((data_set, None), **{split: rows})
    task = load_task(TaskConfig(name), conversational=True)
    assert (len(task.train_dataset), task.eval_dataset["answer"]) == (0, ["204"])
    assert task.eval_dataset[0]["prompt"][0]["content"] == f"p\n{BOXED}"
    message = f"task '{name}' is a benchmark, without rows to train on; train on one of .*gsm8k, math, mbpp"
    with pytest.raises(TaskError, match=message) as error:
        load_task(TaskConfig(name), for_training=True)
    assert "math500" not in str(error.value)


@pytest.mark.parametrize("name", FILES)
def test_real_files_load_whole(name):
    task = load_task(TaskConfig(name, real(name), eval_size=None))
    assert (len(task.train_dataset), len(task.eval_dataset)) == FILES[name][1:]


def test_real_solutions_of_gsm8k_score_by_their_ends():
    task = load_task(TaskConfig("gsm8k", real("gsm8k"), eval_size=None, task_options={"answer_format": "hash"}))
    (success,) = task.reward_funcs
    lines = (datasets.DATA / "gsm8k" / "test.jsonl").read_text().splitlines()[:200]
    solutions = [json.loads(line)["answer"] for line in lines]
    golds = task.eval_dataset["answer"][:200]
    assert success(prompts=[], completions=solutions, answer=golds) == [1.0] * 200
    ends = [f"{text}\n#### {float(gold) + 1:g}" for text, gold in zip(solutions, golds, strict=True)]
    assert success(prompts=[], completions=ends, answer=golds) == [0.0] * 200
