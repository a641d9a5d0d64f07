"""The ages that a controller of the learning rate is told, in any trainer."""

from typing import Any

import pytest

from troll import KLTarget


def kept_ages(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The ages of the updates that follow, as the controller is told them."""
    ages: list[float] = []
    update = KLTarget.update

    def kept(self: KLTarget, kl: float, age: float, **rest: Any) -> float:
        ages.append(age)
        return update(self, kl, age, **rest)

    monkeypatch.setattr(KLTarget, "update", kept)
    return ages
