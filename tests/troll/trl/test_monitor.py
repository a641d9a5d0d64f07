"""The warnings about a trust region that projects nothing, or too much."""

import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from troll.trl import monitor
from troll.trl.monitor import Watch

IDLE = "TROLL has no effect"
MANY = "of the tokens of the last 2 rollouts were projected"

#: Runs in which every token is projected after the first update of a rollout of two, and in which none is.
PROJECTS_MANY: dict[str, Any] = {"kl_bound": 1e-6}
PROJECTS_NONE: dict[str, Any] = {"kl_bound": 10.0}


@pytest.fixture(autouse=True)
def repeated() -> Iterator[None]:
    """Python shows a second warning from the same place, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        yield


def said(recwarn: pytest.WarningsRecorder, words: str) -> list[str]:
    return [text for warning in recwarn if words in (text := str(warning.message))]


@pytest.fixture
def watch(config: Any) -> Callable[..., Watch]:
    """The watch of a configuration with some settings."""
    return lambda **settings: Watch(config(**settings))


def observed(
    watched: Watch,
    updates: int,
    projected: float = 0.0,
    *,
    first: float = 0.0,
    of: int = 8,
    start: int = 0,
    kl_bound: float = 0.05,
) -> list[tuple[int, str]]:
    """The warnings, with their updates from 1 on, in rollouts of `of` updates of 10 tokens each."""
    found = []
    for update in range(start, updates):
        age = update % of
        share = projected if age else first
        message = watched.observe(10 * share, 10.0, 1e-6, kl_bound, moved=age > 0, last=age == of - 1)
        found += [] if message is None else [(update + 1, message)]
    return found


def test_watch_says_once_that_nothing_is_projected(watch):
    ((update, message),) = observed(watch(learning_rate=1e-6), 400, kl_bound=0.02)
    assert update == 115, "100 updates, and the first ones of 15 rollouts"
    assert message.startswith(f"{IDLE}: no token was projected in 100 updates ")
    assert "kl_bound is 0.02. Raise learning_rate (now 1e-06) or updates_per_rollout (now 8), or lower kl_b" in message
    assert "\n" not in message


@pytest.mark.parametrize("projected", [{"projected": 0.01}, {"first": 0.01}], ids=["at any age", "by the engine"])
def test_watch_says_nothing_once_a_token_was_projected(watch, projected):
    watched = watch()
    observed(watched, 50, **projected)
    assert observed(watched, 400) == []


@pytest.mark.parametrize(
    "settings",
    [
        *({"surrogate": name} for name in ("clip", "none", "kl_penalty", "cispo")),
        {"pull": "proximal"},  # which acts on every token
        {"surrogate": "regression", "pull": "proximal", "kl_bound": float("inf")},
    ],
    ids=str,
)
def test_watch_is_silent_where_nothing_has_to_be_projected(watch, settings):
    assert observed(watch(**settings), 400) == []


@pytest.mark.parametrize("projected", [0.0, 1.0])
def test_watch_names_the_setting_and_a_section_of_the_page(watch, projected):
    settings = {"steps_per_generation": 3, "gradient_accumulation_steps": 2}
    ((_, message),) = observed(watch(**settings), 220, projected, of=2)
    assert "steps_per_generation (now 3)" in message
    page, _, anchor = message.rpartition(": see ")[2].partition("#")
    headings = re.findall("^## (.*)$", (Path(__file__).parents[3] / page).read_text("utf-8"), re.M)
    assert anchor in {heading.lower().replace("`", "").replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(("of", "projected"), [(1, 0.35), (8, 0.86), (32, 1.0)])
def test_watch_says_after_two_rollouts_that_much_is_projected(watch, of, projected):
    found = observed(watch(), 10 * of, projected, first=projected, of=of, kl_bound=0.001)
    ((update, message),) = found
    assert update == 2 * of
    assert f"{projected:.0%} {MANY}" in message
    assert message.index("raise kl_bound (now 0.001)") < message.index("learning_rate") < message.index("per_rollout (")


def test_watch_sees_that_more_and_more_is_projected(watch):
    watched = watch()
    assert observed(watched, 32, 0.2) == []
    ((update, _),) = observed(watched, 64, 0.5, start=32)
    assert update == 48


@pytest.mark.parametrize(
    "settings",
    [{"surrogate": "clip"}, {"constraint": "sequence"}],
    ids=str,
)
def test_watch_accepts_many_projected_tokens_that_were_asked_for(watch, settings):
    assert observed(watch(**settings), 64, 0.9) == []


def test_watch_counts_the_update_of_a_warning_towards_the_other(watch):
    watched = watch()
    ((update, _),) = observed(watched, 200, of=2)
    assert update == 200
    ((update, message),) = observed(watched, 300, 1.0, first=1.0, of=2, start=200)
    assert update == 204 and f"100% {MANY}" in message


@pytest.mark.parametrize(
    ("settings", "idle", "many"),
    [
        ({**PROJECTS_MANY, "max_steps": 8}, 0, 1),
        ({**PROJECTS_MANY, "max_steps": 3}, 0, 0),
        ({**PROJECTS_NONE, "max_steps": 5}, 0, 0),
        ({**PROJECTS_NONE, "max_steps": 8, "logging_steps": 100}, 1, 0),
        # Every update is on-policy, which is said before training.
        ({**PROJECTS_NONE, "max_steps": 6, "steps_per_generation": 1}, 0, 0),
    ],
    ids=str,
)
def test_training_warns_of_its_trust_region(make, monkeypatch, recwarn, settings, idle, many):
    monkeypatch.setattr(monitor, "IDLE_UPDATES", 3)
    make(**settings).train()
    assert (len(said(recwarn, IDLE)), len(said(recwarn, MANY))) == (idle, many)


@pytest.mark.parametrize(
    ("settings", "words", "first"), [(PROJECTS_NONE, IDLE, 6), (PROJECTS_MANY, MANY, 4)], ids=["nothing", "many"]
)
def test_resumed_training_counts_anew(make, monkeypatch, recwarn, tmp_path, settings, words, first):
    """An uninterrupted one warns in update `first`."""
    monkeypatch.setattr(monitor, "IDLE_UPDATES", 3)
    settings = {**settings, "save_strategy": "steps", "save_steps": 2}
    for steps, checkpoint, expected in [(8, None, 1), (first, 2, 0), (14, 6, 1)]:
        recwarn.clear()
        trainer = make(**settings, max_steps=steps)
        trainer.train(resume_from_checkpoint=checkpoint and str(tmp_path / f"checkpoint-{checkpoint}"))
        assert len(said(recwarn, words)) == expected, checkpoint
