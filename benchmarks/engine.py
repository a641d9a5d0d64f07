"""A real vLLM against the trainer at equal weights: how far apart in nats, and what log-probabilities cost the engine.

    python -m benchmarks engine --model FOLDER

In an environment with vLLM (`make vllm-setup`). For each dtype an engine samples completions of open text and reports
the K likeliest tokens' log-probabilities. The trainer reads the same tokens with the same weights, in float32 and in
bf16 as training computes (autocast). KL(p̃ ‖ p), which a trust region's first update sees, is then the difference
between the two programs; in the last row it is the trainer's own rounding. The last table is that of `truncation`, with
vLLM as the sampler and the kept sets that the trainer finds.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import troll
from benchmarks import coverage, measure, truncation

K = 64
DTYPES = ("float32", "bfloat16")
#: Log-probabilities that a request asks for: none, the sampled token's, as many as vLLM's usual cap, and as ours.
ASKED = (None, 0, 20, K)


def main(device: str, repeats: int, models: list[str]) -> list[dict[str, Any]]:
    """Prints both tables for the first of the models, and returns their rows."""
    folder = models[0]
    rows: list[dict[str, Any]] = []
    reports: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for dtype in DTYPES:  # one engine a process
            path = Path(temporary, dtype)
            number, length = (4, 8) if measure.small else (16, 48)
            command = [sys.executable, "-m", "benchmarks.engine", folder, dtype, str(path)]
            subprocess.run([*command, *map(str, (number, length, repeats))], check=True)
            reports[dtype] = torch.load(path)
    table = measure.numbers("engine", "log-probabilities", "tokens/s", "of none (min–max)", names=2)
    for dtype, report in reports.items():
        for asked, rates in report["rates"].items():
            shares = [rate / base for rate, base in zip(rates, report["rates"][None], strict=True)]
            rows.append({"engine": dtype, "log_probs": asked, "tokens_per_second": rates, "share": shares})
            cells = ["none" if asked is None else str(asked), f"{statistics.median(rates):.0f}"]
            table.add_row(dtype, *cells, measure.ratio_text(shares))
    Console(width=110).print(table)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    table = measure.numbers(
        "engine", "trainer", "KL mean", "KL 99 %", "KL largest", "ratio, range", "KL > 0.05", names=2
    )
    pairs = [(reports[engine]["policies"], engine, trainer) for engine in DTYPES for trainer in DTYPES]
    own = read(model, reports["float32"]["policies"], "float32")
    exact = [
        (prompt, ids, troll.capture(logits, torch.tensor(ids), top_k=K, mass_threshold=0.0))
        for (prompt, ids, _), logits in zip(reports["float32"]["policies"], own, strict=True)
    ]
    for policies, engine, trainer in [*pairs, (exact, "trainer, float32", "bfloat16")]:
        row = difference(policies, read(model, policies, trainer))
        rows.append({"engine": engine, "trainer": trainer, **row})
        numbers = [f"{row[name]:.2g}" for name in ("kl_mean", "kl_99", "kl_max")]
        share = f"{100 * row['above_bound']:.2g} %"
        table.add_row(engine, trainer, *numbers, f"{row['ratio_min']:.2f}–{row['ratio_max']:.2f}", share)
    Console(width=110).print(table)

    table = measure.numbers("engine", "sampler", "whole: ratio", "far", "kept: ratio", "far", "range", "added", names=2)
    for dtype, report in reports.items():
        for sampler, completions in report["truncated"].items():
            row = truncated(model, completions, troll.Truncation(**truncation.SAMPLERS[sampler]))
            rows.append({"engine": dtype, "sampler": sampler, **row})
            numbers = [f"{row['whole_ratio']:.3f}", f"{row['whole_far']:.1%}"]
            numbers += [f"{row['kept_ratio']:.3f}", f"{row['kept_far']:.1%}"]
            numbers += [f"{row['kept_min']:.2f}–{row['kept_max']:.2f}", f"{row['added']:.2%}"]
            table.add_row(dtype, sampler, *numbers)
    Console(width=110).print(table)
    return rows


def truncated(model: Any, completions: list[Any], kept: troll.Truncation) -> dict[str, float]:
    """The figures of one sampler, whose completions come with its own log-probabilities of their tokens."""
    logits = torch.cat(read(model, completions, "float32"))
    ids = torch.tensor([token for _, tokens, _ in completions for token in tokens])
    sampled = torch.tensor([log_prob for *_, log_probs in completions for log_prob in log_probs])
    return truncation.ratios(logits, ids, sampled, kept)


@torch.no_grad()
def read(model: Any, policies: list[Any], dtype: str) -> list[Tensor]:
    """The trainer's logits of each completion's tokens, (T, V), computed in a dtype as training does."""
    logits = []
    for prompt, ids, _ in policies:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            output = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        logits.append(output.float())
    return logits


def difference(policies: list[Any], logits: list[Tensor]) -> dict[str, float]:
    """KL(trainer ‖ engine) in nats over the tokens, and the range of the sampled tokens' probability ratios."""
    steps = [troll.trust_region_step(z, old, kl_bound=1e3) for (_, _, old), z in zip(policies, logits, strict=True)]
    kl = torch.cat([step.kl_before for step in steps]).double()
    ratio = torch.cat([step.log_ratio for step in steps]).double().exp()
    return {
        "tokens": len(kl),
        "kl_mean": float(kl.mean()),
        "kl_99": float(kl.quantile(0.99)),
        "kl_max": float(kl.max()),
        "ratio_min": float(ratio.min()),
        "ratio_max": float(ratio.max()),
        "above_bound": float((kl > 0.05).double().mean()),
    }


def run_engine(folder: str, dtype: str, path: str, number: int, length: int, repeats: int) -> None:
    """Times completions with each number of log-probabilities, and saves the rates, and the policies of the last."""
    from vllm import LLM, SamplingParams

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    prompts = [
        tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=True)["input_ids"]
        for each in coverage.conversations("open text", number)
    ]
    engine = LLM(folder, dtype=dtype, max_model_len=512, max_logprobs=K, logprobs_mode="processed_logprobs", seed=0)

    def generate(log_probs: int | None, **truncated: Any) -> Any:
        parameters = SamplingParams(max_tokens=length, ignore_eos=True, logprobs=log_probs, seed=0, **truncated)
        return engine.generate([{"prompt_token_ids": x} for x in prompts], parameters, use_tqdm=False)

    generate(K)
    rates: dict[int | None, list[float]] = {asked: [] for asked in ASKED}
    for _ in range(repeats):
        for asked in ASKED:
            start = time.perf_counter()
            generate(asked)
            rates[asked].append(number * length / (time.perf_counter() - start))
    policies = []
    for prompt, output in zip(prompts, generate(K), strict=True):
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        entries = [sorted(each.items(), key=lambda item: item[1].rank) for each in completion.logprobs]
        width = max(map(len, entries))
        token_ids = [[token for token, _ in each] + [-1] * (width - len(each)) for each in entries]
        log_probs = [[x.logprob for _, x in each] + [-torch.inf] * (width - len(each)) for each in entries]
        own = [at[token].logprob for at, token in zip(completion.logprobs, ids, strict=True)]
        policy = troll.capture_top(
            torch.tensor(token_ids),
            torch.tensor(log_probs),
            torch.tensor(ids),
            torch.tensor(own),
            len(tokenizer),
            top_k=K,
        )
        policies.append((prompt, ids, policy))
    drawn = {}
    for name, settings in truncation.SAMPLERS.items():
        first = [output.outputs[0] for output in generate(0, **settings)]
        own = [[at[token].logprob for at, token in zip(x.logprobs, x.token_ids, strict=True)] for x in first]
        drawn[name] = [(prompt, list(x.token_ids), y) for prompt, x, y in zip(prompts, first, own, strict=True)]
    torch.save({"rates": rates, "policies": policies, "truncated": drawn}, path)


if __name__ == "__main__":
    run_engine(sys.argv[1], sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))
