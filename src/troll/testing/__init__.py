"""A conformance test for adapters: whether TROLL in a trainer does what TROLL does.

The network of the test is a table, so that any trainer can hold it: the logits that follow token a are row a.
Everything that an adapter has to get right (which logits belong to which token, the temperature, the mask, the
aggregation) shows in the loss and in the gradient of that table.

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
