"""What every test shares."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Kernels decide when they are defined whether they are compiled or interpreted, so this stands before any import.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tensors and models are tiny: on a busy machine a second thread makes the tests several times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
