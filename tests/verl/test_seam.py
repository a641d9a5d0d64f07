"""What is built on in verl is there, and what is not there is said."""

from __future__ import annotations

import pytest
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from tests.verl.fresh import Fresh
from troll.needed import Needed
from troll.verl.seam import check, training


def test_all_that_is_missing_is_said_at_once() -> None:
    first, second = Needed(FSDPEngineWithLMHead, "gone", "one thing"), Needed(FSDPEngineWithLMHead, "lost", "another")
    with pytest.raises(
        ImportError, match=r"FSDPEngineWithLMHead\.gone \(one thing\) is missing; .*\.lost \(another\) is"
    ):
        check([first, training.NEEDED[0], second])


#: A change of verl, what is imported of it and goes on without TROLL, the import that is refused, and the reason.
LACKING = {
    "a method": (
        "import verl.workers.engine.fsdp.transformer_impl as x; del x.FSDPEngineWithLMHead.prepare_model_outputs",
        "from troll.verl import TrollPolicyLossConfig",
        "FSDPEngineWithLMHead.prepare_model_outputs (what was",
    ),
    "a function": (
        "import verl.workers.engine.utils as x; del x.pad_packed_inputs",
        "from troll.verl import TrollPolicyLossConfig",
        "cannot import name 'pad_packed_inputs'",
    ),
    "a field": (
        "import verl.workers.rollout.replica as x; del x.TokenOutput.model_fields['extra_fields']\n"
        "import verl.experimental.agent_loop.agent_loop",
        "import troll.verl.agent_loop",
        "extra_fields of TokenOutput",
    ),
}


@pytest.mark.parametrize(("change", "refused", "message"), LACKING.values(), ids=LACKING)
def test_a_verl_that_lacks_something_is_refused_at_import(
    fresh: Fresh, change: str, refused: str, message: str
) -> None:
    done = fresh(f"{change}\nprint('verl itself goes on')\n{refused}")
    assert done.code == 1 and "verl itself goes on" in done.said
    last = done.said[-1]
    assert message in last and "troll.verl does not work with verl" in last and "verified with verl 0.9" in last
