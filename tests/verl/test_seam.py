"""What is built on in verl is there, and what is not there is said."""

from __future__ import annotations

import subprocess
import sys

import pytest
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from troll.needed import Needed
from troll.verl.seam import check, training


def test_all_that_is_missing_is_said_at_once() -> None:
    first, second = Needed(FSDPEngineWithLMHead, "gone", "one thing"), Needed(FSDPEngineWithLMHead, "lost", "another")
    with pytest.raises(
        ImportError, match=r"FSDPEngineWithLMHead\.gone \(one thing\) is missing; .*\.lost \(another\) is"
    ):
        check([first, training.NEEDED[0], second])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("del fsdp.FSDPEngineWithLMHead.prepare_model_outputs", "FSDPEngineWithLMHead.prepare_model_outputs (what was"),
        ("import verl.workers.engine.utils as u; del u.pad_packed_inputs", "cannot import name 'pad_packed_inputs'"),
    ],
)
def test_a_verl_that_lacks_something_is_refused_at_import(change: str, message: str) -> None:
    program = (
        "import verl.workers.engine.fsdp.transformer_impl as fsdp\n"
        f"{change}\nfrom troll.verl import TrollPolicyLossConfig"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert message in last and "troll.verl does not work with verl" in last and "verified with verl 0.9" in last
