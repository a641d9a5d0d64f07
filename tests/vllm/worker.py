"""Trains a tiny model with a real vLLM in this process, and writes what the engine then says of the weights.

`python -m tests.vllm.worker JOB.json RESULT.json`. One engine a process: vLLM's state is global.
"""

import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trl.generation.vllm_generation
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

from tests.troll.trl import tiny

PROMPTS = [[1, 5, 9], [1, 7], [1, 12, 13, 14]]


def top_log_probs(trainer: Any, number: int) -> tuple[list[list[int]], list[list[dict[int, float]]]]:
    """Completions of `PROMPTS`, and the engine's likeliest log-probabilities of each token."""
    outputs = trainer.vllm_generation.llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        SamplingParams(max_tokens=8, logprobs=number, seed=0),
        use_tqdm=False,
    )
    completions = [output.outputs[0] for output in outputs]
    entries = [[{token: x.logprob for token, x in at.items()} for at in one.logprobs] for one in completions]
    return [list(one.token_ids) for one in completions], entries


@torch.no_grad()
def largest_difference(model: Any, completions: list[list[int]], entries: list[list[dict[int, float]]]) -> float:
    """Between the engine's log-probabilities and a model's, in nats; computed in float32."""
    differences = [0.0]
    for prompt, ids, at in zip(PROMPTS, completions, entries, strict=True):
        log_probs = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        differences += [
            abs(log_prob - float(row[token]))
            for row, found in zip(log_probs, at, strict=True)
            for token, log_prob in found.items()
        ]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def main(job: dict[str, Any], output_dir: str) -> dict[str, Any]:
    trl.generation.vllm_generation.LLM = partial(LLM, dtype=job["dtype"])
    folder = job["model"]
    settings: dict[str, Any] = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 32}
    settings |= {"vllm_gpu_memory_utilization": 0.1} | job["settings"]
    peft = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM") if job["lora"] else None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if job["more_tokens"]:  # than vLLM reads from the folder
        model.resize_token_embeddings(model.config.vocab_size + job["more_tokens"])
    make = tiny.Maker(lambda _: Path(folder), Path(output_dir))
    trainer = make(model=model, peft_config=peft, **settings)
    dtype = trainer.vllm_generation.llm.llm_engine.model_config.dtype
    trainer.train()
    tiny.move(trainer.model, 0.5)
    before = top_log_probs(trainer, 8)
    trainer.vllm_generation.sync_weights()
    after = top_log_probs(trainer, 8)
    old = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return {
        "dtype": str(dtype),
        "history": trainer.state.log_history,
        "before": largest_difference(trainer.model.eval(), *before),
        "after": largest_difference(trainer.model.eval(), *after),
        "start": largest_difference(old, *after),
    }


if __name__ == "__main__":
    job_path, result_path = map(Path, sys.argv[1:])
    result_path.write_text(json.dumps(main(json.loads(job_path.read_text()), str(result_path.parent))))
