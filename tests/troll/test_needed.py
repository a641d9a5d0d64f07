"""What an adapter needs: what is missing is named, with its purpose."""

import functools
from typing import Any

from troll.needed import Needed


class Host:
    def method(self, batch: dict[str, Any]) -> Any:
        return [entry.value for entry in batch["entries"]]

    @functools.wraps(method)
    def wrapped(self, *args: Any) -> Any:
        return self.method(*args)

    def takes_anything(self, **kwargs: Any) -> None: ...


def function(size: int) -> int:
    return size


def test_missing_names_methods_that_are_gone():
    assert list(Needed(Host, "gone", "one thing").missing()) == ["Host.gone (one thing) is missing"]


def test_missing_names_parameters_that_are_gone():
    assert list(Needed(Host, "method", "a", ("self", "batch")).missing()) == []
    assert list(Needed(Host, "method", "a", ("batch", "b", "c")).missing()) == [
        "Host.method (a) has no parameter b",
        "Host.method (a) has no parameter c",
    ]
    assert list(Needed(function, None, "b", ("size", "gone")).missing()) == ["function (b) has no parameter gone"]
    assert list(Needed(Host, "takes_anything", "c", ("gone",)).missing()) == []


def test_missing_names_what_the_code_no_longer_uses():
    for name in ("method", "wrapped"):  # looks through decorators, and into nested functions
        assert list(Needed(Host, name, "a", uses=("entries", "value")).missing()) == []
    assert list(Needed(Host, "method", "a", uses=("other",)).missing()) == ["Host.method (a) does not use other"]
