"""Generation by vLLM, if it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from troll_lab.evaluation.config import EvaluationError
from troll_lab.evaluation.generate import Generation, Sampling
from troll_lab.evaluation.model import ModelSource

# The ranks that vLLM has kernels for; a smaller adapter runs with the next larger rank.
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

_LORA_WEIGHTS = (".lora_A.weight", ".lora_B.weight")

#: Settings of a `LoraConfig` that change what its matrices do, and that vLLM does not read.
_IGNORED = (
    "modules_to_save",
    "trainable_token_indices",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "target_parameters",
    "alora_invocation_tokens",
)


def vllm_is_usable() -> bool:
    """Whether vLLM is installed and there is a GPU for it."""
    return find_spec("vllm") is not None and torch.cuda.is_available()


def adapter_problem(path: str) -> str | None:
    """A part of the LoRA adapter in a folder that vLLM would refuse or silently ignore; None if there is none."""
    from peft import PeftConfig, load_peft_weights

    config = PeftConfig.from_pretrained(path)
    if found := [name for name in _IGNORED if getattr(config, name, None)]:
        return f"it was trained with {found[0]}"
    # Trained embeddings, heads, biases and magnitudes, and adapters other than LoRA.
    others = [key for key in load_peft_weights(path, device="cpu") if not key.endswith(_LORA_WEIGHTS)]
    return f"it changes more than linear layers: {others[0].removeprefix('base_model.model.')}" if others else None


class VllmGenerator:
    """Generation by vLLM, which makes batches itself.

    Args:
        source: The model. An adapter is applied to its base by vLLM.
        sampling: The sampling settings.
        dtype: The dtype for `vllm.LLM`: "auto", "float32", "bfloat16" or "float16".
        context: The number of tokens of the longest prompt with its completion; vLLM reserves memory for it.

    Raises:
        EvaluationError: If vLLM does not take adapters of this rank.
    """

    batch_size = 1024

    def __init__(self, source: ModelSource, tokenizer: Any, sampling: Sampling, *, dtype: str, context: int) -> None:
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        self.tokenizer, self.sampling, self.adapter = tokenizer, sampling, None
        lora: dict[str, Any] = {}
        if source.adapter_rank is not None:
            lora = {"enable_lora": True, "max_lora_rank": _supported_rank(source.adapter_rank)}
            self.adapter = LoRARequest("adapter", 1, source.path)
        self.engine = LLM(model=source.base, dtype=dtype, max_model_len=context, **source.options, **lora)

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Generation]:
        """Completes each of B prompts once, see `TransformersGenerator.generate`."""
        from vllm import SamplingParams

        sampling = self.sampling
        # One request for each completion: in a request for n completions, the seeds would depend on n.
        parameters = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_new_tokens,
                seed=seed,
                detokenize=False,  # it would keep the blank before the first word, which training does not see
            )
            for seed in seeds
        ]
        outputs = self.engine.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            parameters,
            use_tqdm=False,
            lora_request=self.adapter,
        )
        return [self._read(output.outputs[0]) for output in outputs]

    def _read(self, completion: Any) -> Generation:
        ids, finished = list(completion.token_ids), completion.finish_reason == "stop"
        text = self.tokenizer.decode(ids[:-1] if finished else ids, skip_special_tokens=True)
        return Generation(text, len(ids), finished)


def _supported_rank(rank: int) -> int:
    larger = next((each for each in _LORA_RANKS if each >= rank), None)
    if larger is None:
        raise EvaluationError(
            f"vLLM takes adapters up to rank {_LORA_RANKS[-1]}, got {rank}: use --backend transformers"
        )
    return larger
