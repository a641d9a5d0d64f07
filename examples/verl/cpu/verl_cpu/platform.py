"""verl's platform for machines without an accelerator: torch on the CPU, and gloo between processes."""

# ruff: noqa: D102 (PlatformBase says what each is for)

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _device_module() -> ModuleType:
    """Returns `torch.cpu` with those functions of `torch.cuda` that verl calls and `torch.cpu` lacks."""
    module = ModuleType("verl_cpu.device")
    module.__dict__.update({name: getattr(torch.cpu, name) for name in torch.cpu.__all__})
    module.__dict__.update(
        empty_cache=lambda: None,
        get_device_name=lambda: "CPU",
        get_rng_state=torch.get_rng_state,
        mem_get_info=_memory,
        set_rng_state=torch.set_rng_state,
        set_device=lambda device: None,
        # The CPU has no allocator of torch's that counts.
        **dict.fromkeys(
            ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), lambda: 0
        ),
    )
    return module


def _memory() -> tuple[int, int]:
    """Returns the machine's free and total memory in bytes."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    """A CPU that stands in for a GPU: one worker process is one device."""

    def __init__(self) -> None:
        self._device_module = _device_module()

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return self._device_module

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        # verl hands it to `Tensor.to`, for which an integer means a GPU.
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        # verl counts this resource before it starts; `ray_kwargs.ray_init.num_gpus` says how many there are.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
