import contextlib
import io
import json
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml
from huggingface_hub import HfApi
from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations import integration_utils

from tests.troll_lab.runs.conftest import logged, short, trainer_with
from troll.trl import TrollTrainer
from troll_lab import recipes
from troll_lab.evaluation.training_task import TrainingTask, find_training_task
from troll_lab.lock import locked
from troll_lab.recipes import Recipe, RecipeError
from troll_lab.runs import build
from troll_lab.runs.build import LOCK, checkpoint_of
from troll_lab.runs.comparison_files import write_comparison
from troll_lab.runs.text import percent
from troll_lab.runs.train import ProgressLine, train
from troll_lab.tasks import TaskError, load_task
from troll_lab.terminal import UsageError
from troll_lab.trl import checkpoints
from troll_lab.trl.checkpoints import check_complete


@pytest.fixture
def console() -> Console:
    return Console(record=True, width=200, file=io.StringIO())


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()


def test_train_leaves_a_complete_folder(whole: tuple[list[str], Path, str]) -> None:
    overrides, folder, printed = whole
    recipe, summary, lines = recipes.load("quickstart", overrides), summary_of(folder), lines_of(folder)
    assert (summary["status"], summary["steps"], summary["rollouts"]) == ("finished", 4, 2)
    assert 0 <= summary["success_before"] <= 1
    assert 0 <= summary["success_after"] <= 1
    assert (summary["surrogate"], summary["advantage_estimator"]) == ("troll", "group")
    assert summary["surrogate_settings"]["kl_bound"] == 0.05
    assert summary["entropy_after"] == [line["entropy"] for line in lines if "loss" in line][-1]
    assert summary["training_seconds"] == pytest.approx(sum(line.get("step_time", 0) for line in lines), abs=0.06)
    assert summary["training_seconds"] < summary["seconds"]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "eval_reward" in line] == [0, 2, 4]
    assert not any("train_runtime" in line for line in lines)
    trust_region = [line["trust_region/kl_before_mean"] for line in lines if "loss" in line]
    assert trust_region[0] == pytest.approx(0, abs=1e-9), "the first update of a rollout is on-policy"
    assert trust_region[1] > 0

    verdicts = json.loads((folder / "verdicts.json").read_text())
    assert verdicts["step"] == 4
    assert len(verdicts["question"]) == len(verdicts["success"]) == summary["eval_size"]
    assert sorted(verdicts["row"]) == list(range(summary["eval_size"]))
    assert sum(verdicts["success"]) / summary["eval_size"] == pytest.approx(summary["success_after"])
    prompts = load_task(recipe.task).eval_dataset["prompt"]
    assert [prompts[number] for number in verdicts["question"]] == prompts
    assert len(set(verdicts["question"])) == len(set(prompts))

    evaluations = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert [each["step"] for each in evaluations] == [0, 2, 4]
    first, *_, last = ([answer["question"] for answer in each["answers"]] for each in evaluations)
    assert first == last and len(set(first)) == len(first) == min(5, len(set(prompts))) and set(first) <= set(prompts)
    assert {answer["success"] for each in evaluations for answer in each["answers"]} <= {0.0, 1.0}
    told = ("with TROLL, KL bound 0.05", f" {summary['eval_size']} problems", "report")
    for text in (*told, f"time    {summary['training_seconds']:.0f} s in training, 4 steps"):
        assert text in printed

    AutoTokenizer.from_pretrained(folder / "model")
    assert weights(folder)
    assert "<html" in (folder / "report.html").read_text()
    assert recipes.load(str(folder / "config.yaml")).settings["max_steps"] == 4
    for place in (folder, folder / "model", folder / "checkpoint-2", folder / "checkpoint-4"):
        assert (place / "task.json").is_file()
        assert find_training_task(str(place)) == TrainingTask.of(recipe.task, None)
    check_complete(folder / "checkpoint-4")  # what was added later does not count
    card = (folder / "model" / "README.md").read_text()
    assert f"| after step 4 | {percent(summary['success_after'])} |" in card
    assert f"from_pretrained('{folder / 'model'}')" in card
    assert (folder / "README.md").read_text() == card


AGENT = """
from troll.trl import complete


def rollout(prompts, trainer):
    prompt_ids = trainer.processing_class(list(prompts))["input_ids"]
    (first, _), (last, logprobs) = (complete(trainer, prompt_ids) for _ in range(2))
    earlier = [[{"prompt_ids": p, "completion_ids": c}] for p, c in zip(prompt_ids, first)]
    return {"prompt_ids": prompt_ids, "completion_ids": last, "logprobs": logprobs, "earlier": earlier}


def success(prompts, completions, a, **columns):
    assert all(prompt in ('Q: a?', 'Q: b?') for prompt in prompts)
    return [float(each == '2') for each in a]
"""
OWN_TASK = "{dataset: rows.jsonl, eval_dataset: rows.jsonl, columns: {prompt: q, a: a}, reward: 'agent.py:success'}"


@dataclass
class Featured:
    """A run with most of what a recipe can have, what it uploaded, folders and their cards, and what it printed."""

    recipe: Path
    overrides: list[str]
    folder: Path
    uploads: list[tuple[str, str]]
    printed: str


@pytest.fixture(scope="module")
def featured(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Featured:
    home = tmp_path_factory.mktemp("featured")
    (home / "rows.jsonl").write_text('{"q": "a?", "a": "1"}\n{"q": "b?", "a": "2"}\n')
    (home / "agent.py").write_text(AGENT)
    (home / "own.yaml").write_text(OWN_TASK)
    own = {"task": str(home / "own.yaml"), "task_options": {"prompt": "Q: {question}"}}
    own_parts = {"rollout_func": f"{home / 'agent.py'}:rollout", "eval_tasks": [own]}
    (home / "recipe.yaml").write_text(json.dumps({"extends": "quickstart", **own_parts}))
    overrides = short(
        tiny_model,
        home / "run",
        kl_bound=".inf",
        pull="proximal",
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        logging_steps=3,
        push_to_hub="true",
        hub_model_id="you/sums",
    )
    uploads: list[tuple[str, str]] = []

    def upload_folder(api: Any, *, repo_id: str, folder_path: str, **options: Any) -> Future:
        assert repo_id == "you/sums" and (Path(folder_path) / "task.json").is_file()
        uploads.append((Path(folder_path).name, (Path(folder_path) / "README.md").read_text()))
        done: Future = Future()
        done.set_result(None)
        return done

    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(HfApi, "whoami", lambda api: {"name": "you"})
        patched.setattr(HfApi, "create_repo", lambda api, name, **options: SimpleNamespace(repo_id="you/sums"))
        patched.setattr(HfApi, "upload_folder", upload_folder)
        assert train(recipes.load(str(home / "recipe.yaml"), overrides), Console(file=output, width=200))
    return Featured(home / "recipe.yaml", overrides, home / "run", uploads, output.getvalue())


def test_the_hub_shows_the_card_of_the_run(featured: Featured) -> None:
    assert [folder for folder, _ in featured.uploads] == ["run", "run", "model"]
    assert all("from_pretrained('you/sums')" in card for _, card in featured.uploads)
    (_, first), _, (_, last) = featured.uploads
    assert "(unfinished)" in first and "| after step 4 |" not in first
    assert "(unfinished)" not in last and "| after step 4 |" in last
    assert "pushed  https://huggingface.co/you/sums" in featured.printed


def test_tasks_of_ones_own_are_judged_by_their_own_rewards(featured: Featured) -> None:
    lines = [line for line in lines_of(featured.folder) if "eval_own_pass@1" in line]
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert {(line["eval_own_pass@1"], line["eval_own_reward"]) for line in lines} == {(0.5, 0.5)}
    assert all("eval_own_maj@2" not in line for line in lines)
    answers = (featured.folder / "answers.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in answers] == [0, 2, 4], "only of the task that is trained on"
    again = recipes.load(str(featured.folder / "config.yaml"), ["--output_dir", "again"])
    assert again.task.other_tasks()[0].options == {"prompt": "Q: {question}"}


def test_a_recipe_names_its_rollout_function(featured: Featured) -> None:
    lines = lines_of(featured.folder)
    assert [line["conversations/per_sample"] for line in lines if "conversations/per_sample" in line] == [2]
    again = recipes.load(str(featured.folder / "config.yaml"))
    assert again.task.rollout_func == f"{featured.recipe.with_name('agent.py')}:rollout"


def test_the_last_step_is_logged_for_any_logging_steps(featured: Featured) -> None:
    assert summary_of(featured.folder)["rollouts"] == 2
    assert [line["step"] for line in lines_of(featured.folder) if "trust_region/kl_before_mean" in line] == [3, 4]


def test_an_infinite_bound_is_strict_json_and_resumes(featured: Featured, tmp_path: Path, console: Console) -> None:
    """Also what transformers writes, the state of its trainer."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    folder = tmp_path / "run"
    shutil.copytree(featured.folder, folder)
    shutil.rmtree(folder / "checkpoint-4")
    again = ["--output_dir", str(folder), "--resume_from_checkpoint", "--push_to_hub", "false"]
    assert train(recipes.load(str(featured.recipe), [*featured.overrides, *again]), console)
    texts = [path.read_text() for path in folder.rglob("*.json")]
    lines = [line for path in folder.rglob("*.jsonl") for line in path.read_text().splitlines()]
    assert len(texts) > 5 and len(lines) > 5
    for text in (*texts, *lines):
        json.loads(text, parse_constant=refuse)
    assert json.loads((folder / "summary.json").read_text())["kl_bound"] == "Infinity"
    write_comparison([folder], tmp_path / "page")
    json.loads((tmp_path / "page" / "comparison.json").read_text(), parse_constant=refuse)


ONE_ROLLOUT = ["--max_steps", "2", "--eval_strategy", "no", "--eval_on_start", "false", "--save_strategy", "no"]


def test_a_run_ends_with_its_process_group(short_run: list[str], console: Console) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    assert train(recipes.load("quickstart", [*short_run, *ONE_ROLLOUT]), console)
    assert not torch.distributed.is_initialized()


class InterruptAtStep3(TrainerCallback):
    def on_log(self, args, state, control, **kwargs) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


def test_an_interrupted_run_is_usable_and_resumes_exactly(short_run, tmp_path, console, monkeypatch, whole):
    _, uninterrupted, _ = whole
    with monkeypatch.context() as patched:
        patched.setattr(build, "_trainer", trainer_with(InterruptAtStep3()))
        assert not train(recipes.load("quickstart", short_run), console)
    folder = tmp_path / "run"
    assert summary_of(folder)["status"] == "interrupted"
    assert json.loads((folder / "verdicts.json").read_text())["step"] == 2, "the last evaluation's"
    assert "interrupted" in (folder / "report.html").read_text()
    assert weights(folder)
    assert "resume with the same command and --resume_from_checkpoint" in console.export_text()

    kept, summary = weights(folder), (folder / "summary.json").read_text()
    again = [*short_run, "--resume_from_checkpoint"]
    with monkeypatch.context() as patched, pytest.raises(OSError, match="cannot be read"):
        patched.setattr(TrollTrainer, "_load_from_checkpoint", Mock(side_effect=OSError("cannot be read")))
        train(recipes.load("quickstart", again), console)
    assert (folder / "summary.json").read_text() == summary
    assert all(torch.equal(weight, kept[name]) for name, weight in weights(folder).items())

    assert train(recipes.load("quickstart", again), console)
    for name, weight in weights(uninterrupted).items():
        torch.testing.assert_close(weights(folder)[name], weight, rtol=0, atol=0)
    assert logged(folder) == logged(uninterrupted)


class CtrlC(TrainerCallback):
    """Raises SIGINT a number of times at an event of a step."""

    def __init__(self, event: str, step: int, times: int = 1) -> None:
        self.step, self.times = step, times
        setattr(self, event, self.press)

    def press(self, args, state, control, **kwargs) -> None:
        if state.global_step == self.step:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)
            self.step = -1


@pytest.fixture
def listens() -> Iterator[None]:
    """Python's own handler of Ctrl-C: a test that runs in the background may have inherited that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


#: A random model is never right, and would not move.
REWARDED = ["--task_options.random_reward", "0.5", "--save_strategy", "no", "--max_steps", "6"]


@pytest.fixture(scope="module")
def moved(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was never interrupted, and whose weights have moved in each rollout."""
    folder = tmp_path_factory.mktemp("moved") / "run"
    assert train(recipes.load("quickstart", [*short(tiny_model, folder), *REWARDED]), Console(quiet=True))
    assert all(line["grad_norm"] > 0 for line in logged(folder) if "loss" in line)
    return folder


@pytest.mark.usefixtures("listens")
@pytest.mark.parametrize(("event", "step", "last"), [("on_pre_optimizer_step", 1, 2), ("on_log", 2, 4)])
def test_ctrl_c_saves_at_the_end_of_the_rollout(
    short_run, tmp_path, console, monkeypatch, moved, capfd, event, step, last
):
    """A log comes after the end of its step."""
    folder, longer = tmp_path / "run", [*short_run, *REWARDED, "--max_steps", "8"]
    with monkeypatch.context() as patched:
        patched.setattr(build, "_trainer", trainer_with(CtrlC(event, step)))
        assert not train(recipes.load("quickstart", longer), console)
    assert "stopping at the end of the rollout, with a checkpoint; Ctrl-C again" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [path.name for path in folder.glob("checkpoint-*")] == [f"checkpoint-{last}"]
    check_complete(folder / f"checkpoint-{last}")
    summary = summary_of(folder)
    assert (summary["status"], summary["steps"]) == ("interrupted", last)
    assert f"interrupted at step {last}; resume with the same command and --resume" in console.export_text()
    with pytest.raises(RecipeError, match=r"is not empty: .* resume from its last checkpoint with --resume_from"):
        train(recipes.load("quickstart", longer), console)

    assert train(recipes.load("quickstart", [*short_run, *REWARDED, "--resume_from_checkpoint"]), console)
    for name, weight in weights(moved).items():
        torch.testing.assert_close(weights(folder)[name], weight, rtol=0, atol=0)
    assert logged(folder) == logged(moved)


@pytest.mark.usefixtures("listens")
def test_ctrl_c_logs_the_updates_since_the_last_log(short_run, tmp_path, console, monkeypatch):
    monkeypatch.setattr(build, "_trainer", trainer_with(CtrlC("on_step_begin", 0)))
    longer = [*short_run, *REWARDED, "--max_steps", "8", "--logging_steps", "4"]
    assert not train(recipes.load("quickstart", longer), console)
    (line,) = (line for line in logged(tmp_path / "run") if "loss" in line)
    assert line["step"] == 2 and line["trust_region/kl_before_mean"] > 0


@pytest.mark.usefixtures("listens")
def test_a_second_ctrl_c_stops_at_once(short_run, tmp_path, console, monkeypatch):
    monkeypatch.setattr(build, "_trainer", trainer_with(CtrlC("on_pre_optimizer_step", 0, times=2)))
    assert not train(recipes.load("quickstart", short_run), console)
    assert summary_of(tmp_path / "run")["steps"] == 0
    assert not list((tmp_path / "run").glob("checkpoint-*"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("listens")
def test_ctrl_c_in_the_last_rollout_lets_the_run_finish(short_run, console, monkeypatch):
    monkeypatch.setattr(build, "_trainer", trainer_with(CtrlC("on_step_begin", 0)))
    assert train(recipes.load("quickstart", [*short_run, *ONE_ROLLOUT]), console)


def test_training_that_breaks_down_leaves_its_folder(short_run, tmp_path, console, monkeypatch):
    class Poison(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
            with torch.no_grad():
                next(model.parameters()).fill_(torch.nan)

    monkeypatch.setattr(build, "_trainer", trainer_with(Poison()))
    with pytest.raises(FloatingPointError, match="step 2"):
        train(recipes.load("quickstart", short_run), console)
    assert summary_of(tmp_path / "run")["status"] == "failed"
    assert ">failed</span>" in (tmp_path / "run" / "report.html").read_text()


def test_checkpoint_of_names_what_is_incomplete(short_run, tmp_path):
    recipe, folder = recipes.load("quickstart", short_run), tmp_path / "run"
    recipe.training.resume_from_checkpoint = True  # type: ignore[assignment]  # what YAML makes of true
    with pytest.raises(RecipeError, match="no complete checkpoint in output_dir"):
        checkpoint_of(recipe, folder)
    checkpoints._begin(folder / "checkpoint-2")  # in which it died
    with pytest.raises(RecipeError, match="checkpoint-2 is incomplete and is ignored: the run ended while it was"):
        checkpoint_of(recipe, folder)
    recipe.training.resume_from_checkpoint = str(folder / "checkpoint-2")
    with pytest.raises(RecipeError, match=r"checkpoint-2 is an incomplete checkpoint: .* there is no complete one"):
        checkpoint_of(recipe, folder)


WORKERS = ["--dataloader_num_workers", "1", "--dataloader_persistent_workers", "true"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--output_dir", "OCCUPIED"], r"is not empty: choose another with --output_dir$"),
        (["--output_dir", "OCCUPIED/precious/below"], "cannot be used: Not a directory"),
        (["--resume_from_checkpoint", "OCCUPIED"], "not the folder of a checkpoint"),
        (["--model_name_or_path", "OCCUPIED"], "does not hold a model"),
        (["--model_name_or_path", "nobody/nothing"], "no such folder"),
        (["--model_name_or_path", "OCCUPIED", "--warm_up", '{"max_steps": 3}'], "warm_up is how the model 'toy'"),
        (["--eval_tasks", "free_text", *WORKERS], "eval_tasks and dataloader_persistent_workers exclude each other"),
        (["--task", "math", "--dataset_path", "OCCUPIED/rows.jsonl", "--task_options", "{}"], "test row 12 "),
    ],
)
def test_mistakes_are_found_before_training(short_run, tmp_path, console, monkeypatch, overrides, message):
    monkeypatch.setattr(build, "_trainer", lambda *_: pytest.fail("training was set up"))
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "precious").touch()
    (occupied / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": ""}\n' * 20)
    given = [part.replace("OCCUPIED", str(occupied)) for part in overrides]
    with pytest.raises((RecipeError, TaskError), match=message):
        train(recipes.load("quickstart", [*short_run, *given]), console)
    assert (occupied / "precious").exists()


def test_mistakes_in_model_and_data_are_one_line(short_run, chat_model, tiny_model, tmp_path, console, monkeypatch):
    refuses = chat_model("{% if strict %}{{ raise_exception('System role not supported') }}{% endif %}")
    short = shutil.copytree(tiny_model, tmp_path / "short")
    with (short / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(short / "config.json" / "below"))
    for overrides, message in (
        (["--train_size", "3"], r"a rollout takes 4 prompts .* has 3 to train on"),
        (["--model_name_or_path", "toy"], "the toy model cannot be kept in the cache folder"),
        (["--model_name_or_path", str(short)], r"the weights of .*short cannot be read"),
        (
            ["--model_name_or_path", str(refuses), "--chat_template_kwargs", '{"strict": true}'],
            r"prompts of .*chain_sum: System role not supported; check",
        ),
    ):
        with pytest.raises(UsageError, match=message) as error:
            train(recipes.load("quickstart", [*short_run, *overrides]), console)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--report_to", "wandb"], "report_to: wandb is not installed"),
        (["--push_to_hub", "true"], r"push_to_hub: .*log in with hf auth login"),
        (["--rollout_func", "agent"], r"rollout_func must be FILE\.py:function or module:function, got 'agent'"),
    ],
)
def test_mistakes_are_found_before_the_model_is_looked_for(short_run, console, monkeypatch, overrides, message):
    monkeypatch.setattr(integration_utils, "is_wandb_available", lambda: False)
    monkeypatch.setattr(build, "model_path", lambda *_: pytest.fail("the model was looked for"))
    with pytest.raises(UsageError, match=message):
        train(recipes.load("quickstart", [*short_run, *overrides]), console)


def test_train_refuses_a_folder_in_which_another_one_trains(short_run, console, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "model_path", lambda *_: pytest.fail("the model was looked for"))
    recipe = recipes.load("quickstart", short_run)
    folder = Path(str(recipe.training.output_dir))
    with (
        locked(folder, LOCK, holder="a test", error=RuntimeError),
        pytest.raises(RecipeError, match="another troll train is at work in"),
    ):
        train(recipe, console)


@pytest.mark.parametrize(
    ("field", "value", "refused"),
    [
        ("kl_bound", "0.1", True),
        ("eval_size", "4", True),
        ("eval_tasks", "free_text", True),
        ("seed", "1", True),
        ("max_steps", "6", False),
        ("logging_steps", "2", False),
        ("max_grad_norm", "0.5", False),
        ("save_total_limit", "3", False),
        ("eval_steps", "4", False),
    ],
)
def test_what_a_resumed_run_may_change(short_run, tmp_path, field, value, refused):
    folder = tmp_path / "run"
    (folder / "checkpoint-2").mkdir(parents=True)
    (folder / "checkpoint-2" / "trainer_state.json").write_text("{}")
    recipes.save(recipes.load("quickstart", short_run), folder / "config.yaml")
    changed = recipes.load("quickstart", [*short_run, f"--{field}", value, "--resume_from_checkpoint"])
    said = f"with other settings: {field} is .* there and .*{value}.* here"
    with pytest.raises(RecipeError, match=said) if refused else contextlib.nullcontext():
        assert checkpoint_of(changed, folder) is True
    changed.training.resume_from_checkpoint = named = str(folder / "checkpoint-2")
    with pytest.raises(RecipeError, match=said) if refused else contextlib.nullcontext():
        assert checkpoint_of(changed, tmp_path / "another") == named


def test_a_longer_run_is_unfinished_until_its_end(short_run, tmp_path, console, monkeypatch):
    """If it is killed, its folder must not show the results of the shorter run."""
    seen: list[tuple[str, int]] = []

    class Look(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs) -> None:
            settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
            seen.append((summary_of(tmp_path / "run")["status"], settings["max_steps"]))

    assert train(recipes.load("quickstart", [*short_run, "--max_steps", "2"]), console)
    monkeypatch.setattr(build, "_trainer", trainer_with(Look()))
    assert train(recipes.load("quickstart", [*short_run, "--max_steps", "4", "--resume_from_checkpoint"]), console)
    assert seen == [("unfinished", 4)] * 2
    assert summary_of(tmp_path / "run")["status"] == "finished"


@pytest.mark.usefixtures("listens")
@pytest.mark.parametrize("stopped", [False, True])
def test_results_are_those_of_the_best_weights_if_these_are_saved(short_run, tmp_path, console, monkeypatch, stopped):
    """No answer is ever right, so the first evaluation is the best; that of the last step has no checkpoint."""
    short_run = [*short_run, "--task_options.random_reward", "0.5"]  # every evaluation has another reward
    monkeypatch.setattr(build, "_trainer", trainer_with(*([CtrlC("on_pre_optimizer_step", 2)] if stopped else [])))
    best = ["--load_best_model_at_end", "true", "--metric_for_best_model", "pass@1", "--max_steps", "6"]
    assert train(recipes.load("quickstart", [*short_run, *best]), console) is not stopped
    folder = tmp_path / "run"
    summary, rows = summary_of(folder), {logs["step"]: logs for logs in lines_of(folder) if "eval_reward" in logs}
    assert (summary["success_after_step"], summary["reward_after"]) == (2, rows[2]["eval_reward"])
    assert rows[2]["eval_reward"] != rows[max(rows)]["eval_reward"]
    assert summary["steps"] == max(rows) == (4 if stopped else 6) and not (folder / "verdicts.json").exists()
    assert "after step 2" in (folder / "model" / "README.md").read_text()


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

DATA = Path(__file__).parents[4] / "shared" / "data"


def on_local_files(short_run: list[str], recipe: str, path: Path, *overrides: str) -> Recipe:
    """A recipe for real data, shortened to two updates of a tiny model."""
    if not path.exists():
        pytest.skip(f"needs the files of ../shared/data/{path.relative_to(DATA)}")
    short = ["--dataset_path", str(path), "--dtype", "float32", "--max_completion_length", "16", "--max_steps", "2"]
    return recipes.load(recipe, [*short_run, *short, "--gradient_accumulation_steps", "1", *overrides])


def test_gsm8k_recipe_trains_by_chat_and_evaluates_other_tasks(short_run, chat_model, tmp_path, console):
    benchmark = f"aime24={DATA / 'math_eval' / 'aime24'}.jsonl"
    several = ["--num_generations_eval", "2", "--eval_temperature", "1", "--eval_tasks", benchmark]
    model = ["--model_name_or_path", str(chat_model(CHAT_TEMPLATE)), "--eval_size", "4"]
    assert train(on_local_files(short_run, "gsm8k-qwen3-80gb", DATA / "gsm8k", *model, *several), console)
    lines = lines_of(tmp_path / "run")
    assert all(0 <= line["rewards/success/mean"] <= 1 for line in lines if "reward" in line)
    assert any(line.get("trust_region/kl_before_mean", 0) > 0 for line in lines)
    for step in (0, 2):
        found = [line for line in lines if line["step"] == step]
        assert [sum(f"eval_{name}pass@1" in line for line in found) for name in ("", "aime24_")] == [1, 1]
    last = next(line for line in lines if "eval_aime24_pass@1" in line)
    assert {"eval_aime24_pass@2", "eval_aime24_maj@2", "eval_aime24_rewards/success/mean"} < last.keys()
    assert "eval_reward" not in last
    page = (tmp_path / "run" / "report.html").read_text()
    assert "maj@2" in page and "aime24" in page


@pytest.mark.needs_bubblewrap
def test_mbpp_recipe_trains_on_passed_tests_and_logs_success(short_run, tmp_path, console):
    once = ["--eval_on_start", "false", "--eval_size", "4"]
    assert train(on_local_files(short_run, "mbpp-qwen3", DATA / "mbpp" / "mbpp.jsonl", *once), console)
    lines = lines_of(tmp_path / "run")
    assert any("rewards/success/mean" in line and "rewards/passed_fraction/mean" in line for line in lines)
    assert any("eval_pass@1" in line for line in lines)


def state_with(logs: list[Any], step: int) -> TrainerState:
    return TrainerState(global_step=step, max_steps=10, log_history=logs, is_world_process_zero=True)


def test_progress_without_a_terminal_prints_what_is_new(tmp_path: Path) -> None:
    output = io.StringIO()
    callback = ProgressLine(Console(file=output, width=200))
    arguments, control = TrainingArguments(str(tmp_path)), TrainerControl()
    callback.on_train_begin(arguments, state_with([], 0), control)
    callback.on_step_end(arguments, state_with([], 1), control)
    callback.on_log(arguments, state_with([{"step": 1, "reward": 0.25, "rewards/success/mean": None}], 1), control)
    callback.on_log(arguments, state_with([{"step": 2, "reward": 0.5, "loss": 0.1}], 2), control)
    callback.on_log(arguments, state_with([{"step": 2, "eval_rewards/success/mean": 0.5}], 2), control)
    callback.on_log(arguments, state_with([{"step": 2, "train_runtime": 1.0}], 2), control)
    callback.stop()
    lines = ["step 1/10  reward 0.25", "step 2/10  reward 0.50", "step 2/10  held-out 50%"]
    assert output.getvalue().splitlines() == lines, "the evaluation of a step must not repeat its training"
