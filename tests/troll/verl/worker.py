"""What tests run in several processes: `run` starts them, and rank 0 leaves what it found."""

import faulthandler
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.fsdp import _init_utils
from torch.multiprocessing import ProcessExitedException, start_processes
from transformers import AttentionInterface
from verl.utils.ulysses import get_ulysses_sequence_parallel_group
from verl.workers.engine.fsdp import transformer_impl

from tests.troll.verl.actor import (
    ACTOR,
    SMALL,
    Actor,
    Sample,
    as_batch,
    captured,
    configuration,
    nested,
    place,
    policy_loss,
    rollout,
    with_scores,
)

#: Settings of the trust region that every number of processes has to train alike.
CASES: dict[str, dict[str, Any]] = {
    "token": {},
    "sequence": {"constraint": "sequence"},
    "gspo": {"ratio_level": "sequence", "loss_agg_mode": "seq-mean-token-mean"},
}

#: Settings of a trust region whose learning rate follows the KL.
KL_TARGET = ("kl_target=0.1",)


def run(world: int, job: Callable[..., Any], out: Path, *arguments: Any) -> Any:
    """Runs a job in so many processes, and returns what rank 0 saved; what a process raises is raised.

    If one is killed by a signal, the error ends with the last lines that each wrote to standard error.
    """
    # All jobs of a test process share one import of verl and Megatron, which takes longer than what they do.
    multiprocessing.set_forkserver_preload([__name__, "tests.troll.verl.megatron_worker"])
    everything = (world, torch.get_num_threads(), get_free_port(), job, out, arguments)
    errors = [_errors(out, rank) for rank in range(world)]
    for file in errors:
        file.touch()
    try:
        start_processes(_process, everything, nprocs=world, start_method="forkserver")
    except ProcessExitedException as error:
        for rank, file in enumerate(errors):
            error.add_note("\n".join([f"rank {rank}:", *file.read_text().splitlines()[-30:]]))
        raise
    return torch.load(out, weights_only=False)


def _process(
    rank: int, world: int, threads: int, port: int, job: Callable[..., Any], out: Path, arguments: Any
) -> None:
    # What a library writes before it aborts is lost in the output of all tests.
    with _errors(out, rank).open("w") as errors:
        os.dup2(errors.fileno(), 2)
    faulthandler.enable()
    os.environ.update(place(rank, world, port))
    # As many as the tests have, whose bits it is compared with.
    torch.set_num_threads(threads)
    found = job(rank, world, *arguments)
    if rank == 0:
        torch.save(found, out)
    dist.barrier()
    dist.destroy_process_group()


def _errors(out: Path, rank: int) -> Path:
    return out.with_suffix(f".{rank}.txt")


def trained(actor: Actor, batch: TensorDict, **options: Any) -> dict[str, Any]:
    scored = actor.score(batch)
    return _found(actor, captured(actor.engine, batch), actor.update(scored, **options))


def _found(actor: Actor, old_policies: Sequence[Tensor], metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "old_policies": list(old_policies),
        "steps": list(actor.steps),
        "metrics": dict(metrics),
        "parameters": actor.parameters(),
        "reads_head": actor.engine.reads_head,
    }


def rates_of(actor: Actor, samples: list[Sample]) -> list[float]:
    """The learning rates that the optimiser used in the updates of two rollouts."""
    rates: list[float] = []
    optimizer = actor.optimizer
    hook = optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    for _ in range(2):
        actor.update(actor.score(as_batch(samples)))
    hook.remove()
    return rates


def two_processes(rank: int, world: int, model: Path, checkpoint: Path) -> dict[str, Any]:
    samples = rollout()[rank::world]
    actor = _actor(model)
    found: dict[str, Any] = {"token": trained(actor, as_batch(samples))}
    found["dynamic"] = trained(actor.reset(), as_batch(samples), use_dynamic_bsz=True, max_token_len_per_gpu=24)
    found["nan"] = left_out(actor.reset(), samples)
    found |= _sequence_parallel(model)
    found["FSDP 1"] = _fsdp1(model, samples)
    actor = _actor(model, *policy_loss(*KL_TARGET))
    found["KL target"] = [None] * world
    dist.all_gather_object(found["KL target"], rates_of(actor, samples))
    found["resumed"] = _interrupted_or_not(actor.reset(), _actor(model, *policy_loss(*KL_TARGET)), samples, checkpoint)
    return found


def _actor(model: Path, *overrides: str) -> Actor:
    return Actor(configuration(model, *policy_loss(*SMALL), "trainer.n_gpus_per_node=2", *overrides))


def _interrupted_or_not(
    actor: Actor, resumed: Actor, samples: list[Sample], checkpoint: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the second of two rollouts comes to: of an actor, and of another that loads the first's checkpoint."""
    actor.update(actor.score(as_batch(samples)))
    actor.engine.save_checkpoint(str(checkpoint), global_step=1)
    resumed.engine.load_checkpoint(str(checkpoint), del_local_after_load=False)
    return trained(actor, as_batch(samples[::-1])), trained(resumed, as_batch(samples[::-1]))


def _fsdp1(model: Path, samples: list[Sample]) -> dict[str, Any]:
    """verl's default strategy, whose head is a part of a flat parameter outside of the forward."""
    overrides = f"{ACTOR}.strategy=fsdp", f"{ACTOR}.fsdp_config.use_orig_params=true"
    # On a CPU, verl names the device by a text, which FSDP 1 does not take; and FSDP 1 sends weights to the others on
    # GPUs only.
    with (
        mock.patch.object(transformer_impl, "get_device_id", lambda: torch.device("cpu")),
        mock.patch.object(_init_utils, "_check_module_states_for_sync_module_states"),
    ):
        return trained(_actor(model, *overrides), as_batch(samples))


def left_out(actor: Actor, samples: list[Sample], value: float = torch.nan) -> dict[str, Any]:
    """An update for which the last process computes what is no number, and one after it."""
    scored, before = actor.score(as_batch(samples)), actor.parameters()
    hook: AbstractContextManager[Any] = nullcontext()
    if dist.get_rank() == dist.get_world_size() - 1:
        hook = actor.final_norm.register_forward_hook(lambda _, __, hidden: hidden + value)
    with hook:
        metrics = actor.update(scored)
    unchanged = all(torch.equal(value, before[name]) for name, value in actor.parameters().items())
    return {"metrics": dict(metrics), "unchanged": unchanged, "later": dict(actor.update(scored))}


def _sequence_parallel(model: Path) -> dict[str, Any]:
    """Ulysses over both processes, which get the same batch, with packs of static sizes."""
    AttentionInterface.register("gathered", gathered_attention)
    actor = _actor(
        model,
        "actor_rollout_ref.model.override_config.attn_implementation=gathered",
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2",
        f"{ACTOR}.fsdp_config.pad_to_length=true",
        f"{ACTOR}.fsdp_config.pad_to_length_bucket=13",
    )
    batch = as_batch(rollout())
    scores = actor.reset(**CASES["sequence"]).infer(batch, calculate_entropy=True)
    # What verl's dispatch does: the first process of a group answers, and all get the same batch.
    answer: list[Any] = [None if scores is None else list(scores["log_probs"].unbind())]
    dist.broadcast_object_list(answer)
    own = TensorDict({"log_probs": nested(answer[0])}, [len(answer[0])])
    policies = captured(actor.engine, batch)
    found = _found(actor, policies, actor.update(with_scores(batch, own)))
    actor.reset(rollout_top_p=0.8).infer(batch, calculate_entropy=True)
    return {"sequence parallel": found, "kept tokens": captured(actor.engine, batch)}


def gathered_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float,
    position_ids: Tensor,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of a process's part of the pack to all of it: verl's Ulysses knows flash attention alone, a GPU's."""
    group = get_ulysses_sequence_parallel_group()
    own, rank = query.shape[2], dist.get_rank(group)
    key, value = (all_gather_tensor_autograd(x.contiguous(), gather_dim=2, group=group) for x in (key, value))
    (positions,) = all_gather_tensor_autograd(position_ids.contiguous(), gather_dim=1, group=group)
    sequence, rows = (positions == 0).cumsum(0), slice(rank * own, (rank + 1) * own)
    sees = (sequence[rows, None] == sequence) & (positions[rows, None] >= positions)
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=sees, scale=scaling)
    return output.transpose(1, 2).contiguous(), None
