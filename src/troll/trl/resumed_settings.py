"""Says in which settings a resumed run differs from the one that wrote its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any

from troll.files import flat, json_text
from troll.trl.config import TrollConfig

#: The settings that a resumed run may change without a word, and all that begin with one of the prefixes: its length,
#: its output, evaluations, where it runs, and what the error about NaN advises.
_MAY_CHANGE = {
    "batch_eval_metrics",
    "debug",
    "disable_tqdm",
    "enable_jit_checkpoint",
    "ignore_data_skip",
    "local_rank",
    "max_grad_norm",
    "max_steps",
    "num_completions_to_print",
    "num_generations_eval",
    "num_train_epochs",
    "output_dir",
    "per_device_eval_batch_size",
    "prediction_loss_only",
    "project",
    "report_to",
    "restore_callback_states_from_checkpoint",
    "resume_from_checkpoint",
    "run_name",
    "skip_memory_metrics",
}
_MAY_CHANGE_PREFIXES = (
    "dataloader_",
    "ddp_",
    "do_",
    "eval_",
    "hub_",
    "include_",
    "log_",
    "logging_",
    "push_to_hub",
    "save_",
    "trackio_",
    "vllm_group_port",
    "vllm_server_",
)

#: The settings that are part of an optimizer's state, which a resumed run takes from its checkpoint. The critic's
#: optimizer gets its rate from the settings.
_OPTIMIZER = {
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "critic_kwargs.weight_decay",
}


def may_change(name: str) -> bool:
    """Whether a resumed run may change a setting without a word."""
    return name in _MAY_CHANGE or name.startswith(_MAY_CHANGE_PREFIXES)


def settings(args: TrollConfig) -> dict[str, Any]:
    """The settings that decide what a run computes, by name, as JSON holds them."""
    decide = {name: value for name, value in flat(args.to_dict()).items() if not may_change(name)}
    text = json_text(decide, default=_described)
    return dict(json.loads(text))


def changed_settings(there: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Settings that differ from a checkpoint's, each with both values, in one line; None if none does.

    Args:
        there: The `settings` of the run that wrote the checkpoint.
        here: Those of this run.
    """
    names = [name for name in {**here, **there} if there.get(name) != here.get(name)]
    if not names:
        return None
    changes = [f"{name} was {json.dumps(there.get(name))} and is {json.dumps(here.get(name))}" for name in names]
    kept = [name for name in names if name in _OPTIMIZER]
    stays = f". The optimizer keeps the {' and the '.join(kept)} of the checkpoint" if kept else ""
    return ", ".join(changes) + stays


def _described(value: Any) -> Any:
    """What a value that JSON lacks is compared by."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    text = repr(value)  # of a dtype, for example; not with the address of an object, which every run has anew
    return type(value).__name__ if " at 0x" in text else text
