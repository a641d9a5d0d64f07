import json

import pytest

from tests.troll_lab.rewards.datasets import DATA
from troll_lab.tasks import TaskConfig, TaskError, load_task
from troll_lab.tasks.mathematics import after_hashes, boxed_or_whole

BOXED = r"Reason step by step, and put the final answer in \boxed{}."

FILES = {
    "gsm8k": ("gsm8k", 7473, 1319),
    "aime24": ("math_eval/aime24.jsonl", 0, 30),
    "amc23": ("math_eval/amc23.jsonl", 0, 40),
    "minerva_math": ("math_eval/minerva_math.jsonl", 0, 272),
}


def real(name):
    path = DATA / FILES[name][0]
    if not path.exists():
        pytest.skip(f"no {FILES[name][0]} next to the project, in ../shared/data")
    return str(path)


def rows(count, first=0):
    numbers = range(first, first + count)
    return [{"question": f"How much is {n} + 1000?", "answer": f"Add.\n#### {n + 1000:,}"} for n in numbers]


@pytest.fixture
def folder(write, tmp_path):
    def of(train, test):
        write("train.jsonl", train)
        write("test.jsonl", test)
        return str(tmp_path)

    return of


def test_a_folder(folder):
    task = load_task(TaskConfig(task="gsm8k", dataset_path=folder(rows(5), rows(4, first=50)), eval_size=3))
    assert task.train_dataset.column_names == ["prompt", "answer"]
    assert task.train_dataset["answer"] == ["1000", "1001", "1002", "1003", "1004"]
    assert task.eval_dataset["answer"] == ["1050", "1051", "1052"]
    assert task.train_dataset[0]["prompt"] == f"How much is 0 + 1000?\n{BOXED}"
    assert [reward.__name__ for reward in task.reward_funcs] == ["success"]
    assert (task.reward_weights, task.system_prompt) == (None, None)


def test_the_hub_is_named_where_rows_come_from_it(hub, folder):
    local = TaskConfig(task="gsm8k", dataset_path=folder(rows(5), rows(4, first=50)))
    assert load_task(local).hub_dataset is None
    hub(("openai/gsm8k", "main"), train=rows(5), test=rows(4, first=50))
    assert load_task(TaskConfig(task="gsm8k")).hub_dataset == "openai/gsm8k"


def test_held_out_questions_are_dropped_from_training(folder):
    path = folder([*rows(5), rows(5)[4]], [{"question": " How  much is\n0 + 1000?", "answer": "#### 1000"}, *rows(2)])
    for eval_size in (1, 3):  # what is not evaluated today may be tomorrow
        task = load_task(TaskConfig(task="gsm8k", dataset_path=path, eval_size=eval_size))
        assert task.train_dataset["answer"] == ["1002", "1003", "1004"]
        assert len(task.eval_dataset) == eval_size


def test_train_size_counts_rows_without_held_out_questions(folder):
    path = folder(rows(9), rows(4))
    task = load_task(TaskConfig(task="gsm8k", dataset_path=path, train_size=3))
    assert task.train_dataset["answer"] == ["1004", "1005", "1006"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "How?", "answer": "So."}, r"train row 1 \(counted from 0\) of .* 'answer': it must end in '####"),
        ({"question": "How?", "answer": "#### many"}, "train row 1 .*'#### many'"),
        ({"question": "How?", "answer": "####"}, "train row 1"),
        ({"question": " ", "answer": "#### 1"}, "train row 1 .* no text in its field 'question', got ' '"),
    ],
)
def test_a_row_without_an_answer_is_named_or_left_out(folder, row, message):
    path = folder([*rows(1), row], rows(1, first=9))
    with pytest.raises(TaskError, match=message) as error:
        load_task(TaskConfig(task="gsm8k", dataset_path=path))
    assert "\n" not in str(error.value)
    assert "train.jsonl" in str(error.value)
    config = TaskConfig(task="gsm8k", dataset_path=path, task_options={"skip_unanswered": True})
    with pytest.warns(UserWarning, match=f"^1 of 2 rows left out; the first: .*{message}"):
        assert load_task(config).train_dataset["answer"] == ["1000"]


def test_columns_of_the_user(write):
    given = [{"q": f"{n}?", "meta": {"result": f"#### {n}"}} for n in range(3)]
    path = write("rows.jsonl", given)
    options = {"columns": {"prompt": "q", "answer": "meta.result"}}
    task = load_task(TaskConfig(task="gsm8k", dataset_path=path, task_options=options, eval_size=1))
    assert task.train_dataset["answer"] == ["0", "1"]


@pytest.mark.parametrize(
    ("answer_format", "instruction", "completion"),
    [
        ("boxed", r"\boxed{}", r"so \boxed{1000}"),
        ("hash", "####", "so\n#### 1,000"),
        ("tag", "<answer></answer>", "so <answer>1000.0</answer>"),
    ],
)
def test_the_answer_format_is_asked_for_and_read(folder, answer_format, instruction, completion):
    config = TaskConfig("gsm8k", folder(rows(1), rows(1, 9)), task_options={"answer_format": answer_format})
    task = load_task(config)
    assert instruction in task.train_dataset[0]["prompt"]
    (success,) = task.reward_funcs
    assert success(prompts=[""] * 2, completions=[completion, "1000"], answer=["1000"] * 2) == [1.0, 0.0]


def test_templates_keep_the_braces_of_latex(write):
    given = [{"problem": r"Find $\frac{1}{x}$ in {question} {0} {instruction}" + str(n), "answer": 1} for n in range(2)]
    options = {"prompt": "{question} [{instruction}] {so} \\frac{1}{2}", "system_prompt": "Be {brief}."}
    config = TaskConfig("math", write("rows.jsonl", given), task_options=options, eval_size=1)
    expected = rf"Find $\frac{{1}}{{x}}$ in {{question}} {{0}} {{instruction}}0 [{BOXED}] {{so}} \frac{{1}}{{2}}"
    assert load_task(config).train_dataset[0]["prompt"] == f"Be {{brief}}.\n\n{expected}"
    assert load_task(config, conversational=True).train_dataset[0]["prompt"] == [
        {"role": "system", "content": "Be {brief}."},
        {"role": "user", "content": expected},
    ]
    config.task_options = {"prompt": "Solve."}
    with pytest.raises(TaskError, match=r"must have the placeholder \{question\}, got 'Solve.'"):
        load_task(config)


def test_shaping_is_off_by_default_and_weighted(folder):
    path = folder(rows(1), rows(1, 9))
    options = {"format_reward": 0.1, "overlong": {"length": 10, "cache": 5}}
    task = load_task(TaskConfig("gsm8k", path, task_options=options))
    success, shape, overlong = task.reward_funcs
    assert task.reward_weights == [1.0, 0.1, 1.0]
    right, wrong = r"\boxed{1000}", r"\boxed{7}"
    assert success(prompts=[""] * 2, completions=[right, wrong], answer=["1000"] * 2) == [1.0, 0.0]
    assert shape(prompts=[""] * 2, completions=[wrong, "7"], answer=["1000"] * 2) == [1.0, 0.0]
    assert overlong(completion_ids=[[1] * 5, [1] * 10, [1] * 20]) == [0, -1, -1]
    too_short: list[dict] = [{"overlong": {"length": 10}}, {"overlong": {"length": 2, "cache": 6}}]
    for wrong_options in ({"format_reward": -1}, {"level": 3}, *too_short):
        with pytest.raises(TaskError):
            load_task(TaskConfig("gsm8k", path, task_options=wrong_options))


def test_gold_answers_of_solutions():
    assert after_hashes("so\n#### 1,234") == "1234"
    assert boxed_or_whole(r"so $\boxed{\frac{1}{2}}$, not \boxed{ 3 }") == "3"
    assert boxed_or_whole(r"\frac{1}{2}") == r"\frac{1}{2}"
    for solution, answer in (
        (r"\boxed{7}. also \boxed 8", "8"),
        (r"put it in \boxed: $\boxed5$.", "5"),
        (r"\boxed 7, no, \boxed{8}", "8"),
        (r"$\boxed \pi$", r"\pi"),
    ):
        assert boxed_or_whole(solution) == answer
    open_boxes = [
        r"so \boxed{3",
        r"\boxed{3} so \boxed{4",
        r"\boxed 3.5",
        r"\boxed\frac{1}{2}",
        r"\boxed{1}, or \boxed 12",
    ]
    for solution in open_boxes:
        with pytest.raises(ValueError, match="its last box is empty or open"):
            boxed_or_whole(solution)
    for solution in ("It is 2.\n2", "2 #### 2", "2" * 201):
        with pytest.raises(ValueError, match=r"a solution without a \\boxed\{\}, .*; name the column that holds only"):
            boxed_or_whole(solution)


def test_a_solution_without_a_box_is_no_answer(folder):
    with pytest.raises(TaskError, match=r"test row 0 .* has no answer in its field 'answer': it is a solution without"):
        load_task(TaskConfig("math", folder(rows(2), rows(1, 9))))


# What follows has the columns that the data sets have on the hub (docs/tasks.md).


def test_math_is_trained_without_math_500(hub):
    def problem(text, answer):
        kinds = {"subject": "Algebra", "level": 2, "unique_id": "train/algebra/1.json"}
        return {"problem": text, "solution": rf"So $\boxed{{{answer}}}$.", "answer": answer, **kinds}

    train, test = [problem("a", "1"), problem("b", r"\frac{1}{2}")], [problem("a ", "1")]
    hub(("nlile/hendrycks-MATH-benchmark", None), train=train, test=test)
    task = load_task(TaskConfig("math"))
    assert task.train_dataset["answer"] == [r"\frac{1}{2}"]
    hub(("HuggingFaceH4/MATH-500", None), test=test)
    assert load_task(TaskConfig("math500")).eval_dataset["answer"] == ["1"]


def test_dapo_asks_for_an_answer_once(hub):
    said = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    )
    names = {"data_source": "math_dapo", "ability": "MATH", "extra_info": {"index": "9a9b"}}

    def row(text, answer, prompt):
        judged = {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"}
        source = [{"content": said.format(text), "role": "user"}]
        return {"prompt": prompt, "solution": answer, "source_prompt": source, "reward_model": judged, **names}

    given = [row("Find $x$.", "34", said.format("Find $x$.")), row("Find $y$.", "5", "Find $y$."), row("z", "6", "z")]
    hub(("open-r1/DAPO-Math-17k-Processed", "all"), train=given)
    task = load_task(TaskConfig("dapo_math", eval_size=1))
    assert task.train_dataset["prompt"] == [f"Find $x$.\n{BOXED}", f"Find $y$.\n{BOXED}"]
    assert task.train_dataset["answer"] == ["34", "5"]


def test_dapo_as_its_authors_have_it(write):
    # Every row a hundred times, the prompt as a conversation.
    row = {"prompt": [{"content": "Find $x$.", "role": "user"}], "reward_model": {"ground_truth": "34", "style": "r"}}
    other = {"prompt": [{"content": "Find $y$.", "role": "user"}], "reward_model": {"ground_truth": "5", "style": "r"}}
    task = load_task(TaskConfig("dapo_math", write("dapo.jsonl", [row, row, row, other]), eval_size=1))
    assert task.train_dataset["answer"] == ["34"]


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
    ("name", "data_set", "split", "row"),
    [
        ("aime24", "HuggingFaceH4/aime_2024", "train", {"id": 60, "problem": "p", "solution": "s", "answer": "204"}),
        ("amc23", "math-ai/amc23", "test", {"id": 0, "question": "p", "answer": "204", "url": "u"}),
        ("minerva_math", "math-ai/minervamath", "test", {"question": "p", "answer": "204"}),
        ("omni_math", "KbsdJames/Omni-MATH", "test", {"problem": "p", "solution": "s", "answer": "204"}),
    ],
)
def test_benchmarks_cannot_be_trained_on(hub, name, data_set, split, row):
    hub((data_set, None), **{split: [row, {**row, "answer": ""}] if name == "omni_math" else [row]})
    task = load_task(TaskConfig(name))
    assert (len(task.train_dataset), task.eval_dataset["answer"]) == (0, ["204"])
    assert load_task(TaskConfig(name), conversational=True).eval_dataset[0]["prompt"][0]["content"] == f"p\n{BOXED}"
    message = f"task '{name}' is a benchmark, without rows to train on; train on one of .*gsm8k, math, mbpp"
    with pytest.raises(TaskError, match=message) as error:
        load_task(TaskConfig(name), for_training=True)
    assert "math500" not in str(error.value)


@pytest.mark.parametrize("name", FILES)
def test_the_real_files_load_whole(name):
    for conversational in (False, True):
        task = load_task(TaskConfig(name, real(name), eval_size=None), conversational=conversational)
        assert (len(task.train_dataset), len(task.eval_dataset)) == FILES[name][1:]


def test_after_hashes_reads_only_the_end_of_a_solution():
    task = load_task(TaskConfig("gsm8k", real("gsm8k"), eval_size=None, task_options={"answer_format": "hash"}))
    (success,) = task.reward_funcs
    lines = (DATA / "gsm8k" / "test.jsonl").read_text().splitlines()[:200]
    solutions = [json.loads(line)["answer"] for line in lines]
    golds = task.eval_dataset["answer"][:200]
    assert success(prompts=[], completions=solutions, answer=golds) == [1.0] * 200
    ends = [f"{text}\n#### {float(gold) + 1:g}" for text, gold in zip(solutions, golds, strict=True)]
    assert success(prompts=[], completions=ends, answer=golds) == [0.0] * 200
