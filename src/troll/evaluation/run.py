"""Evaluates a model on tasks, into a folder in which the same command resumes where it was stopped."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from statistics import fmean
from typing import Any

from rich.console import Console

from troll.evaluation.config import EvaluationConfig, EvaluationError, slug
from troll.evaluation.estimates import task_estimates
from troll.evaluation.folder import RESULTS, claimed, read_object
from troll.evaluation.generate import Generation, Generator, Sampling, TransformersGenerator, seed_of
from troll.evaluation.model import ModelSource, find_model, load_model, load_tokenizer
from troll.evaluation.problems import Problems, load_problems
from troll.evaluation.records import Record, append_records, read_records, replace_records, verdict_of, with_verdict
from troll.evaluation.table import CompletionProgress, print_table, results_table
from troll.evaluation.vllm import VllmGenerator, adapter_problem, vllm_is_usable
from troll.files import write_atomically
from troll.huggingface.token_ids import embedding_rows
from troll.rewards.grading import Verdict
from troll.terminal import say

_DEFAULT_NEW_TOKENS = 2048
_PACKAGES = ("troll-rl", "torch", "transformers", "vllm", "math-verify", "reasoning-gym")


@dataclass(frozen=True)
class _Plan:
    """Everything that is decided before the weights are loaded."""

    config: EvaluationConfig
    source: ModelSource
    tokenizer: Any
    problems: Sequence[Problems]
    sampling: Sampling
    backend: str
    batch_size: int

    def settings(self) -> dict[str, Any]:
        return {
            "model": self.source.path,
            "model_fingerprint": self.source.fingerprint,
            "samples": self.config.samples,
            **asdict(self.sampling),
            "seed": self.config.seed,
            "dtype": self.config.dtype,
            "backend": self.backend,
            "batch_size": self.batch_size,
            "chat_template_kwargs": dict(self.config.chat_template_kwargs),
            "model_revision": self.config.model_revision,
            "trust_remote_code": self.config.trust_remote_code,
        }

    def task_settings(self) -> dict[str, dict[str, Any]]:
        return {
            problems.name: {
                "dataset_path": task.dataset_path,
                "task_options": task.options,
                "eval_size": task.eval_size,
                "problems": len(problems),
                "problems_fingerprint": problems.fingerprint,
            }
            for task, problems in zip(self.config.tasks, self.problems, strict=True)
        }


def evaluate(config: EvaluationConfig, console: Console | None = None) -> bool:
    """Evaluates a model on tasks, prints a table, and leaves a folder with `results.json` and every generation.

    Args:
        config: What to evaluate, and how. Its `folder` is where results go, and where the same settings go on if they
            were stopped.
        console: Where progress and the table are printed; by default standard output.

    Returns:
        Whether all tasks were evaluated; False after Ctrl-C.

    Raises:
        EvaluationError: If the model, a task or the folder cannot be used as the settings say; before the weights are
            loaded, wherever it can be told.
        troll.tasks.TaskError: If a task cannot be loaded.
    """
    plan = _plan(config)
    with claimed(config.folder, plan.settings(), plan.task_settings()):
        return _Run(plan, console or Console()).run()


def _plan(config: EvaluationConfig) -> _Plan:
    if config.backend == "vllm" and find_spec("vllm") is None:
        raise EvaluationError("backend vllm needs the package vllm: use --backend transformers")
    source = find_model(config.model, config.model_revision, config.trust_remote_code)
    backend = _backend(config.backend, source)
    tokenizer = load_tokenizer(source)
    problems = [load_problems(task, tokenizer, config.chat_template_kwargs) for task in config.tasks]
    sampling = Sampling(
        config.resolved_temperature, config.top_p, config.top_k, _new_tokens(config.max_new_tokens, source, problems)
    )
    default = VllmGenerator.batch_size if backend == "vllm" else TransformersGenerator.batch_size
    return _Plan(config, source, tokenizer, problems, sampling, backend, config.batch_size or default)


def _backend(wanted: str, source: ModelSource) -> str:
    if wanted == "transformers" or (wanted == "auto" and not vllm_is_usable()):
        return "transformers"
    problem = None if source.adapter_rank is None else adapter_problem(source.path)
    if problem is not None and wanted == "vllm":
        raise EvaluationError(
            f"vLLM cannot run the adapter {source.path} as it was trained: {problem}; use --backend transformers, "
            "which merges it"
        )
    return "vllm" if problem is None else "transformers"


def _new_tokens(wanted: int | None, source: ModelSource, problems: Sequence[Problems]) -> int:
    longest, row, name = max((len(ids), row, one.name) for one in problems for row, ids in enumerate(one.ids))
    room = None if source.context is None else source.context - longest
    if room is None:
        return wanted or _DEFAULT_NEW_TOKENS
    if room < (wanted or 1):
        raise EvaluationError(
            f"{name}: problem {row} has {longest} tokens, which leaves {max(room, 0)} of the model's {source.context} "
            f"for a completion, and max_new_tokens is {wanted or 1}: lower it, or evaluate fewer problems"
        )
    return wanted or min(_DEFAULT_NEW_TOKENS, room)


class _Run:
    def __init__(self, plan: _Plan, console: Console) -> None:
        self.plan, self.console, self.folder = plan, console, plan.config.folder
        self.results: dict[str, Any] = read_object(self.folder / RESULTS).get("tasks", {})
        self.generator: Generator | None = None

    def run(self) -> bool:
        names = ", ".join(problems.name for problems in self.plan.problems)
        say(self.console, f"evaluating {self.plan.source.path} on {names} with {self.plan.backend} in {self.folder}")
        (self.folder / "generations").mkdir(exist_ok=True)
        status = "failed"
        try:
            for problems in self.plan.problems:
                self._evaluate(problems)
                self._write("unfinished")
            status = "finished"
        except KeyboardInterrupt:
            status = "interrupted"
        finally:
            self._write(status)
        done = [problems.name for problems in self.plan.problems if "metrics" in self.results.get(problems.name, {})]
        if done:
            table = results_table({name: self.results[name] for name in done}, self.plan.config)
            print_table(self.console, table)
        for name in done:
            if unscored := self.results[name].get("unscored"):
                total = self.results[name]["completions"]
                say(
                    self.console,
                    f"{name}: {unscored} of {total} completions could not be judged, and do not count; the same "
                    "command judges them again",
                )
        say(self.console, f"results {self.folder / RESULTS}")
        if status == "interrupted":
            say(self.console, "interrupted; the same command resumes")
        return status == "finished"

    def _evaluate(self, problems: Problems) -> None:
        path = self.folder / "generations" / f"{slug(problems.name)}.jsonl"
        order = completion_order([len(ids) for ids in problems.ids], self.plan.config.samples)
        records = read_records(path, order, self.plan.batch_size)
        spent = float(self.results.get(problems.name, {}).get("seconds", 0.0))
        start = time.monotonic()
        if unscored := [place for place, record in enumerate(records) if record["score"] is None]:
            again = [records[place] for place in unscored]
            verdicts = problems.judge([one["problem"] for one in again], [one["completion"] for one in again])
            for place, verdict in zip(unscored, verdicts, strict=True):
                records[place] = with_verdict(records[place], verdict)
            replace_records(path, records)
        self.results[problems.name] = {"problems": len(problems), "generations": str(path.relative_to(self.folder))}
        progress = CompletionProgress(self.console, problems.name, len(order), records)
        try:
            for first in range(len(records), len(order), self.plan.batch_size):
                batch = self._complete(problems, order[first : first + self.plan.batch_size])
                append_records(path, batch)
                records += batch
                progress.advance(batch)
        finally:
            progress.stop()
            self.results[problems.name] |= {
                "completions": len(records),
                "seconds": round(spent + time.monotonic() - start, 1),
            }
        self.results[problems.name] |= self._summary(problems, records)

    def _complete(self, problems: Problems, batch: Sequence[tuple[int, int]]) -> list[Record]:
        if self.generator is None:
            self.generator = _generator(self.plan)
        rows = [row for row, _ in batch]
        seeds = [seed_of(self.plan.config.seed, problems.name, row, sample) for row, sample in batch]
        generations = self.generator.generate([problems.ids[row] for row in rows], seeds)
        verdicts = problems.judge(rows, [generation.text for generation in generations])
        return [
            _record(row, sample, problems.texts[row], generation, verdict)
            for (row, sample), generation, verdict in zip(batch, generations, verdicts, strict=True)
        ]

    def _summary(self, problems: Problems, records: Sequence[Record]) -> dict[str, Any]:
        verdicts: list[dict[int, Verdict]] = [{} for _ in range(len(problems))]
        for record in records:
            verdicts[record["problem"]][record["sample"]] = verdict_of(record)
        by_sample = [[one[sample] for sample in sorted(one)] for one in verdicts]
        estimates = task_estimates(by_sample, self.plan.config.resolved_ks, same=problems.same_answer)
        # The text after a colon is about one completion only, such as the message of an exception.
        reasons = Counter(record["reason"].partition(":")[0] for record in records)
        return {
            "metrics": {name: estimate.value for name, estimate in estimates.items()},
            "intervals": {name: list(estimate.interval) for name, estimate in estimates.items()},
            "finished": fmean(record["finished"] for record in records),
            "tokens": fmean(record["tokens"] for record in records),
            "unscored": sum(record["score"] is None for record in records),
            "reasons": dict(reasons.most_common()),
        }

    def _write(self, status: str) -> None:
        content = {
            "status": status,
            "settings": self.plan.settings() | {"tasks": self.plan.task_settings()},
            "interval": "95 %, Wilson's with the effective number of trials over problems",
            "tasks": self.results,
            "versions": _versions(),
        }
        write_atomically(self.folder / RESULTS, json.dumps(content, indent=2, ensure_ascii=False))


def completion_order(lengths: Sequence[int], samples: int) -> list[tuple[int, int]]:
    """The order of generation: long prompts first, so that memory runs out at once or not at all.

    Args:
        lengths: The number of tokens of each prompt.
        samples: The number of completions of each.

    Returns:
        The problem and the sample of every completion; those of one problem follow each other.
    """
    problems = sorted(range(len(lengths)), key=lambda problem: -lengths[problem])
    return [(problem, sample) for problem in problems for sample in range(samples)]


def _generator(plan: _Plan) -> Generator:
    source = plan.source
    if plan.backend == "transformers":
        model = load_model(source, plan.config.dtype)
        for problems in plan.problems:
            problems.check_ids(embedding_rows(model), plan.tokenizer)
        return TransformersGenerator(model, plan.tokenizer, plan.sampling)
    longest = max(len(ids) for problems in plan.problems for ids in problems.ids)
    return VllmGenerator(
        source.base,
        plan.sampling,
        dtype=plan.config.dtype,
        context=longest + plan.sampling.max_new_tokens,
        adapter=None if source.adapter_rank is None else source.path,
        adapter_rank=source.adapter_rank,
        **source.options,
    )


def _record(problem: int, sample: int, prompt: str, generation: Generation, verdict: Verdict) -> Record:
    made = {
        "problem": problem,
        "sample": sample,
        "prompt": prompt,
        "completion": generation.text,
        "tokens": generation.tokens,
        "finished": generation.finished,
    }
    return with_verdict(made, verdict)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
