"""The memory of a run's phases on one GPU, and the settings to change if it is not enough."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from trl import ModelConfig, get_peft_config

from troll.runs import memory
from troll.runs.memory import Micro
from troll.runs.without_data import Network

#: The phases of a run: completions are generated, then scored by the reward model and the policy, then trained on.
PHASES = ("generate", "score", "update")

#: Bytes of an optimiser's state for each trained number, if they do not follow the weights' dtype. For all others, two
#: numbers count, as in AdamW: no usual optimiser keeps more.
_OPTIMISER_BYTES = {
    "sgd": 0.0,
    "adamw_torch_4bit": 1.0,
    "lion_8bit": 1.0,
    "paged_lion_8bit": 1.0,
    "rmsprop_bnb_8bit": 1.0,
    "adamw_torch_8bit": 2.0,
    "adamw_8bit": 2.0,
    "adamw_bnb_8bit": 2.0,
    "paged_adamw_8bit": 2.0,
}
_ONE_NUMBER = {"lion_32bit", "paged_lion_32bit", "rmsprop", "rmsprop_bnb", "rmsprop_bnb_32bit", "adagrad"}

#: The steps in which vLLM's share is lowered.
_SHARE_STEP = 0.05

#: A change of settings, as fields of the command line.
Fields = dict[str, int | float | bool]


@dataclass(frozen=True)
class Settings:
    """The settings on which memory depends, for one GPU.

    Attributes:
        policy: The model that is trained.
        critic: The critic's model; None without a critic.
        reference: Whether a frozen copy of the policy is kept.
        kl: Whether completions are scored by a reference: that copy, or the policy without its adapter.
        reward_model: The reward model; None without one.
        autocast: The dtype in which matrices are multiplied; None for the weights' dtype.
        optimiser: transformers' name of the optimiser.
        rows: The completions of a micro-batch.
        accumulation: The micro-batches of an update.
        rollout: The completions of a rollout.
        updates: The updates of a rollout.
        prompt: The tokens of a prompt, at most.
        completion: The tokens of a completion, at most.
        at_once: The completions that transformers generates in one call, at most.
        top_k: K of the old policies; 0 if the surrogate reads none.
        vllm: The share of the GPU that vLLM takes, 0 if it runs elsewhere; None if transformers generates.
        sleeps: Whether vLLM gives its memory back for the update.
        sharded_over: The GPUs that share weights, gradients and the optimiser's state.
        on_gpu: Whether the run is on a GPU.
    """

    policy: Network
    critic: Network | None
    reference: bool
    kl: bool
    reward_model: Network | None
    autocast: torch.dtype | None
    optimiser: str
    rows: int
    accumulation: int
    rollout: int
    updates: int
    prompt: int
    completion: int
    at_once: int
    top_k: int
    vllm: float | None
    sleeps: bool
    sharded_over: int
    on_gpu: bool


def rows_of(settings: Settings, total_memory: float) -> dict[str, tuple[float, ...]]:
    """The bytes on one GPU, by row of the table and by phase (`PHASES`).

    Args:
        settings: The settings of the run.
        total_memory: The memory of the GPU in bytes, of which vLLM takes a share.
    """
    s, shards = settings, settings.sharded_over
    held = memory.parameters(s.policy)
    rows: dict[str, tuple[float, ...]] = {
        "weights": _always(held.weights / shards),
        "gradients": (0, 0, held.trained / shards),
        "optimiser": _always(optimiser_bytes(s.optimiser, held) / shards),
    }
    if s.critic:
        critic = memory.parameters(s.critic)
        kept = critic.weights + optimiser_bytes("adamw_torch", critic)
        rows["critic"] = (kept / shards, kept / shards, (kept + critic.trained) / shards)
    if s.reference:
        rows["reference model"] = _always(held.weights / shards)
    if s.reward_model:
        rows["reward model"] = _always(memory.parameters(s.reward_model).weights / shards)
    rows["rollout and old policies"] = _always(s.rollout * rollout_bytes(s.prompt, s.completion, s.top_k))
    computing = _sharded(s, s.policy)
    if shards > 1:  # two layers ahead, the weights in no layer, and their gradients
        gathered = held.gathered * (s.autocast or s.policy.dtype).itemsize
        rows["gathered layers"] = (gathered, gathered, 2 * gathered)
    micro = Micro(s.rows, s.prompt, s.completion, s.autocast, s.on_gpu)
    generation, calls = memory.Generation(0, 0), Micro(s.at_once, s.prompt, s.completion, s.autocast, s.on_gpu)
    if s.vllm is None:
        generation = memory.generation(computing, calls)
    scored = memory.capture(computing, micro, s.top_k, s.kl)
    if s.reward_model:  # with TRL, it reads the whole rollout in one call
        scored = max(scored, memory.forward(s.reward_model, s.rollout, s.prompt + s.completion))
    update = memory.update(computing, micro, s.top_k, accumulates=shards > 1 or s.accumulation > 1)
    activations = update.activations
    if s.critic:
        activations = max(activations, memory.update(_sharded(s, s.critic), micro, 0, True, False).activations)
    rows["activations"] = (generation.activations, scored, activations)
    rows["LM head's tiles"] = (0, 0, update.head)
    if s.vllm is not None:
        share = s.vllm * total_memory
        rows["vLLM's share"] = (share, 0 if s.sleeps else share, 0 if s.sleeps else share)
    else:
        rows["keys and values"] = (generation.cache, 0, 0)
    return rows


def _always(size: float) -> tuple[float, ...]:
    return (size,) * len(PHASES)


def _sharded(settings: Settings, network: Network) -> Network:
    """A network as FSDP computes with it: layers are gathered in the dtype of their products."""
    if settings.sharded_over == 1 or settings.autocast is None or network.dtype == settings.autocast:
        return network
    return _in_dtype(network, settings.autocast)


@functools.cache  # measurements are kept by the network's identity
def _in_dtype(network: Network, dtype: torch.dtype) -> Network:
    return replace(network, dtype=dtype)


def optimiser_bytes(name: str, trained: memory.Parameters) -> float:
    """The bytes of the optimiser's state.

    Args:
        name: transformers' name of the optimiser, as in `optim`.
        trained: The parameters of the network.
    """
    if name == "adafactor":
        return 4.0 * trained.factored
    if name in _ONE_NUMBER:
        return float(trained.trained)
    return _OPTIMISER_BYTES.get(name, 2 * trained.trained / max(1, trained.trained_numbers)) * trained.trained_numbers


def rollout_bytes(prompt: int, completion: int, top_k: int) -> int:
    """The bytes of one completion that waits for its updates: ids, masks, log-probabilities, and the packed old policy.

    Args:
        prompt: The tokens of its prompt.
        completion: The tokens of the completion.
        top_k: K, assumed to be kept at every token; 0 without old policies.
    """
    tokens = 16 * (prompt + completion) + 12 * completion
    return tokens + completion * (12 + 8 * top_k) * (top_k > 0)


def phases(settings: Settings, total_memory: float) -> tuple[float, ...]:
    """The bytes of each phase; see `rows_of`."""
    return totals_of(rows_of(settings, total_memory))


def totals_of(rows: dict[str, tuple[float, ...]]) -> tuple[float, ...]:
    """The sum of the rows in each phase."""
    return tuple(sum(column) for column in zip(*rows.values(), strict=True))


def changes(settings: Settings, total_memory: float) -> tuple[Fields, Settings]:
    """The settings to change so that a run fits, the least harmful first.

    Args:
        settings: The settings of a run that does not fit.
        total_memory: The memory of the GPU in bytes.

    Returns:
        The fields to change, and the settings with these changes, which still do not fit if nothing more can be
        changed.
    """
    fields: Fields = {}
    for move in (_chunks, _sleep, _share, _checkpointing, _rows, _updates, _lora):
        sizes = phases(settings, total_memory)
        if max(sizes) <= total_memory:
            break
        for phase in (phase for phase, size in zip(PHASES, sizes, strict=True) if size > total_memory):
            if (moved := move(settings, total_memory, phase)) is not None:
                fields, settings = {**fields, **moved[0]}, moved[1]
                break
    return fields, settings


_Move = tuple[Fields, Settings] | None


def _chunks(s: Settings, total: float, phase: str) -> _Move:
    if s.vllm is not None or phase != "generate" or s.at_once == 1:
        return None
    # Memory is linear in the rows; the guess is checked.
    one, two = (phases(replace(s, at_once=rows), total)[0] for rows in (1, 2))
    most = int(max(1, min(s.at_once // 2, 1 + (total - one) / (two - one))))
    rows = 1 << (most.bit_length() - 1)
    while rows > 1 and phases(replace(s, at_once=rows), total)[0] > total:
        rows //= 2
    return {"generation_chunk_size": rows}, replace(s, at_once=rows)


def _sleep(s: Settings, total: float, phase: str) -> _Move:
    if not s.vllm or s.sleeps or phase == "generate":
        return None
    return {"vllm_enable_sleep_mode": True}, replace(s, sleeps=True)


def _share(s: Settings, total: float, phase: str) -> _Move:
    if not s.vllm or (s.sleeps and phase != "generate"):
        return None
    others = phases(replace(s, vllm=0.0), total)[PHASES.index(phase)]
    share = round(int((total - others) / total / _SHARE_STEP) * _SHARE_STEP, 2)
    # vLLM needs its own weights, in half precision, and at least one sequence.
    sequence = Micro(1, s.prompt, s.completion, s.autocast, s.on_gpu)
    least = 2 * memory.parameters(s.policy).numbers + memory.generation(s.policy, sequence).cache
    if share * total < least:
        return None
    return {"vllm_gpu_memory_utilization": share}, replace(s, vllm=share)


def _checkpointing(s: Settings, total: float, phase: str) -> _Move:
    if phase != "update" or s.policy.checkpointing:
        return None
    critic = s.critic and replace(s.critic, checkpointing=True)
    return {"gradient_checkpointing": True}, replace(s, policy=replace(s.policy, checkpointing=True), critic=critic)


def _rows(s: Settings, total: float, phase: str) -> _Move:
    if phase == "generate":
        return None
    moved, at = s, PHASES.index(phase)
    while moved.rows % 2 == 0 and phases(moved, total)[at] > total:
        moved = replace(moved, rows=moved.rows // 2, accumulation=moved.accumulation * 2)
    if phases(moved, total)[at] >= phases(s, total)[at]:  # something else is the largest
        return None
    return {"per_device_train_batch_size": moved.rows, "gradient_accumulation_steps": moved.accumulation}, moved


def _updates(s: Settings, total: float, phase: str) -> _Move:
    """A reward model reads a whole rollout in one call."""
    if phase != "score" or s.reward_model is None:
        return None
    moved = s
    while moved.updates > 2 and moved.updates % 2 == 0 and phases(moved, total)[1] > total:
        moved = replace(moved, updates=moved.updates // 2, rollout=moved.rollout // 2)
    return None if moved is s else ({"updates_per_rollout": moved.updates}, moved)


def _lora(s: Settings, total: float, phase: str) -> _Move:
    if s.policy.peft is not None:
        return None
    peft = get_peft_config(ModelConfig(use_peft=True))
    critic = s.critic and replace(s.critic, peft=peft)
    return {"use_peft": True}, replace(s, policy=replace(s.policy, peft=peft), critic=critic, reference=False)
