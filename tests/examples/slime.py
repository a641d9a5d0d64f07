"""A stand-in for slime: its calls, in its order and with its arguments, on a network that is a table.

After THUDM/slime at 624b824a (examples/slime/README.md says from which files). There is no Megatron here: a pipeline of
one stage, no context parallelism, and a vocabulary that may be spread over processes.
"""

import importlib.util
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from troll.testing import Case, Update, check_adapter

EXAMPLE = Path(__file__).parents[2] / "examples" / "slime" / "troll_slime.py"

Batch = dict[str, Any]


def make_mpu(group: dist.ProcessGroup | None = None) -> Any:
    """What the example asks of `megatron.core.mpu`."""
    return Namespace(
        get_tensor_model_parallel_world_size=lambda: 1 if group is None else group.size(),
        get_tensor_model_parallel_group=lambda: group,
        is_pipeline_last_stage=lambda ignore_virtual=False: True,
    )


def load_example(mpu: Any) -> Any:
    """The example as slime's `load_function` imports it, where Megatron is."""
    core, module_name = ModuleType("megatron.core"), "troll_slime"
    core.mpu = mpu  # type: ignore[attr-defined]
    spec = importlib.util.spec_from_file_location(module_name, EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    stand_ins = {"megatron": ModuleType("megatron"), "megatron.core": core, module_name: module}
    with mock.patch.dict(sys.modules, stand_ins):
        spec.loader.exec_module(module)
    return module


def make_args(case: Case | None = None, **changes: Any) -> Namespace:
    """slime's arguments, where they matter here, with their defaults; and those of a case."""
    names = ["allgather_cp", "calculate_per_token_loss", "get_mismatch_metrics", "recompute_loss_function"]
    names += ["use_kl_loss", "use_opsm", "use_rollout_entropy", "use_rollout_logprobs", "use_tis", "use_unbiased_kl"]
    args: dict[str, Any] = dict.fromkeys(names, False)
    args |= {"advantage_estimator": "grpo", "context_parallel_size": 1, "data_pad_size_multiplier": 8}
    args |= {"custom_pg_loss_reducer_function_path": None, "custom_tis_function_path": None}
    args |= {"entropy_coef": 0.0, "kl_loss_coef": 0.0, "kl_loss_type": "k1", "tis_clip": 2.0, "tis_clip_low": 0}
    args |= {"rollout_temperature": 1.0, "rollout_top_p": 1.0, "use_dynamic_batch_size": True}
    if case is not None:
        args |= {
            "rollout_temperature": case.temperature,
            "troll_kl_bound": case.kl_bound,
            "troll_regression_weight": case.regression_weight,
            "troll_top_k": case.top_k,
            "troll_mass_threshold": case.mass_threshold,
        }
    return Namespace(**(args | changes))


class Network(nn.Module):
    """The logits that follow token a are row a of a table, of which a process holds some columns."""

    def __init__(self, table: Tensor, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(self.own(table))

    def own(self, table: Tensor) -> Tensor:
        return table.clone() if self.group is None else table.chunk(self.group.size(), -1)[self.group.rank()].clone()

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        return self.weight[input_ids]


class DataIterator:
    def __init__(self, rollout_data: Batch, micro_batch_indices: Sequence[Sequence[int]]) -> None:
        self.rollout_data, self.micro_batch_indices, self.offset = rollout_data, micro_batch_indices, 0

    def get_next(self, keys: Sequence[str]) -> Batch:
        indices = self.micro_batch_indices[self.offset]
        self.offset += 1
        found = {key: self.rollout_data.get(key) for key in keys}
        return {key: None if values is None else [values[i] for i in indices] for key, values in found.items()}

    def reset(self) -> None:
        self.offset = 0


def get_batch(data_iterator: DataIterator, keys: Sequence[str], pad_multiplier: int) -> Batch:
    """A packed micro-batch, padded at its end with token 0."""
    batch = data_iterator.get_next(keys)
    batch["unconcat_tokens"] = batch["tokens"]
    tokens = torch.cat(batch["tokens"])
    pad = -len(tokens) % pad_multiplier
    lengths = zip(batch["loss_masks"], batch["total_lengths"], batch["response_lengths"], strict=True)
    masks = [nn.functional.pad(mask, (total - response - 1, 1)) for mask, total, response in lengths]
    batch["tokens"] = nn.functional.pad(tokens, (0, pad)).unsqueeze(0)
    batch["full_loss_masks"] = nn.functional.pad(torch.cat(masks), (0, pad)).unsqueeze(0)
    batch["packed_seq_params"] = None
    return batch


def forward(model: Network, batch: Batch) -> Tensor:
    unused = dict.fromkeys(("position_ids", "attention_mask", "labels"))
    names = {"input_ids": "tokens", "packed_seq_params": "packed_seq_params", "loss_mask": "full_loss_masks"}
    return model(**unused, **{name: batch[ours] for name, ours in names.items()})


def get_log_probs(logits: Tensor, group: dist.ProcessGroup | None, args: Namespace, batch: Batch) -> list[Tensor]:
    whole = [torch.empty_like(logits) for _ in range(1 if group is None else group.size())]
    if group is None:
        whole = [logits]
    else:
        dist.all_gather(whole, logits.contiguous(), group=group)
    log_probs = (torch.cat(whole, -1)[0] / args.rollout_temperature).log_softmax(-1)
    found, end = [], 0
    for tokens, total, response in zip(
        batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"], strict=True
    ):
        end += total
        rows = log_probs[end - response - 1 : end - 1]
        found.append(rows.gather(-1, tokens[-response:].unsqueeze(-1)).squeeze(-1))
    return found


@torch.no_grad()
def forward_only(
    args: Namespace,
    model: Sequence[Network],
    data_iterator: Sequence[DataIterator],
    num_microbatches: Sequence[int],
    before_log_prob: Callable[..., None],
    store_prefix: str = "",
) -> dict[str, list[Tensor]]:
    """The pass that computes log-probabilities, with the hook of `--custom-megatron-before-log-prob-hook-path`."""
    for iterator in data_iterator:
        iterator.reset()
    for module in model:
        module.eval()
    before_log_prob(args, model, store_prefix)
    values: list[Tensor] = []
    keys = ["tokens", "loss_masks", "multimodal_train_inputs", "total_lengths", "response_lengths"]
    for _ in range(sum(num_microbatches)):
        batch = get_batch(data_iterator[0], keys, args.data_pad_size_multiplier)
        values += get_log_probs(forward(model[-1], batch), model[-1].group, args, batch)
    for module in model:
        module.train()
    numbers = [number for numbers in data_iterator[0].micro_batch_indices for number in numbers]
    in_order = dict(zip(numbers, values, strict=True))
    return {f"{store_prefix}log_probs": [in_order[number] for number in sorted(in_order)]}


def get_sum_of_sample_mean(batch: Batch, calculate_per_token_loss: bool) -> Callable[[Tensor], Tensor]:
    def reduce(x: Tensor) -> Tensor:
        parts = zip(x.split(batch["response_lengths"]), batch["loss_masks"], batch["rollout_mask_sums"], strict=True)
        divisors = [
            ((x_i * mask).sum(), 1 if calculate_per_token_loss else total.clamp(min=1)) for x_i, mask, total in parts
        ]
        return torch.stack([part / divisor for part, divisor in divisors]).sum()

    return reduce


def loss_function(
    custom_loss_function: Callable[..., tuple[Tensor, dict[str, Tensor]]],
    args: Namespace,
    batch: Batch,
    num_microbatches: int,
    step_global_batch_size: int,
    logits: Tensor,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    num_tokens = torch.stack([mask.sum().clamp(min=1) for mask in batch["loss_masks"]]).sum()
    sum_of_sample_mean = get_sum_of_sample_mean(batch, args.calculate_per_token_loss)
    loss, log = custom_loss_function(args, batch, logits, sum_of_sample_mean)
    if not args.calculate_per_token_loss:
        loss = loss * num_microbatches / step_global_batch_size
    values = torch.tensor([num_tokens if args.calculate_per_token_loss else 0, *log.values()])
    return loss, num_tokens if args.calculate_per_token_loss else torch.tensor(1), {"keys": list(log), "values": values}


#: What an update's micro-batch has; nothing can be added to it.
TRAINING_KEYS = ["tokens", "multimodal_train_inputs", "packed_seq_params", "total_lengths", "response_lengths"]
TRAINING_KEYS += ["loss_masks", "log_probs", "ref_log_probs", "values", "advantages", "returns", "rollout_log_probs"]
TRAINING_KEYS += ["teacher_log_probs", "rollout_mask_sums"]


def train_one_step(
    args: Namespace,
    data_iterator: Sequence[DataIterator],
    model: Sequence[Network],
    num_microbatches: int,
    step_global_batch_size: int,
    custom_loss_function: Callable[..., tuple[Tensor, dict[str, Tensor]]],
) -> dict[str, float]:
    """Its gradient is left in the model; the metrics are those that slime reports."""
    model[-1].zero_grad()
    values, num_tokens, keys = torch.zeros(()), torch.zeros(()), []
    for _ in range(num_microbatches):
        batch = get_batch(data_iterator[0], TRAINING_KEYS, args.data_pad_size_multiplier)
        loss_of = partial(loss_function, custom_loss_function, args, batch, num_microbatches, step_global_batch_size)
        loss, count, log = loss_of(forward(model[-1], batch))
        # As Megatron's schedule: a mean over micro-batches, or, by token, a sum that is divided at the end.
        (loss if args.calculate_per_token_loss else loss / num_microbatches).backward()
        keys, values, num_tokens = log["keys"], values + log["values"], num_tokens + count
    if args.calculate_per_token_loss:
        assert model[-1].weight.grad is not None
        model[-1].weight.grad /= num_tokens
    divisor = float(values[0]) if args.calculate_per_token_loss else step_global_batch_size
    return {key: float(value) / divisor for key, value in zip(keys, values[1:], strict=True)}


def rollout_data_of(case: Case) -> Batch:
    masks = [sample.counts.int() for sample in case.samples]
    return {
        "tokens": [sample.token_ids for sample in case.samples],
        "total_lengths": [len(sample.token_ids) for sample in case.samples],
        "response_lengths": [len(sample.response) for sample in case.samples],
        "loss_masks": masks,
        "rollout_mask_sums": torch.stack([mask.sum() for mask in masks]).float(),
        "advantages": [torch.full((len(sample.response),), sample.advantage) for sample in case.samples],
    }


def run(
    case: Case, example: Any, group: dist.ProcessGroup | None = None, data: Batch | None = None, **changes: Any
) -> tuple[dict[str, float], Network]:
    """A rollout's pass, and one update; the metrics that slime would log, and the network with its gradient."""
    args, data = make_args(case, **changes), rollout_data_of(case) | (data or {})
    iterator, network = [DataIterator(data, case.micro_batches)], Network(case.old_table, group)
    counts = [len(case.micro_batches)]
    data |= forward_only(args, [network], iterator, counts, example.before_log_prob)
    with torch.no_grad():
        network.weight.copy_(network.own(case.new_table))
    iterator[0].reset()
    metrics = train_one_step(args, iterator, [network], counts[0], len(case.samples), example.loss_function)
    return metrics, network


def adapter(case: Case, example: Any, group: dist.ProcessGroup | None = None, **changes: Any) -> Update:
    metrics, network = run(case, example, group, **changes)
    gradient = network.weight.grad
    assert gradient is not None
    if group is not None:
        parts = [torch.empty_like(gradient) for _ in range(group.size())]
        dist.all_gather(parts, gradient, group=group)
        gradient = torch.cat(parts, -1)
    named = {name.removeprefix("troll_"): value for name, value in metrics.items()}
    return Update(metrics["loss"], gradient, named)


def check_in_processes(rank: int, world: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    group = dist.group.WORLD
    example = load_example(make_mpu(group))
    check_adapter(lambda case: adapter(case, example, group), layouts=["packed"])
    dist.destroy_process_group()
