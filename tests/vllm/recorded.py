"""What a real vLLM reported of a tiny model, and the model: for tests of the readers where vLLM is not installed.

`records.json` is made by `python -m tests.vllm.record` (`make vllm-setup`).
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tolerance import rounding, within
from tests.troll.trust_region import reference
from troll import SparsePolicy

RECORDS = Path(__file__).with_name("records.json")

VOCAB_SIZE, TOP_K, MASS_THRESHOLD = 48, 5, 1e-5
PROMPTS = [[1, 5, 9], [1, 7]]
#: How the recorded completions were sampled.
SAMPLINGS: dict[str, dict[str, Any]] = {
    "whole": {"temperature": 1.25},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 0.8, "top_p": 0.7},
}
#: Tokens of a completion at most.
LENGTH = 5

#: What float32 may do to a log-probability, where logits are 10 at most; divided by the lowest temperature.
ERROR = rounding(96, 10) / 0.8


def tiny_model() -> LlamaForCausalLM:
    """With weights that no version of torch or transformers chooses."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # vLLM's attention on a CPU has kernels for heads of 32 and more
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=[2, 3, 4],
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "norm" in name:
                parameter.fill_(1)
                continue
            number = torch.arange(parameter.numel(), dtype=torch.float64).view(parameter.shape)
            noise = torch.sin(number * 12.9898 + len(name)) * 43758.5453
            scale = 1.2 if name == "lm_head.weight" else 0.3
            parameter.copy_(scale * (noise - noise.floor() - 0.5))
    return model.eval()


class Completion(NamedTuple):
    """One completion as TRL returns it of vLLM, colocated or from a server."""

    ids: list[int]
    log_probs: list[list[float | None]]
    token_ids: list[list[int]]


@dataclass
class Record:
    """Completions of `PROMPTS`, sampled by one of `SAMPLINGS`.

    Attributes:
        sampling: Key of `SAMPLINGS`.
        colocated: What TRL's `VLLMGeneration` returns for an engine in this process.
        server: What TRL's `VLLMClient` returns.
        arrays: For each colocated completion, ids and log-probabilities (T, 1 + K) in vLLM's messages, the sampled
            token's first.
    """

    sampling: str
    colocated: list[Completion]
    server: list[Completion]
    arrays: list[tuple[np.ndarray, np.ndarray]]


def records() -> list[Record]:
    return [
        Record(
            sampling=entry["sampling"],
            colocated=[Completion(*completion) for completion in entry["colocated"]],
            server=[Completion(*completion) for completion in entry["server"]],
            arrays=[(np.array(ids, np.int32), np.array(values, np.float32)) for ids, values in entry["arrays"]],
        )
        for entry in json.loads(RECORDS.read_text())["records"]
    ]


def distributions(sampling: str, prompt: list[int], completion: list[int]) -> Iterator[np.ndarray]:
    """Logits in float64 of what each token was sampled from: −inf where the sampler's truncation left a token out."""
    settings = {"top_k": 0, "top_p": 1.0} | SAMPLINGS[sampling]
    with torch.no_grad():
        logits = tiny_model().double()(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    for row in logits.numpy() / settings["temperature"]:
        kept = reference.kept_set(row, settings["top_k"], settings["top_p"])
        yield np.where(np.isin(np.arange(len(row)), kept), row, -np.inf)


def check_policy(policy: SparsePolicy, record: Record, prompt: list[int], completion: list[int]) -> None:
    """That policies (T,) are those that the tokens were sampled from, by the model's own logits in float64."""
    truncated = record.sampling != "whole"
    assert policy.truncated == truncated and policy.shape == (len(completion),)
    for t, logits in enumerate(distributions(record.sampling, prompt, completion)):
        expected = reference.capture(logits, completion[t], TOP_K, 0.0 if truncated else MASS_THRESHOLD)
        ids = [token for token, x in zip(expected.ids, expected.log_probs, strict=True) if x > -math.inf]
        used = policy.used[t]
        assert policy.token_ids[t][used].tolist() == ids
        found = policy.log_probs[t][used].double().numpy()
        assert np.abs(found - expected.log_probs[: len(ids)]).max() <= within(ERROR)
        assert int(policy.token_ids[t, policy.slot[t]]) == completion[t]
        tail = 0.0 if truncated else math.exp(expected.tail_log_prob)
        assert abs(math.exp(float(policy.tail_log_prob[t])) - tail) <= within(TOP_K * ERROR)
