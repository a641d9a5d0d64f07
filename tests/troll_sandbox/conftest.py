import pytest

from troll_sandbox.bubblewrap import Bubblewrap


@pytest.fixture(scope="module")
def sandbox() -> Bubblewrap:
    return Bubblewrap()
