"""A Hugging Face causal language model read without its logits, as it is: wrapped by PEFT, DDP, FSDP or DeepSpeed."""

from troll.huggingface.policies import capture, trust_region_step

__all__ = ["capture", "trust_region_step"]
