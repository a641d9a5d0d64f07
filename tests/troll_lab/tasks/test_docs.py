"""What docs/tasks.md shows, and the examples next to it."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import yaml
from datasets import load_dataset

from troll_lab.runs.toy_model import WarmUp
from troll_lab.tasks import TaskConfig, load_task
from troll_lab.tasks.judges import JUDGES, Judge

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "tasks.md").read_text()
REFERENCE = (ROOT / "docs" / "reference" / "tasks.md").read_text()
EXAMPLES = ROOT / "examples" / "tasks"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_page_shows_the_examples():
    warm_up, geometry = blocks("yaml")
    assert geometry == (EXAMPLES / "geometry.yaml").read_text()
    assert WarmUp(**yaml.safe_load(warm_up)["warm_up"]).format_share == 0.02
    assert blocks("python")[0] == (EXAMPLES / "sorting.py").read_text()


def test_page_names_refused_and_verified_data_sets():
    section = REFERENCE.partition("## Data sets of reasoning-gym\n")[2].partition("\n## ")[0]
    texts = section.partition("any text:")[2].partition("\n- ")[0], section.partition("| refused | reason |\n")[2]
    verified, refused = (sorted(set(JUDGES).intersection(re.findall(r"`(\w+)`", text))) for text in texts)
    assert verified == [name for name, judge in JUDGES.items() if judge is Judge.VERIFIER]
    assert refused == [name for name, judge in JUDGES.items() if isinstance(judge, str)]
    assert re.findall(r"^- (\d+) are", section, re.MULTILINE) == [str(len(verified)), str(len(refused))]


def test_yaml_example():
    task = load_task(TaskConfig(str(EXAMPLES / "geometry.yaml"), eval_size=2), for_training=True)
    assert (len(task.train_dataset), len(task.eval_dataset)) == (4, 2)
    (success,) = task.reward_funcs
    completions = [f"<answer>{answer}</answer>" for answer in ("9\\pi", "13.0", "\\sqrt{8}", "72")]
    rewards = success(prompts=[""] * 4, completions=completions, answer=task.train_dataset["answer"])
    assert rewards == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(("argument", "length"), [("", 5), (":8", 8)])
def test_python_example(argument, length):
    name = f"{EXAMPLES / 'sorting.py'}{argument}"
    task = load_task(TaskConfig(name, train_size=50), for_training=True)
    assert (len(task.train_dataset), len(task.eval_dataset)) == (50, 256)
    whole = load_task(TaskConfig(name, eval_size=None))
    assert whole.eval_dataset["prompt"][:256] == task.eval_dataset["prompt"]
    assert not set(whole.train_dataset["prompt"]) & set(whole.eval_dataset["prompt"])
    answer = task.train_dataset["answer"][0]
    assert answer.count(",") == length - 1
    (success,) = task.reward_funcs
    assert success(prompts=[""] * 2, completions=[f"<answer>{answer}</answer>", answer], answer=[answer] * 2) == [1, 0]


def test_script_for_trl(monkeypatch):
    made = {}
    monkeypatch.setattr("troll.trl.TrollTrainer", lambda **arguments: made.update(arguments))
    monkeypatch.setattr("troll.trl.TrollConfig", lambda **settings: settings)
    exec(blocks("python")[1], {})
    (success,) = made["reward_funcs"]
    rows = made["train_dataset"][:]
    assert len(rows["prompt"]) >= 8, "TRL's defaults take eight prompts for a rollout of eight updates"
    completions = [rf"\boxed{{{answer}}}" for answer in rows["answer"]]
    assert success(prompts=rows["prompt"], completions=completions, answer=rows["answer"]) == [1.0] * len(completions)


def test_script_for_verl(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train, test = [{"question": "a?", "answer": "#### 1"}], [{"question": "b?", "answer": "#### 2"}]
    hub(("openai/gsm8k", "main"), train=train, test=test)
    command = "python examples/verl/prepare.py gsm8k data/gsm8k"
    assert command in PAGE
    _, script, *arguments = command.split()
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    runpy.run_path(str(ROOT / script), run_name="__main__")
    for name, truth in (("train", "1"), ("test", "2")):
        (row,) = load_dataset("parquet", data_files=f"data/gsm8k/{name}.parquet", split="train")
        assert row["reward_model"] == {"style": "rule", "ground_truth": truth}
