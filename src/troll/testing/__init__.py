"""A conformance test for adapters, which put TROLL into a trainer.

The network of the test is a table, so that it works in any trainer: the logits that follow token a are row a. Errors of
an adapter (in the logits of a token, the temperature, the mask, the aggregation) change the loss and the gradient of
that table.

```python
from troll.testing import Case, Update, check_adapter

def my_adapter(case: Case) -> Update:
    ...  # capture with case.old_table, update with case.new_table, by the trainer's own calls
    return Update(loss, gradient_of_the_new_table, metrics)

def test_my_adapter():
    check_adapter(my_adapter, aggregation="sequence_mean", layouts=["packed"])
```
"""

from troll.testing.case import (
    COUNTED,
    IGNORED,
    METRICS,
    UNREACHABLE,
    VOCAB_SIZE,
    Adapter,
    Case,
    Layout,
    Sample,
    Update,
    make_case,
)
from troll.testing.check import check_adapter

__all__ = [
    "COUNTED",
    "IGNORED",
    "METRICS",
    "UNREACHABLE",
    "VOCAB_SIZE",
    "Adapter",
    "Case",
    "Layout",
    "Sample",
    "Update",
    "check_adapter",
    "make_case",
]
