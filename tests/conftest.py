"""What every test shares."""

import gc
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


@pytest.hookimpl(tryfirst=True)  # before the fixtures, which start sandboxes
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests of the sandbox without bubblewrap. In CI they fail: nobody would see that they have not run."""
    if item.get_closest_marker("needs_bubblewrap"):
        from troll_sandbox.errors import SandboxError  # here, since the package cannot be imported on Windows
        from troll_sandbox.installed import find_bubblewrap

        try:
            find_bubblewrap()
        except SandboxError as error:
            if os.environ.get("CI"):
                pytest.fail(str(error), pytrace=False)
            pytest.skip(str(error))


@pytest.fixture(autouse=True, scope="session")
def few_threads() -> Iterator[None]:
    """Tensors and models are tiny: on a busy machine a second thread makes the tests several times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("TROLL_TEST_THREADS", "1")))
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def collect_only_what_tests_make() -> Iterator[None]:
    """Every training collects garbage, which takes half a second where all that was imported is looked through."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
