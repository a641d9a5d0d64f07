"""A model of the cost of a GRPO step on many GPUs, from shapes of models and named assumptions; it measures nothing.

One rollout is generated, scored once by the old-policy pass, and used for its updates, every token in one of them.
Times are GPU-seconds and sizes are bytes of one response token, unless a name says otherwise.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

#: The bytes of a number in a record or an exchange: float32 or int32.
WORD = 4


@dataclass(frozen=True)
class Moved:
    """Bytes of GPU memory that a way to read a policy moves, as `python -m benchmarks count` counts them.

    Attributes:
        capture: The bytes for each logit in the old-policy pass.
        update: The bytes for each logit in an update, forward and backward.
        capture_token: The bytes for each token and slice of the vocabulary in the old-policy pass: candidates of the
            top K.
        update_token: The bytes for each token and slice of the vocabulary in an update: the support.
    """

    capture: float
    update: float
    capture_token: float = 0
    update_token: float = 0


#: What TROLL moves for bf16: of logits, with an index that says which rows are read, and of an LM head. For K = 64.
TORCH, TRITON, FUSED = "logits, torch", "logits, Triton", "fused head, Triton"
MOVED = {
    TORCH: Moved(39.4, 98.0, 576_697, 27_428),
    TRITON: Moved(2.3, 6.0, 20_380, 11_004),
    FUSED: Moved(4.3, 14.0, 22_942, 13_129),
}
#: The bytes that verl's log-probabilities move, and need not move where TROLL has read them. They are counted for
#: verl's fused kernels in torch, with the entropy that these always compute, and without flash-attn. For the others,
#: the source says: flash-attn's cross-entropy reads logits, and reads and overwrites them in the backward pass; verl's
#: Triton kernels keep logits in registers, and write their gradient once and read it twice.
VERL_LOGITS, VERL_TORCH, VERL_TRITON = "verl, logits", "verl, fused in torch", "verl, fused in Triton"
VERL_MOVED = {VERL_LOGITS: Moved(2, 6), VERL_TORCH: Moved(48, 114), VERL_TRITON: Moved(0, 6)}


@dataclass(frozen=True)
class Shape:
    """The shape of a decoder-only transformer, and how it is usually parallelised.

    Attributes:
        name: The name of the model.
        layers: The number of transformer blocks.
        width: The width of the hidden states.
        heads: The number of query heads.
        kv_heads: The number of key and value heads.
        head_width: The width of a query, key or value head.
        feed_forward: The width of an expert's three matrices.
        experts: The experts of every layer; 1 for a dense model.
        active_experts: The experts that read one token.
        vocabulary: The number of tokens in the vocabulary.
        tied: Whether the LM head is the embedding.
        tensor_parallel: The processes that share a matrix.
        pipeline_parallel: The stages of the pipeline.
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
    tied: bool
    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    def body(self, experts: int) -> int:
        """The parameters of all layers, with this many experts counted."""
        attention = 2 * self.width * self.head_width * (self.heads + self.kv_heads)
        router = self.width * self.experts if self.experts > 1 else 0
        return self.layers * (attention + router + 3 * self.width * self.feed_forward * experts)

    @property
    def head(self) -> int:
        """The parameters of the LM head."""
        return self.width * self.vocabulary

    @property
    def parameters(self) -> int:
        """All parameters, embeddings included."""
        return self.body(self.experts) + (1 if self.tied else 2) * self.head

    @property
    def readers(self) -> int:
        """The ranks that each fetch the same part of a batch: in verl, all of one data-parallel replica."""
        return self.tensor_parallel * self.pipeline_parallel


#: The published configurations; parallel sizes are assumed. The last but one has a shared expert, counted as one more,
#: and linear attention in three of four layers, counted as full.
SHAPES = (
    Shape("Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 1, 1, 151_936, True),
    Shape("Qwen3-1.7B", 28, 2048, 16, 8, 128, 6144, 1, 1, 151_936, True),
    Shape("Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 1, 1, 151_936, True),
    Shape("Qwen3-8B", 36, 4096, 32, 8, 128, 12_288, 1, 1, 151_936, False),
    Shape("Qwen3-32B", 64, 5120, 64, 8, 128, 25_600, 1, 1, 151_936, False, tensor_parallel=8),
    Shape("Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 768, 128, 8, 151_936, False, tensor_parallel=4),
    Shape("Qwen3.5-35B-A3B", 40, 2048, 16, 2, 256, 512, 257, 9, 248_320, False, tensor_parallel=4),
    Shape("Qwen3-235B-A22B", 94, 4096, 64, 4, 128, 1536, 128, 8, 151_936, False, 4, 8),
)


def given(value: float, source: str) -> Any:
    """A field with its value and the source of it."""
    return dataclasses.field(default=value, metadata={"source": source})


@dataclass(frozen=True)
class Assumptions:
    """Everything that is not the model's shape; `python -m benchmarks simulate` prints each with its source."""

    peak_flops: float = given(989e12, "H100 SXM data sheet, bf16, dense")
    memory_bandwidth: float = given(3.35e12, "H100 SXM data sheet, bytes/s")
    nvlink: float = given(450e9, "H100 SXM data sheet, bytes/s, one direction")
    node_link: float = given(50e9, "400 Gbit/s for host traffic of a node, bytes/s: assumed")
    gpus_per_node: float = given(8, "assumed")
    mfu: float = given(0.4, "share of peak FLOP/s in the transformer's passes: assumed")
    head_mfu: float = given(0.6, "share of it in the LM head's large products: assumed")
    generation_mfu: float = given(0.1, "share of it while generating, where memory limits: assumed")
    kernel_efficiency: float = given(0.5, "share of memory bandwidth in what TROLL and verl do with logits: assumed")
    latency: float = given(20e-6, "of a collective, seconds: assumed")
    recomputed: float = given(1, "forward passes of the body made again in the backward: assumed")
    sequences_per_gpu: float = given(32, "weak scaling: assumed")
    prompt_tokens: float = given(512, "assumed")
    response_tokens: float = given(4096, "assumed")
    top_k: float = given(64, "troll's default")
    kept: float = given(64, "slots of a token: top_k, the most; the metric trust_region/support_size of a run")
    record_bytes: float = given(40, "of a sequence: troll.verl.records")
    micro_batch: float = given(16_384, "tokens of a pass on a replica, a capture's too: assumed")
    put_record: float = given(40e-6, "CPU seconds of a storage unit: `python -m benchmarks transfer`, a loaded machine")
    put_byte: float = given(0.45e-9, "likewise")
    get_record: float = given(40e-6, "likewise")
    get_byte: float = given(0.17e-9, "likewise")
    read_record: float = given(40e-6, "CPU seconds of a process that reads: likewise")
    read_byte: float = given(2.3e-9, "likewise")

    @property
    def tokens_per_gpu(self) -> float:
        """Response tokens of a rollout."""
        return self.sequences_per_gpu * self.response_tokens


def policy_bytes(a: Assumptions) -> float:
    """Bytes of a response token's old policy in its record."""
    return WORD * (2 * a.kept + 3) + a.record_bytes / a.response_tokens


def clip_seconds(shape: Shape, a: Assumptions, *, fused: bool) -> dict[str, float]:
    """GPU-seconds of a response token without TROLL, by part, with prompts, without what log-probabilities move.

    A fused head computes its logits again in the backward pass.
    """
    with_prompt = 1 + a.prompt_tokens / a.response_tokens
    context = (a.prompt_tokens + a.response_tokens) / 2
    attention = 4 * shape.layers * shape.heads * shape.head_width * context
    body = with_prompt * (2 * shape.body(shape.active_experts) + attention)
    head = 2 * shape.head
    return {
        "generation": (body + head) / (a.generation_mfu * a.peak_flops),
        "old pass": body / (a.mfu * a.peak_flops) + head / (a.head_mfu * a.peak_flops),
        "updates": (3 + a.recomputed) * body / (a.mfu * a.peak_flops)
        + (3 + fused) * head / (a.head_mfu * a.peak_flops),
    }


def moved_seconds(shape: Shape, moved: Moved, a: Assumptions) -> float:
    """GPU-seconds of moving bytes, over all GPUs that share the vocabulary, by a roofline."""
    tokens = shape.tensor_parallel * (moved.capture_token + moved.update_token)
    size = shape.vocabulary * (moved.capture + moved.update) + tokens
    return size / (a.kernel_efficiency * a.memory_bandwidth)


def exchange_seconds(shape: Shape, a: Assumptions) -> float:
    """GPU-seconds of a capture's and an update's exchanges over NVLink, over all GPUs that share the vocabulary."""
    processes, top_k = shape.tensor_parallel, a.top_k
    if processes == 1:
        return 0.0
    away = (processes - 1) / processes
    # 3K + 2 numbers from each process in a capture; an all-reduce of K and two of each process in an update.
    words = processes * (3 * top_k + 2) + 2 * (top_k + 2 * processes)
    return processes * (WORD * words * away / a.nvlink + 2 * a.latency / a.micro_batch)


def step_seconds(shape: Shape, a: Assumptions) -> float:
    """Seconds of a step with verl's fused head, at any number of GPUs."""
    return sum(clip_seconds(shape, a, fused=True).values()) * a.tokens_per_gpu


@dataclass(frozen=True)
class Route:
    """How old policies travel through verl's transfer queue.

    Attributes:
        readers: The ranks of a replica that fetch its old policies; 0 if they never leave the ranks that captured them.
        units: The number of storage units.
        passes: How often each rank reads them in a step: in the actor's update, and in passes that do not use them.
    """

    readers: int
    units: int
    passes: int = 1


def queue_seconds(route: Route, shape: Shape, gpus: int, a: Assumptions) -> dict[str, float]:
    """Seconds of a step in which old policies occupy a storage unit's CPU, its node's link, and a reader's CPU."""
    if not route.readers:
        return {"unit": 0.0, "link": 0.0, "reader": 0.0}
    record = policy_bytes(a) * a.response_tokens
    sequences = a.sequences_per_gpu * gpus
    gets = route.readers * route.passes
    nodes = min(route.units, gpus / a.gpus_per_node)
    unit = a.put_record + a.put_byte * record + gets * (a.get_record + a.get_byte * record)
    reader = route.passes * a.sequences_per_gpu * shape.readers * (a.read_record + a.read_byte * record)
    return {
        "unit": sequences * unit / route.units,
        "link": sequences * record * (1 + gets) / (nodes * a.node_link),
        "reader": reader,
    }
