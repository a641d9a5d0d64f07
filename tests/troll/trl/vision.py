"""Tiny vision-language models, their processors and a data set of images, all made in code."""

from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from PIL import Image

from tests.troll.trl.tiny import COMMON, VOCABULARY, make_tokenizer

#: The special tokens of both families, after the characters.
IMAGE_TOKENS = [
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<fake_token_around_image>",
    "<global-img>",
    "<image>",
    "<end_of_utterance>",
]
IDS = {token: index for index, token in enumerate([*VOCABULARY, *IMAGE_TOKENS])}

CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)

TEXT = {**COMMON, "vocab_size": len(IDS), "max_position_embeddings": 256}


#: Model types.
FAMILIES = ["qwen2_5_vl", "idefics3"]


class ImageOnlyQwen2_5_VLProcessor(transformers.ProcessorMixin):
    """Qwen2.5-VL's processor without its videos, which need torchvision."""

    image_token, image_token_id = "<|image_pad|>", IDS["<|image_pad|>"]
    video_token_id = IDS["<|video_pad|>"]
    return_mm_token_type_ids = True

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def replace_image_token(self, image_inputs: dict[str, Any], image_idx: int, **_: Any) -> str:
        patches = int(image_inputs["image_grid_thw"][image_idx].prod())
        return self.image_token * (patches // self.image_processor.merge_size**2)


def make_model(family: str) -> transformers.PreTrainedModel:
    """A random model of about fifty thousand parameters with a vision tower of two layers."""
    torch.manual_seed(0)
    model: Any
    vision: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "patch_size": 4, "initializer_range": 0.1}
    if family == "qwen2_5_vl":
        vision |= {"depth": 2, "num_heads": 2, "window_size": 16, "fullatt_block_indexes": [1]}
        vision |= {"out_hidden_size": TEXT["hidden_size"]}
        rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
        model = transformers.Qwen2_5_VLForConditionalGeneration(
            transformers.Qwen2_5_VLConfig(
                text_config={**TEXT, "rope_parameters": rope},
                vision_config=vision,
                image_token_id=IDS["<|image_pad|>"],
                video_token_id=IDS["<|video_pad|>"],
                vision_start_token_id=IDS["<|vision_start|>"],
                vision_end_token_id=IDS["<|vision_end|>"],
            )
        )
    else:
        vision |= {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16}
        model = transformers.Idefics3ForConditionalGeneration(
            transformers.Idefics3Config(
                text_config={"model_type": "llama", **TEXT},
                vision_config=vision,
                image_token_id=IDS["<image>"],
                scale_factor=2,
            )
        )
    with torch.no_grad():
        model.get_output_embeddings().weight *= 4
    model.generation_config.eos_token_id = COMMON["eos_token_id"]
    # A completion with an image token and no image is an error. TRL 1.15 leaves that to the model, 1.16 suppresses it.
    model.generation_config.suppress_tokens = [model.config.image_token_id]
    return model.train()


def make_processor(family: str) -> transformers.ProcessorMixin:
    """The family's image processor (the one on Pillow), and one token per character."""
    image_processor: Any
    fast = make_tokenizer(*IMAGE_TOKENS)
    if family == "qwen2_5_vl":
        pixels: dict[str, Any] = {"min_pixels": 8 * 8, "max_pixels": 16 * 16}
        image_processor = transformers.Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, **pixels)
        template = CHAT_TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
        return ImageOnlyQwen2_5_VLProcessor(image_processor, fast, chat_template=template)
    if "torchvision" in getattr(transformers.Idefics3ImageProcessorPil, "_backends", ()):  # a placeholder for a class
        pytest.skip("before transformers 5.18, Idefics3's image processors need torchvision, which is not installed")
    image_processor = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 16}, max_image_size={"longest_edge": 16}, do_image_splitting=False
    )
    template = CHAT_TEMPLATE.replace("IMAGE", "<image>")
    return transformers.Idefics3Processor(image_processor, fast, image_seq_len=4, chat_template=template)


def make_dataset(size: int = 16) -> Dataset:
    """Images of random pixels and different sizes, each with a question of a different length."""
    generator = torch.Generator().manual_seed(0)
    images = []
    for index in range(size):
        shape = (8 + 8 * (index % 2), 16, 3)
        pixels = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        images.append(Image.fromarray(pixels.numpy()))
    prompts = [[{"role": "user", "content": "ab" * (1 + index % 3)}] for index in range(size)]
    return Dataset.from_dict({"prompt": prompts, "image": images})
