"""Evaluates a model on tasks, into a folder in which the same command resumes where it was stopped."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from statistics import fmean
from typing import Any

from rich.console import Console

from troll.files import json_text, write_atomically
from troll.grading import Verdict
from troll.huggingface.token_ids import embedding_rows
from troll_lab.evaluation.config import EvaluationConfig, EvaluationError, slug
from troll_lab.evaluation.estimators import task_estimates
from troll_lab.evaluation.folder import (
    RESULTS,
    Record,
    append_records,
    claimed,
    read_object,
    read_records,
    replace_records,
    verdict_of,
    with_verdict,
)
from troll_lab.evaluation.generate import Sampling, TransformersGenerator, seed_of
from troll_lab.evaluation.model import ModelSource, find_model, load_model, load_tokenizer
from troll_lab.evaluation.problems import Problems, load_problems
from troll_lab.evaluation.table import CompletionProgress, print_table, results_table
from troll_lab.evaluation.vllm import VllmGenerator, adapter_problem, vllm_is_usable
from troll_lab.terminal import say

_DEFAULT_NEW_TOKENS = 2048
_PACKAGES = ("troll-rl", "torch", "transformers", "vllm", "math-verify", "reasoning-gym")


def evaluate(config: EvaluationConfig, console: Console | None = None) -> bool:
    """Evaluates a model on tasks, prints a table, and leaves a folder with `results.json` and every generation.

    Args:
        config: The settings. Results are written to its `folder`; an evaluation with the same settings resumes there.
        console: Where progress and the table are printed; by default standard output.

    Returns:
        Whether all tasks were evaluated; False after Ctrl-C.

    Raises:
        EvaluationError: If the model, a task or the folder cannot be used with these settings; where possible, before
            the weights are loaded.
        troll_lab.tasks.TaskError: If a task cannot be loaded.
    """
    evaluation = _Evaluation(config, console or Console())
    with claimed(config.folder, evaluation.settings, evaluation.task_settings):
        return evaluation.run()


class _Evaluation:
    """An evaluation, whose settings are all checked before the weights are loaded."""

    def __init__(self, config: EvaluationConfig, console: Console) -> None:
        if config.backend == "vllm" and find_spec("vllm") is None:
            raise EvaluationError("backend vllm needs the package vllm: use --backend transformers")
        self.config, self.console, self.folder = config, console, config.folder
        self.source = find_model(config.model, config.model_revision, config.trust_remote_code)
        self.backend = _backend(config.backend, self.source)
        self.tokenizer = load_tokenizer(self.source)
        self.problems = [load_problems(task, self.tokenizer, config.chat_template_kwargs) for task in config.tasks]
        # Files, seeds and results go by it; tasks of two files may have one.
        count, name = max((count, name) for name, count in Counter(slug(each.name) for each in self.problems).items())
        if count > 1:
            raise EvaluationError(f"{count} tasks have the name {name}: give them names of their own")
        new_tokens = _new_tokens(config.max_new_tokens, self.source, self.problems)
        self.sampling = Sampling(config.resolved_temperature, config.top_p, config.top_k, new_tokens)
        default = VllmGenerator.batch_size if self.backend == "vllm" else TransformersGenerator.batch_size
        self.batch_size = config.batch_size or default
        self.generator: TransformersGenerator | VllmGenerator | None = None
        # Of earlier commands in the folder, too.
        self.results: dict[str, Any] = {}
        self.tasks: dict[str, Any] = {}

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "model": self.source.name,
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

    @property
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

    def run(self) -> bool:
        earlier = read_object(self.folder / RESULTS)
        self.results = earlier.get("tasks", {})
        self.tasks = earlier.get("settings", {}).get("tasks", {}) | self.task_settings
        names = [problems.name for problems in self.problems]
        say(self.console, f"evaluating {self.source.name} on {', '.join(names)} with {self.backend} in {self.folder}")
        (self.folder / "generations").mkdir(exist_ok=True)
        status = "failed"
        try:
            for problems in self.problems:
                self._evaluate(problems)
                self._write("unfinished")
            status = "finished"
        except KeyboardInterrupt:
            status = "interrupted"
        finally:
            self._write(status)
        done = {name: self.results[name] for name in names if "metrics" in self.results.get(name, {})}
        if done:
            print_table(self.console, results_table(done, self.config))
        for name, result in done.items():
            if unscored := result.get("unscored"):
                say(
                    self.console,
                    f"{name}: {unscored} of {result['completions']} completions could not be judged and do not count; "
                    "the same command judges them again",
                )
        say(self.console, f"results {self.folder / RESULTS}")
        if status == "interrupted":
            say(self.console, "interrupted; the same command resumes")
        return status == "finished"

    def _evaluate(self, problems: Problems) -> None:
        path = self.folder / "generations" / f"{slug(problems.name)}.jsonl"
        order = completion_order([len(ids) for ids in problems.ids], self.config.samples)
        records = read_records(path, order, self.batch_size)
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
            for first in range(len(records), len(order), self.batch_size):
                batch = self._complete(problems, order[first : first + self.batch_size])
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
            self.generator = self._load_generator()
        rows = [row for row, _ in batch]
        seeds = [seed_of(self.config.seed, problems.name, row, sample) for row, sample in batch]
        generations = self.generator.generate([problems.ids[row] for row in rows], seeds)
        verdicts = problems.judge(rows, [generation.text for generation in generations])
        return [
            with_verdict(
                {
                    "problem": row,
                    "sample": sample,
                    "prompt": problems.texts[row],
                    "completion": generation.text,
                    "tokens": generation.tokens,
                    "finished": generation.finished,
                },
                verdict,
            )
            for (row, sample), generation, verdict in zip(batch, generations, verdicts, strict=True)
        ]

    def _load_generator(self) -> TransformersGenerator | VllmGenerator:
        if self.backend == "vllm":
            longest = max(len(ids) for problems in self.problems for ids in problems.ids)
            context = longest + self.sampling.max_new_tokens
            return VllmGenerator(self.source, self.tokenizer, self.sampling, dtype=self.config.dtype, context=context)
        model = load_model(self.source, self.config.dtype)
        for problems in self.problems:
            problems.check_ids(embedding_rows(model), self.tokenizer)
        return TransformersGenerator(model, self.tokenizer, self.sampling)

    def _summary(self, problems: Problems, records: Sequence[Record]) -> dict[str, Any]:
        verdicts: list[dict[int, Verdict]] = [{} for _ in range(len(problems))]
        for record in records:
            verdicts[record["problem"]][record["sample"]] = verdict_of(record)
        by_sample = [[one[sample] for sample in sorted(one)] for one in verdicts]
        estimates = task_estimates(
            by_sample, self.config.resolved_ks, questions=problems.texts, same=problems.same_answer
        )
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
            "settings": self.settings | {"tasks": self.tasks},
            "interval": "95 %, Wilson's with the effective number of trials over questions",
            "tasks": self.results,
            "versions": _versions(),
        }
        write_atomically(self.folder / RESULTS, json_text(content, indent=2, ensure_ascii=False))


def _backend(wanted: str, source: ModelSource) -> str:
    if wanted == "transformers" or (wanted == "auto" and not vllm_is_usable()):
        return "transformers"
    problem = None if source.adapter_rank is None else adapter_problem(source.path)
    if problem is not None and wanted == "vllm":
        raise EvaluationError(
            f"vLLM cannot run the adapter {source.path} as it was trained: {problem}; use --backend transformers, "
            "which does"
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


def completion_order(lengths: Sequence[int], samples: int) -> list[tuple[int, int]]:
    """The order of generation: long prompts first, so that memory runs out at the start or never.

    Args:
        lengths: The number of tokens of each prompt.
        samples: The number of completions of each.

    Returns:
        The problem and the sample of every completion; those of one problem follow each other.
    """
    problems = sorted(range(len(lengths)), key=lambda problem: -lengths[problem])
    return [(problem, sample) for problem in problems for sample in range(samples)]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
