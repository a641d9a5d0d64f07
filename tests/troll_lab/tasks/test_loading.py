import inspect
from dataclasses import replace
from typing import Any

import pytest
import yaml
from datasets import Dataset

from troll_lab.rewards.answers import INSTRUCTIONS
from troll_lab.tasks import Task, TaskConfig, TaskError, load_task
from troll_lab.tasks.loading import decontaminate


def always(prompts, completions, **columns):
    return [1.0] * len(completions)


always.__name__ = "success"


def length(prompts, completions, **columns):
    return [float(len(text)) for text in completions]


def make(name: str, *rewards: Any, train: tuple[str, ...] = (), held_out: tuple[str, ...] = ("x",)) -> Task:
    learned, evaluated = (Dataset.from_dict({"prompt": list(prompts)}) for prompts in (train, held_out))
    task = Task(name, learned, evaluated, list(rewards or (always,)))
    return replace(task, train_questions=train, held_out_questions=held_out)


def test_decontaminate_drops_held_out_questions_of_others():
    task = replace(
        make("a", length, train=("p", "q", "r"), held_out=("x", "y")), references=("P", None, "R", "X", None)
    )
    kept = decontaminate(task, [make("b", held_out=("q",)), make("c")])
    assert (kept.train_dataset["prompt"], kept.train_questions) == (["p", "r"], ["p", "r"])
    assert list(kept.references) == ["P", "R", "X", None]
    assert list(decontaminate(task, [make("b", held_out=("p",))]).references) == [None, "R", "X", None]


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([make("a")], "'a' occurs twice"),
        ([make("x/own.yaml"), make("y/own.yaml")], "'own' occurs twice"),
        ([make("b", length)], "no reward named 'success'"),
        ([make("b", held_out=("p", "q"))], "no train rows left"),
    ],
)
def test_decontaminate_refuses(others, message):
    with pytest.raises(TaskError, match=message):
        decontaminate(make("a", train=("p",)), others)


def test_decontaminate_compares_questions_without_prompts(write):
    rows = [{"problem": f"Question  {n}?", "answer": str(n)} for n in range(4)]
    one_line = {"prompt": "Q: {question}", "system_prompt": "Be brief."}
    spaced = [{"problem": f"Question {n}?\n", "answer": str(n)} for n in (1, 2)]
    other = load_task(TaskConfig("math500", write("other.jsonl", spaced), eval_size=1), conversational=True)
    task = load_task(TaskConfig("math", write("rows.jsonl", rows), eval_size=1, task_options=one_line))
    assert len(other.eval_dataset) == 1  # of the two that are compared
    assert decontaminate(task, [other]).train_dataset["answer"] == ["0"]


ROWS = [{"q": f"How much is {n} + 1?", "result": {"value": n + 1}} for n in range(4)]
FIELDS = {"dataset": "rows.jsonl", "columns": {"prompt": "q", "answer": "result.value"}, "reward": "math"}


@pytest.fixture
def task_file(tmp_path, write, monkeypatch):
    """Writes a YAML task next to `rows.jsonl`, and returns its path; the tests run in another folder."""
    write("rows.jsonl", ROWS)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)

    def to_file(**fields):
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump({name: value for name, value in (FIELDS | fields).items() if value is not None}))
        return str(path)

    return to_file


def test_yaml_with_mathematics(task_file, write):
    options = {"answer_format": "tag", "prompt": "{question} {instruction}"}
    path = task_file(task_options=options)
    task = load_task(TaskConfig(path, eval_size=1), for_training=True)
    assert task.train_dataset["answer"] == ["1", "2", "3"]
    assert task.train_dataset[0]["prompt"].endswith("+ 1? " + INSTRUCTIONS["tag"])
    (success,) = task.reward_funcs
    assert success(prompts=[""] * 2, completions=["<answer>1</answer>", "1"], answer=["1", "1"]) == [1.0, 0.0]
    # What is given to a run goes before the file.
    other = write("other.jsonl", [{"q": "x", "result": {"value": 9}}, {"q": "y", "result": {"value": 8}}])
    config = TaskConfig(path, other, {"prompt": "{question}"}, eval_size=1)
    assert load_task(config).train_dataset[:] == {"prompt": ["x"], "answer": ["9"]}


@pytest.mark.needs_bubblewrap
def test_yaml_with_code(task_file, write):
    tests = [["assert f(1) == 2"], ["assert f(2) == 3"]]
    write("code.jsonl", [{"ask": f"Write f{n}.", "tests": each} for n, each in enumerate(tests)])
    fields = {"dataset": "code.jsonl", "columns": {"prompt": "ask", "tests": "tests"}, "reward": "code"}
    task = load_task(TaskConfig(task_file(**fields), eval_size=1))
    (success,) = task.reward_funcs
    rows = task.train_dataset
    assert rows["prompt"][0].startswith("Write f0.\n")
    assert success(prompts=[""], completions=["def f(x): return x + 1"], tests=rows["tests"]) == [1.0]
    write("code.jsonl", [{"ask": "y", "tests": '{"inputs": []}'}] * 2)
    with pytest.raises(TaskError, match=r"row 1 \(counted from 0\) of .*code.jsonl has no tests in its field 'tests'"):
        load_task(TaskConfig(task_file(**fields), eval_size=1))


def success(prompts, completions, target, **columns):
    return [float(text == right) for text, right in zip(completions, target, strict=True)]


@pytest.mark.parametrize(
    ("reward", "file"),
    [("rewards.py:success", "rewards.py"), ("tests.troll_lab.tasks.test_loading:success", "test_loading.py")],
)
def test_yaml_with_a_reward_of_the_users(task_file, tmp_path, reward, file):
    (tmp_path / "rewards.py").write_text(inspect.getsource(success))
    columns = {"prompt": "q", "target": "result.value"}
    task = load_task(TaskConfig(task_file(reward=reward, columns=columns), eval_size=1))
    assert task.train_dataset[:2] == {"prompt": [ROWS[0]["q"], ROWS[1]["q"]], "target": ["1", "2"]}
    assert [path.name for path in task.files] == ["mine.yaml", file]
    assert task.reward_funcs[0](prompts=[""] * 2, completions=["1", "1"], target=["1", "2"]) == [1.0, 0.0]


def test_yaml_with_held_out_data(task_file, write, tmp_path, hub):
    write("held-out.jsonl", [ROWS[1], ROWS[3]])
    task = load_task(TaskConfig(task_file(eval_dataset="held-out.jsonl")))
    assert (task.train_dataset["answer"], task.eval_dataset["answer"]) == (["1", "3"], ["2", "4"])
    write("test.jsonl", ROWS[:1])
    (tmp_path / "rows.jsonl").rename(tmp_path / "train.jsonl")
    assert load_task(TaskConfig(task_file(dataset="."))).train_dataset["answer"] == ["2", "3", "4"]
    task = load_task(TaskConfig(task_file(dataset=".", eval_dataset="held-out.jsonl")))
    assert (task.train_dataset["answer"], task.eval_dataset["answer"]) == (["1", "3"], ["2", "4"])
    hub(("owner/name", "small"), learn=ROWS[:2], exam=ROWS[2:])
    fields = {"dataset": "owner/name", "dataset_config": "small", "train_split": "learn", "eval_split": "exam"}
    task = load_task(TaskConfig(task_file(**fields)))
    assert (task.train_dataset["answer"], task.eval_dataset["answer"]) == (["1", "2"], ["3", "4"])
    with pytest.raises(TaskError, match="owner/name has no split 'exams', only learn, exam"):
        load_task(TaskConfig(task_file(**fields | {"eval_split": "exams"})))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"eval_split": "validation"}, "eval_split is of a data set on the hub, and .*rows.jsonl is local"),
        ({"rewrad": "math"}, "mine.yaml: the task has no setting 'rewrad', did you mean reward"),
        ({"size": 3}, "the task has no setting 'size'; it has dataset, eval_dataset"),
        ({"dataset": None}, "field 'dataset' is missing"),
        ({"reward": 3}, "mine.yaml: reward of the task must be a text, got 3"),
        ({"reward": "maths"}, "reward must be math, code, FILE.py:function or module:function, got 'maths'"),
        ({"reward": "none.py:f"}, "reward: there is no file .*none.py"),
        ({"reward": "no_module:f"}, "reward: cannot import no_module"),
        ({"reward": "json:f"}, "reward: json has no function 'f'"),
        ({"columns": ["q"]}, "columns of the task must be a mapping of names"),
        ({"columns": {"prompt": 3}}, "columns of the task must be a mapping of names"),
        ({"columns": {"answer": "q"}}, "columns must name the data's columns, such as {prompt: question"),
        ({"columns": {"prompt": "q", "completions": "r"}, "reward": "json:dumps"}, "name 'completions', .* gold: r"),
        ({"columns": {"prompt": "q", "completion": "q"}, "reward": "json:dumps"}, "under the name 'completion'"),
        ({"columns": {"prompt": "q", "trainer_state": "q"}, "reward": "json:dumps"}, "under the name 'trainer_state'"),
        ({"columns": {"prompt": "q"}}, "columns must name prompt and answer for this reward, got prompt"),
        ({"columns": {"prompt": "q", "answer": "a"}}, "have no column 'a', only q, result"),
        ({"dataset": "none.jsonl"}, "dataset: there is no .*none.jsonl, and it is not a name on the hub"),
        ({"dataset": "owner/name", "eval_dataset": "x.jsonl"}, "eval_dataset needs a local dataset"),
        ({"eval_dataset": "none.jsonl"}, "eval_dataset: no such file or folder: .*none.jsonl"),
        ({"task_options": {"level": 3}}, "has no setting 'level'; it has columns, prompt, .*, answer_format"),
    ],
)
def test_mistakes_in_yaml_name_file_and_field(task_file, fields, message):
    with pytest.raises(TaskError, match=message) as error:
        load_task(TaskConfig(task_file(**fields), eval_size=1))
    assert any(name in str(error.value) for name in ("mine.yaml", "rows.jsonl", "none.jsonl"))


@pytest.mark.parametrize("text", ["a: [", "- a", ""])
def test_file_that_is_no_yaml_task_is_named(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(TaskError, match=r"mine\.yaml: (not YAML|expected 'field: value' lines)") as error:
        load_task(TaskConfig(str(path)))
    assert "\n" not in str(error.value)


PYTHON = """
from datasets import Dataset
from troll_lab.tasks import Task

def success(prompts, completions, **columns):
    return [float(prompt == completion) for prompt, completion in zip(prompts, completions)]

def load(config, argument):
    rows = Dataset.from_dict({"prompt": [argument or "a", "b", "c"]})
    return Task(config.task, rows.select([0, 1]), rows.select([2]), reward_funcs=[success])
"""


@pytest.mark.parametrize(("argument", "prompts"), [("", ["a", "b"]), (":z", ["z", "b"])])
def test_python_file_loads_with_its_argument(tmp_path, argument, prompts):
    path = tmp_path / "mine.py"
    path.write_text(PYTHON)
    task = load_task(TaskConfig(f"{path}{argument}"), for_training=True)
    assert task.train_dataset["prompt"] == prompts
    assert task.files == [path]
    assert task.reward_funcs[0](prompts=["a"], completions=["a"]) == [1.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def lod(config, argument): pass", r"must define load\(config, argument\)"),
        ("def load(config, argument): return 3", r"must return a troll_lab.tasks.Task, got int"),
        ("import no_such_module", r"cannot import .*broken.py: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def load(:", r"cannot import .*broken.py: SyntaxError: "),
    ],
)
def test_mistakes_in_python_are_named(tmp_path, text, message):
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(TaskError, match=message) as error:
        load_task(TaskConfig(str(path)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["none.py", "none.yaml", "none.py:argument"])
def test_missing_file_is_named(name):
    with pytest.raises(TaskError, match=f"task '{name}': there is no file none"):
        load_task(TaskConfig(name))


def test_yaml_file_takes_no_argument(task_file):
    with pytest.raises(TaskError, match="a YAML file takes no argument after a colon"):
        load_task(TaskConfig(f"{task_file()}:8"))
