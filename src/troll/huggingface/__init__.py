"""Reads Hugging Face causal language models without their logits, even if PEFT, DDP, FSDP or DeepSpeed wraps them."""

try:
    import transformers  # noqa: F401 (first: everything here needs it)
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError('troll.huggingface needs transformers: pip install "troll-rl[trl]"') from None

from troll.huggingface.policies import capture, trust_region_step

__all__ = ["capture", "trust_region_step"]
