"""The CPU time of verl's vLLM server for reporting the old policy of each sampled token, at K = 64.

In verl's environment: `OMP_NUM_THREADS=1 .venv-verl/bin/python -m benchmarks rollout_anchor`. vLLM itself does not run:
`tests/troll/verl/vllm_engine.py` has its types, and treats log-probabilities as vLLM 0.24.0 does. One server process
does all of this for all its requests, so the times are CPU times of one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.measure import shapes
from tests.troll.verl.vllm_engine import (
    Decode,
    EngineCoreOutput,
    LogprobsLists,
    OutputProcessor,
    RequestOutput,
    RequestState,
    SamplingParams,
)
from troll import PackedPolicy, capture_top
from troll.verl.records import to_record
from troll.verl.reported import old_policy_record
from troll.verl.seam.vllm import TopLogProbs

VOCABULARY, TOP_K, MASS_THRESHOLD = 150_000, 64, 1e-5

#: The requests that one step of the engine serves, and the tokens of each.
CASES = {"cpu": (16, 1024), "cuda": (16, 1024), "small": (2, 64)}


def decoder() -> Decode:
    """A fast tokenizer's decoder for a vocabulary of that size, one token at a time as vLLM decodes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = letters + [f"{letters[i % 100]}{letters[i // 100 % 100]}{i // 10_000}" for i in range(VOCABULARY)]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return lambda ids: [tokenizer.decode([token]) for token in ids]


def reports(tokens: int, seed: int) -> LogprobsLists:
    """An engine's rows for `tokens` tokens; about six entries of each carry all but 1e-5 of the mass."""
    generator = np.random.default_rng(seed)
    steepness = generator.uniform(1.2, 4.0, (tokens, 1))
    logits = -steepness * np.arange(TOP_K) ** 0.9 - generator.exponential(0.05, (tokens, TOP_K))
    log_probs = np.sort(logits)[:, ::-1]
    log_probs = log_probs - np.log(np.exp(log_probs).sum(1, keepdims=True)) - 1e-6
    ids = np.argsort(generator.random((tokens, 2 * TOP_K)))[:, :TOP_K] * 1000 + generator.integers(0, 1000, (tokens, 1))
    uniform = generator.random((tokens, 1))
    drawn = (uniform > np.exp(log_probs).cumsum(1)).sum(1, keepdims=True).clip(max=TOP_K - 1)
    own = np.take_along_axis(ids, drawn, 1), np.take_along_axis(log_probs, drawn, 1)
    rows = (np.concatenate(pair, 1) for pair in zip(own, (ids, log_probs), strict=True))
    token_ids, values = rows
    return LogprobsLists(token_ids.astype(np.int32), values.astype(np.float32), drawn[:, 0].astype(np.int32) + 1)


class Rollout:
    """Answered requests as the frontend gets them from the engine's process: one token of each at a time."""

    def __init__(self, requests: int, tokens: int, decode: Decode) -> None:
        self.reports = [reports(tokens, seed) for seed in range(requests)]
        self.count, self._decode = requests * tokens, decode

    def frontend(
        self, number: int, detokenize: bool, wrap: Callable[[OutputProcessor], None] = lambda _: None
    ) -> tuple[float, list[RequestOutput]]:
        """CPU seconds of vLLM's frontend with `number` log-probabilities a token, and the output for verl's server."""
        processor = OutputProcessor(self._decode)
        wrap(processor)
        states: list[RequestState] = []
        for request in range(len(self.reports)):
            params = SamplingParams(logprobs=number, detokenize=detokenize)
            states.append(processor.add_request(f"{request}-1f", str(request), params))
        steps = []
        for at in range(len(self.reports[0].logprobs)):
            outputs = []
            for request, whole in enumerate(self.reports):
                ids, values, ranks, _ = whole
                part = LogprobsLists(
                    ids[at : at + 1, : number + 1], values[at : at + 1, : number + 1], ranks[at : at + 1]
                )
                outputs.append(EngineCoreOutput(f"{request}-1f", [int(ids[at, 0])], part))
            steps.append(outputs)
        start = time.thread_time()
        for outputs in steps:
            processor.process_outputs(outputs)
        return time.thread_time() - start, [state.output for state in states if state.output is not None]


def stock(rollout: Rollout) -> dict[str, float]:
    """The server of verl itself, which asks for the sampled token's log-probability only."""
    frontend, _ = rollout.frontend(0, detokenize=True)
    return {"frontend": frontend}


def as_objects(rollout: Rollout) -> dict[str, float]:
    """All log-probabilities through vLLM's own interface: text, a dictionary for each token, and records from these."""
    frontend, outputs = rollout.frontend(TOP_K, detokenize=True)
    without_text, _ = rollout.frontend(TOP_K, detokenize=False)
    start = time.thread_time()
    for output in outputs:
        completion = output.outputs[0]
        assert completion.logprobs is not None
        rows = [{token: entry.logprob for token, entry in row.items()} for row in completion.logprobs]
        ids, values = torch.full((len(rows), TOP_K + 1), -1), torch.full((len(rows), TOP_K + 1), -torch.inf)
        for at, row in enumerate(rows):
            ids[at, : len(row)], values[at, : len(row)] = torch.tensor(list(row)), torch.tensor(list(row.values()))
        sampled = torch.tensor(completion.token_ids)
        own = torch.tensor([row[token] for row, token in zip(rows, completion.token_ids, strict=True)])
        policy = capture_top(ids, values, sampled, own, VOCABULARY, top_k=TOP_K, mass_threshold=MASS_THRESHOLD)
        to_record(PackedPolicy.of(policy))
    return {"text": frontend - without_text, "frontend": without_text, "records": time.thread_time() - start}


def as_arrays(rollout: Rollout) -> dict[str, float]:
    """As in `troll.verl.vllm_rollout`: the engine's arrays, and records from these."""
    taking: list[TopLogProbs] = []

    def wrap(processor: OutputProcessor) -> None:
        engine: Any = type("AsyncLLM", (), {"output_processor": processor})()
        taking.append(TopLogProbs(engine, TOP_K))
        taking[0].expect(*map(str, range(len(rollout.reports))))

    frontend, _ = rollout.frontend(TOP_K, detokenize=False, wrap=wrap)
    start = time.thread_time()
    for request in range(len(rollout.reports)):
        reported = taking[0].taken(str(request))
        assert reported is not None
        old_policy_record(*reported, vocab_size=VOCABULARY, top_k=TOP_K, mass_threshold=MASS_THRESHOLD)
    return {"frontend": frontend, "records": time.thread_time() - start}


def main(device: str, repeats: int) -> list[dict[str, Any]]:
    """Prints µs of CPU time a token, the least of the rounds, and the difference from verl's own server."""
    requests, tokens = CASES[shapes(device)]
    rollout = Rollout(requests, tokens, decoder())
    rows = []
    table = Table("server", "text", "frontend", "records", "all", "more than verl's own")
    least: dict[str, float] = {}
    for name, contender in (("verl's own", stock), ("objects", as_objects), ("arrays", as_arrays)):
        rounds = [contender(rollout) for _ in range(repeats)]
        best = min(rounds, key=lambda times: sum(times.values()))
        micros = {part: seconds / rollout.count * 1e6 for part, seconds in best.items()}
        least[name] = sum(micros.values())
        more = least[name] - least["verl's own"]
        cells = (f"{micros[part]:.1f}" if part in micros else "" for part in ("text", "frontend", "records"))
        table.add_row(name, *cells, f"{least[name]:.1f}", f"{more:+.1f}")
        rows.append({"server": name, **micros, "all": least[name], "more": more})
    title = f"µs a token, K = {TOP_K}, {requests} requests of {tokens} tokens, one thread"
    Console().print(title, table)
    return rows
