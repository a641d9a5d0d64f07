"""What a step of GRPO costs on many GPUs, from shapes of models and named assumptions; nothing here is measured.

One rollout is generated, scored once by the old-policy pass, and used for its updates, every token in one of them.
Times are GPU-seconds of one response token, bytes those of one response token, unless a name says otherwise.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

#: Bytes that the torch code moves for each logit, or each candidate of the top K, reads and writes counted operation by
#: operation in `trust_region/reading`, for bf16 logits of which an index says what rows are read, as in verl. The fused
#: head's Triton kernels read a tile as often as the clip's head does.
CAPTURE_BYTES, UPDATE_BYTES, CANDIDATE_BYTES = 38, 96, 126
#: Of the same, for all rows of float32 logits, which need no copies: what `python -m benchmarks predict` times.
CAPTURE_BYTES_FLOAT32, UPDATE_BYTES_FLOAT32 = 36, 88
#: Entries of a block of which a capture takes the maximum.
BLOCK = 64
#: Of numbers that are exchanged: float32 and int32.
WORD = 4


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer; `experts` is 1 for a dense one.

    Attributes:
        name: Of the model.
        layers: Transformer blocks.
        width: Of the hidden states.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_width: Of a head.
        feed_forward: Width of an expert's three matrices.
        experts: In every layer.
        active_experts: For one token.
        vocabulary: Its size.
        tensor_parallel: Processes that share a head, as one would set it.
        pipeline_parallel: Stages, likewise.
    """

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    feed_forward: int
    experts: int
    active_experts: int
    vocabulary: int
    tensor_parallel: int
    pipeline_parallel: int

    def body(self, experts: int) -> int:
        """Parameters of all layers, with so many experts counted."""
        attention = 2 * self.width * self.head_width * (self.heads + self.kv_heads)
        router = self.width * self.experts if self.experts > 1 else 0
        return self.layers * (attention + router + 3 * self.width * self.feed_forward * experts)

    @property
    def head(self) -> int:
        """Parameters of the LM head."""
        return self.width * self.vocabulary

    @property
    def parameters(self) -> int:
        """All, with separate embeddings."""
        return self.body(self.experts) + 2 * self.head

    @property
    def readers(self) -> int:
        """Ranks that each fetch the same part of a batch: all of one data-parallel replica, in verl."""
        return self.tensor_parallel * self.pipeline_parallel


#: The published configurations; parallel sizes are assumed.
SHAPES = (
    Shape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14_336, 1, 1, 128_256, 1, 1),
    Shape("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28_672, 1, 1, 128_256, 8, 1),
    Shape("Qwen3-235B-A22B", 94, 4096, 64, 4, 128, 1536, 128, 8, 151_936, 4, 8),
)


def given(value: float, source: str) -> Any:
    """A field with where its value is from."""
    return dataclasses.field(default=value, metadata={"source": source})


@dataclass(frozen=True)
class Assumptions:
    """Everything that is not the model's shape; ``python -m benchmarks simulate`` prints each with its source."""

    peak_flops: float = given(989e12, "H100 SXM data sheet, bf16, dense")
    memory_bandwidth: float = given(3.35e12, "H100 SXM data sheet, bytes/s")
    gpu_memory: float = given(80e9, "H100 SXM data sheet, bytes")
    nvlink: float = given(450e9, "H100 SXM data sheet, bytes/s, one direction")
    node_link: float = given(50e9, "400 Gbit/s for host traffic of a node, bytes/s: assumed")
    gpus_per_node: float = given(8, "assumed")
    mfu: float = given(0.4, "share of peak FLOP/s in the transformer's passes: assumed")
    head_mfu: float = given(0.6, "share of it in the LM head's large products: assumed")
    generation_mfu: float = given(0.1, "share of it while generating, where memory limits: assumed")
    kernel_efficiency: float = given(0.5, "share of memory bandwidth in what TROLL adds: assumed")
    latency: float = given(20e-6, "of a collective, seconds: assumed")
    recomputed: float = given(1, "forward passes of the body made again in the backward: assumed")
    bytes_per_parameter: float = given(18, "bf16 weight, float32 gradient, weight and Adam's moments")
    lora_bytes_per_parameter: float = given(2, "bf16 weight; LoRA's own parameters are neglected")
    memory_share: float = given(0.7, "of GPU memory for those, at most: assumed")
    sequences_per_gpu: float = given(32, "weak scaling: assumed")
    prompt_tokens: float = given(512, "assumed")
    response_tokens: float = given(4096, "assumed")
    top_k: float = given(64, "troll's default")
    kept: float = given(5.99, "slots a token: `python -m benchmarks packed`, made-up distributions")
    record_bytes: float = given(40, "of a sequence: troll.trust_region.policy.wire")
    micro_batch: float = given(16_384, "tokens of a pass on a replica, a capture's too: assumed")
    storage_units: float = given(8, "of verl's transfer queue: its default, one on each node")
    store_seconds_packed: float = given(
        0.50e-6, "put and get a token, a core: `python -m benchmarks ray_store`, records"
    )
    store_seconds_padded: float = given(0.81e-6, "likewise, int64 ids")

    @property
    def tokens_per_gpu(self) -> float:
        """Response tokens of a rollout."""
        return self.sequences_per_gpu * self.response_tokens


def policy_bytes(shape: Shape, a: Assumptions) -> dict[str, float]:
    """Bytes of a response token's old policy in the forms that it could have."""
    return {
        "log-prob alone (clip)": WORD,
        "packed": WORD * (2 * a.kept + 3) + a.record_bytes / a.response_tokens,
        "padded, int32 ids": WORD * (2 * a.top_k + 2),
        "padded, int64 ids": WORD * (3 * a.top_k + 3),
        "full logits, bf16": 2 * shape.vocabulary,
    }


def fits(shape: Shape, gpus: int, a: Assumptions, *, lora: bool) -> bool:
    """Whether so many GPUs hold the model's training state between them."""
    a_parameter = a.lora_bytes_per_parameter if lora else a.bytes_per_parameter
    return shape.parameters * a_parameter <= gpus * a.gpu_memory * a.memory_share


def driver_copies(shape: Shape, a: Assumptions) -> int:
    """How often a driver sends a token: to each node of its replica, whose ranks share Ray's object store."""
    return math.ceil(shape.readers / a.gpus_per_node)


def driver_seconds(bytes_per_token: float, gpus: int, link: float, copies: int, a: Assumptions) -> float:
    """All old policies of a step into one process and out as so many copies, over one node's link of bytes/s."""
    return (1 + copies) * a.tokens_per_gpu * gpus * bytes_per_token / link


def queue_seconds(bytes_per_token: float, gpus: int, link: float, readers: int, a: Assumptions) -> float:
    """In once, and out once for each reader, over the links of the nodes that hold a storage unit."""
    units = min(a.storage_units, max(gpus / a.gpus_per_node, 1))
    return (1 + readers) * a.tokens_per_gpu * gpus * bytes_per_token / (units * link)


def host_seconds(a_token: float, gpus: int, readers: int, a: Assumptions) -> dict[str, float]:
    """CPU seconds of a core that writes and reads old policies: of one driver for all, or of each rank for its replica.

    Args:
        a_token: To put and to get it.
        gpus: In all.
        readers: Ranks of a replica, each of which reads all of its tokens.
        a: The rest.
    """
    return {"driver": a_token * a.tokens_per_gpu * gpus, "rank": a_token * a.tokens_per_gpu * readers}


def clip_seconds(shape: Shape, a: Assumptions, *, lora: bool = False) -> dict[str, float]:
    """GPU-seconds of a response token without TROLL, by part; its share of the prompt included.

    LoRA spares the gradients of all weights.
    """
    with_prompt = 1 + a.prompt_tokens / a.response_tokens
    context = (a.prompt_tokens + a.response_tokens) / 2
    attention = 4 * shape.layers * shape.heads * shape.head_width * context
    body = with_prompt * (2 * shape.body(shape.active_experts) + attention)
    head = 2 * shape.head
    return {
        "generation": (body + head) / (a.generation_mfu * a.peak_flops),
        "old pass, body": body / (a.mfu * a.peak_flops),
        "old pass, head": head / (a.head_mfu * a.peak_flops),
        "updates, body": (3 - lora + a.recomputed) * body / (a.mfu * a.peak_flops),
        # Forward, and in the backward again, then one product for each gradient.
        "updates, head": (4 - lora) * head / (a.head_mfu * a.peak_flops),
    }


def added_bytes(shape: Shape, a: Assumptions, *, fused: bool) -> dict[str, float]:
    """Bytes of GPU memory moved for a response token by TROLL, on all GPUs that share the vocabulary together.

    Fused, beyond what the clip's head moves. From logits, all that TROLL moves: the clip's own is not taken off.
    """
    # Gathers take a sector of 32 bytes for each token of the support; the rest is a few numbers for each.
    support = a.top_k * (32 + 10 * WORD)
    slices = shape.tensor_parallel
    candidates = slices * BLOCK * a.top_k + shape.vocabulary / BLOCK
    moved = {"capture": CANDIDATE_BYTES * candidates, "updates": 2 * slices * support}
    if not fused:
        moved["capture"] += CAPTURE_BYTES * shape.vocabulary
        moved["updates"] += UPDATE_BYTES * shape.vocabulary
    return moved


def added_seconds(shape: Shape, a: Assumptions, *, fused: bool) -> dict[str, float]:
    """GPU-seconds of those bytes: a roofline."""
    bandwidth = a.kernel_efficiency * a.memory_bandwidth
    return {part: moved / bandwidth for part, moved in added_bytes(shape, a, fused=fused).items()}


def capture_words(top_k: int, processes: int) -> int:
    """Numbers that one process receives for a token when a spread vocabulary is captured, its own included."""
    return processes * (3 * top_k + 2)


def update_words(top_k: int, processes: int, *, entropy: bool = False) -> int:
    """Numbers of the all-reduce for a token of an update."""
    return top_k + (3 if entropy else 2) * processes


def exchange_seconds(shape: Shape, a: Assumptions, processes: int, link: float) -> dict[str, float]:
    """Seconds of a token's exchanges among processes that share the vocabulary, over links of so many bytes/s each.

    `gathered` is what it would take to bring the bf16 logits together in the capture's pass and in each update's, and
    their gradients back.
    """
    away = (processes - 1) / processes
    top_k = int(a.top_k)
    return {
        "capture": WORD * capture_words(top_k, processes) * away / link + a.latency / a.micro_batch,
        "updates": WORD * update_words(top_k, processes) * 2 * away / link + a.latency / a.micro_batch,
        "gathered": 3 * 2 * shape.vocabulary * away / link + 3 * a.latency / a.micro_batch,
    }
