"""What every test shares."""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.tolerance import MARGIN, tighten

# No network, and no warning of the tokenizers in every process.
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

# Kernels decide when they are defined whether they are compiled or interpreted, so this stands before any import.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if MARGIN != 1:
    tighten(MARGIN)


@pytest.fixture(autouse=True, scope="session")
def few_threads() -> Iterator[None]:
    """Tensors and models are tiny: on a busy machine a second thread makes the tests several times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("TROLL_TEST_THREADS", "1")))
    yield
    torch.set_num_threads(threads)
