import io
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from peft import LoraConfig
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

import troll_lab.evaluation
from tests.troll.trl.tiny import adapted
from tests.troll_lab.evaluation.conftest import read_lines, small_evaluation
from troll.grading import Verdict
from troll_lab.evaluation import run as module
from troll_lab.evaluation.config import EvaluationConfig, EvaluationError
from troll_lab.evaluation.estimators import clustered_interval
from troll_lab.evaluation.generate import Generation, TransformersGenerator
from troll_lab.evaluation.problems import Problems
from troll_lab.evaluation.run import completion_order, evaluate
from troll_lab.tasks import TaskConfig, registry

Settings = Callable[..., EvaluationConfig]


def results_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return content


def without_times(results: dict[str, Any]) -> dict[str, Any]:
    for one in results["tasks"].values():
        del one["seconds"]
    return results


class Scripted:
    batch_size = 4

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts, self.calls = list(texts), 0

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Generation]:
        self.calls += 1
        return [Generation(self.texts.pop(0), 3, True) for _ in prompts]


def test_evaluate_leaves_every_generation_with_its_verdict(settings, capsys):
    config = settings()
    assert troll_lab.evaluation.evaluate(config)  # prints where Python prints unless told otherwise
    assert "reasoning_gym:chain_sum" in capsys.readouterr().out
    results = results_of(config.folder)
    assert results["status"] == "finished"
    assert results["settings"]["temperature"] == 1.0
    assert results["settings"]["tasks"]["reasoning_gym:chain_sum"]["problems"] == 5
    one = results["tasks"]["reasoning_gym:chain_sum"]
    records = read_lines(config.folder / one["generations"])
    assert len(records) == one["completions"] == 15
    assert {(record["problem"], record["sample"]) for record in records} == {(p, s) for p in range(5) for s in range(3)}
    for problem in range(5):
        assert len({record["completion"] for record in records if record["problem"] == problem}) > 1
    assert all(0 < record["tokens"] <= 6 for record in records)
    assert one["tokens"] == pytest.approx(sum(record["tokens"] for record in records) / 15)
    assert one["finished"] == pytest.approx(sum(record["finished"] for record in records) / 15)
    assert set(one["metrics"]) == set(one["intervals"]) == {"pass@1", "pass@3", "mean@3"}


def script(monkeypatch, *texts):
    """Makes the completions of the next evaluation these texts."""
    monkeypatch.setattr(module._Evaluation, "_load_generator", lambda self: Scripted(texts))


def test_results_are_those_of_the_verdicts(settings, letters, console, monkeypatch):
    # Three of each of four problems, whose answers are a, b, c and d.
    script(monkeypatch, "A", "a", "b", "b", "c", "", "a", "a", "c", "", "", "")
    config = settings(tasks=[letters], ks=[1, 2, 3])
    assert evaluate(config, console)
    one = results_of(config.folder)["tasks"]["letters"]
    pass_at = {"pass@1": (2 / 3 + 1 / 3 + 1 / 3) / 4, "pass@2": (1 + 2 / 3 + 2 / 3) / 4, "pass@3": 3 / 4}
    assert one["metrics"] == pytest.approx(pass_at | {"mean@3": 1 / 3, "maj@3": (1 + 0.5) / 4})
    assert one["intervals"]["maj@3"] == pytest.approx(clustered_interval([1, 0.5, 0, 0], 3))
    assert one["reasons"] == {"correct": 8, "no answer": 4}
    shown = console.export_text()
    for cell in ("33.3", "58.3", "75.0", "37.5", "maj@3", "100.0%"):
        assert cell in shown


def test_unscored_completions_are_counted_and_judged_again(settings, letters, console, monkeypatch):
    judge, asked = Problems.judge, list[tuple[list[int], list[str]]]()

    def troubled(self: Problems, rows: Sequence[int], completions: Sequence[str]) -> list[Verdict]:
        asked.append((list(rows), list(completions)))
        verdicts = zip(completions, judge(self, rows, completions), strict=True)
        return [Verdict(None, text, "unscored: why") if text == "?" else verdict for text, verdict in verdicts]

    def evaluated() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        assert evaluate(config, console)
        one = results_of(config.folder)["tasks"]["letters"]
        return one, read_lines(config.folder / one["generations"])

    script(monkeypatch, "a", "?", "?", "b", "b", "", "?", "?", "?", "d", "?", "")
    config = settings(tasks=[letters], ks=[1, 3])
    with monkeypatch.context() as patched:
        patched.setattr(Problems, "judge", troubled)
        one, records = evaluated()
        assert one["metrics"]["pass@1"] == pytest.approx((1 + 2 / 3 + 1 / 2) / 3)
        assert one["metrics"]["pass@3"] == 1.0
        assert one["unscored"] == one["reasons"]["unscored"] == 6
        assert [record["score"] for record in records].count(None) == 6
        said = console.export_text(clear=False)
        assert "letters: 6 of 12 completions could not be judged and do not count; the same command" in said
        asked.clear()
        again, same = evaluated()  # the machine is still in trouble
        assert asked == [([0, 0, 2, 2, 2, 3], ["?"] * 6)], "and what has a verdict is not judged again"
        assert (same, again["metrics"]) == (records, one["metrics"])
    one, judged = evaluated()
    verdicts = [{name: record[name] for name in ("answer", "score", "reason")} for record in judged]
    assert [record | verdict for record, verdict in zip(records, verdicts, strict=True)] == judged
    assert [record["score"] for record in judged] == [record["score"] or 0.0 for record in records]
    assert (one["unscored"], one["metrics"]["pass@1"]) == (0, pytest.approx((1 / 3 + 2 / 3 + 0 + 1 / 3) / 4))


@pytest.fixture(scope="module")
def whole(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an evaluation with the usual settings, which no test changes."""
    config = small_evaluation(tiny_model, tmp_path_factory.mktemp("evaluation") / "out")
    assert evaluate(config, Console(file=io.StringIO()))
    return config.folder


@pytest.fixture
def finished(whole: Path, settings: Settings) -> Path:
    """The folder of `settings()`, where these have been evaluated."""
    return shutil.copytree(whole, settings().folder)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_interrupted_evaluation_goes_on_exactly(settings, whole, console, monkeypatch, after):
    calls = iter([TransformersGenerator.generate] * after + [Mock(side_effect=KeyboardInterrupt)])
    config = settings()
    with monkeypatch.context() as patched:
        patched.setattr(TransformersGenerator, "generate", lambda *arguments: next(calls)(*arguments))
        assert not evaluate(config, console)
    partial = results_of(config.folder)
    assert partial["status"] == "interrupted"
    assert partial["tasks"]["reasoning_gym:chain_sum"]["completions"] == 4 * after
    assert "interrupted; the same command resumes" in console.export_text()

    path = config.folder / partial["tasks"]["reasoning_gym:chain_sum"]["generations"]
    if after > 1:  # the process was killed while it wrote
        path.write_bytes(path.read_bytes()[:-10])
    assert evaluate(config, console)
    assert path.read_bytes() == (whole / path.relative_to(config.folder)).read_bytes()
    assert without_times(results_of(config.folder)) == without_times(results_of(whole))


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading weights is an error."""
    monkeypatch.setattr(module, "load_model", lambda *_: pytest.fail("the weights were loaded"))


@pytest.mark.usefixtures("no_weights")
def test_finished_evaluation_takes_no_weights(settings, finished, console):
    before = results_of(finished)
    assert evaluate(settings(ks=[2]), console)
    after = results_of(finished)
    assert list(after["tasks"]["reasoning_gym:chain_sum"]["metrics"]) == ["pass@2", "mean@3"]
    assert after["settings"] == before["settings"]


def test_batch_size_changes_only_the_order_of_work(settings: Settings, tmp_path: Path, console: Console) -> None:
    files = set()
    for size in (1, 4, 100):
        config = settings(batch_size=size, output_dir=tmp_path / str(size), dtype="float32")
        assert evaluate(config, console)
        (file,) = (config.folder / "generations").iterdir()
        files.add(file.read_bytes())
    assert len(files) == 1


@pytest.mark.usefixtures("finished", "no_weights")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"samples": 2}, "samples is 3 there and 2 here"),
        ({"temperature": 0.5}, "temperature is 1.0 there and 0.5 here"),
        ({"top_p": 0.5}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"max_new_tokens": 5}, "max_new_tokens"),
        ({"batch_size": 2}, "batch_size"),
        ({"seed": 1}, "seed"),
        ({"dtype": "float32"}, "dtype"),
        ({"model": "copy"}, "model is"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"trust_remote_code": True}, "trust_remote_code is false there and true here"),
        ({"tasks": [TaskConfig(task="reasoning_gym:chain_sum", train_size=1, eval_size=4)]}, "chain_sum: eval_size"),
    ],
)
def test_other_settings_in_a_folder_are_refused(settings, tiny_model, tmp_path, monkeypatch, changed, message):
    shutil.copytree(tiny_model, tmp_path / "copy")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EvaluationError, match=message):
        evaluate(settings(**changed))


@pytest.mark.usefixtures("no_weights")
def test_other_weights_of_a_model_are_refused(settings, finished):
    path = finished / "settings.json"
    path.write_text(path.read_text().replace('"model_fingerprint": "', '"model_fingerprint": "0'))
    with pytest.raises(EvaluationError, match="model_fingerprint"):
        evaluate(settings())


def test_task_may_be_added_later(settings: Settings, finished: Path, letters: TaskConfig, console: Console) -> None:
    assert evaluate(settings(tasks=[*settings().tasks, letters]), console)
    assert evaluate(settings(tasks=[letters]), console)
    recorded = json.loads((finished / "settings.json").read_text())["tasks"]
    assert set(results_of(finished)["tasks"]) == set(recorded) == {"reasoning_gym:chain_sum", "letters"}
    assert len(read_lines(finished / "generations" / "letters.jsonl")) == 12
    found = results_of(finished)
    assert found["settings"]["tasks"].keys() == found["tasks"].keys() and len(found["tasks"]) == 2


def test_tasks_of_one_name_are_refused(settings, letters, console, monkeypatch):
    """Such as two files whose `load` gives the same name."""
    monkeypatch.setitem(registry._LOADERS, "others", registry._LOADERS["letters"])
    with pytest.raises(EvaluationError, match="2 tasks have the name letters"):
        evaluate(settings(tasks=[letters, TaskConfig("others")]), console)


def test_task_has_results_as_soon_as_it_is_done(settings, letters, console, monkeypatch):
    seen: list[dict[str, Any]] = []
    generate = TransformersGenerator.generate

    def look(self: TransformersGenerator, *arguments: Any) -> list[Generation]:
        path = settings().folder / "results.json"
        seen.append(json.loads(path.read_text()) if path.is_file() else {})
        return generate(self, *arguments)

    monkeypatch.setattr(TransformersGenerator, "generate", look)
    assert evaluate(settings(tasks=[letters, *settings().tasks]), console)
    assert seen[0] == {}
    assert seen[-1]["status"] == "unfinished"
    assert "pass@3" in seen[-1]["tasks"]["letters"]["metrics"]


@pytest.mark.usefixtures("no_weights")
def test_mistakes_are_found_before_weights_are_loaded(settings, monkeypatch):
    with pytest.raises(EvaluationError, match=r"of the model's 1024 for a completion, and max_new_tokens is 1000"):
        evaluate(settings(max_new_tokens=1000))
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(EvaluationError, match="backend vllm needs the package vllm: use"):
        evaluate(settings(backend="vllm"))


def test_context_bounds_completions_by_default(settings: Settings) -> None:
    made = module._Evaluation(settings(max_new_tokens=None), Console())
    assert made.sampling.max_new_tokens == 1024 - max(len(ids) for ids in made.problems[0].ids)


def test_failed_evaluation_leaves_its_folder(settings, console, monkeypatch):
    monkeypatch.setattr(TransformersGenerator, "generate", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        evaluate(settings(), console)
    assert results_of(settings().folder)["status"] == "failed"


def test_vllm_is_taken_where_it_can_run(settings, console, tiny_model, monkeypatch):
    engine = Scripted(["1"] * 15)
    make = Mock(return_value=engine, batch_size=1024)
    monkeypatch.setattr(module, "vllm_is_usable", lambda: True)
    monkeypatch.setattr(module, "VllmGenerator", make)
    config = settings(batch_size=None)
    assert evaluate(config, console)
    assert results_of(config.folder)["settings"]["backend"] == "vllm"
    assert engine.calls == 1
    source, *_ = make.call_args.args
    assert (source.base, source.adapter_rank) == (str(tiny_model), None)
    longest = max(len(record["prompt"]) for record in read_lines(next((config.folder / "generations").iterdir())))
    assert make.call_args.kwargs == {"dtype": "auto", "context": longest + 6}


def test_token_without_an_embedding_is_named(settings, tiny_model, tmp_path, console, letters):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["2:"])
    tokenizer.save_pretrained(model)
    rows = AutoModelForCausalLM.from_pretrained(model).get_input_embeddings().num_embeddings
    message = rf"task 'letters': the prompt of problem 2 has the token '2:' \(id {rows}\), and .* has {rows} rows: "
    with pytest.raises(EvaluationError, match=message + r"call model.resize_token_embeddings\(len\(tokenizer\)\)"):
        evaluate(settings(model=str(model), tasks=[letters]), console)
    assert evaluate(settings(model=str(model), output_dir=tmp_path / "other"), console)  # prompts without the token


def test_adapter_that_vllm_cannot_run_goes_to_transformers_or_is_named(
    settings, tiny_model, tmp_path, console, monkeypatch
):
    monkeypatch.setattr(module, "vllm_is_usable", lambda: True)
    monkeypatch.setattr(module, "find_spec", lambda _: True)
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    config = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "lm_head"])
    adapted(base, config).save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(EvaluationError, match=r"cannot run the adapter .*lm_head.*; use --backend transformers"):
        evaluate(settings(model=str(tmp_path / "adapter"), backend="vllm"), console)
    assert evaluate(settings(model=str(tmp_path / "adapter")), console)
    assert results_of(settings().folder)["settings"]["backend"] == "transformers"


def test_completion_order_begins_with_long_prompts() -> None:
    assert completion_order([3, 9, 3], 2) == [(1, 0), (1, 1), (0, 0), (0, 1), (2, 0), (2, 1)]
