"""The warnings about a trust region that projects nothing, or too much."""

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.troll.trl import tiny
from tests.troll.trl.resuming import forget
from troll.trl import TrollConfig, TrollTrainer, monitor
from troll.trl.monitor import Watch

IDLE = "TROLL has had no effect so far"
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


def watch(tmp_path: Path, **settings: Any) -> Watch:
    return Watch(TrollConfig(str(tmp_path), report_to="none", use_cpu=True, bf16=False, **settings))


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


def test_watch_says_once_that_nothing_is_projected_and_what_to_change(tmp_path):
    ((update, message),) = observed(watch(tmp_path, learning_rate=1e-6), 400, kl_bound=0.02)
    assert update == 115, "100 updates, and the first ones of 15 rollouts"
    assert message.startswith(f"{IDLE}: no token was projected in 100 updates ")
    assert "kl_bound is 0.02. Raise learning_rate (now 1e-06) or updates_per_rollout (now 8), or lower kl_b" in message
    assert "\n" not in message


@pytest.mark.parametrize("projected", [{"projected": 0.01}, {"first": 0.01}], ids=["at any age", "by the engine"])
def test_watch_says_nothing_once_a_token_was_projected(tmp_path, projected):
    watched = watch(tmp_path)
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
def test_watch_is_silent_where_nothing_has_to_be_projected(tmp_path, settings):
    assert observed(watch(tmp_path, **settings), 400) == []


@pytest.mark.parametrize(("updates", "reuse"), [({"updates_per_rollout": 2}, "updates_per_rollout (now 2)"),
                                                ({"steps_per_generation": 3, "gradient_accumulation_steps": 2},
                                                 "steps_per_generation (now 3)")])  # fmt: skip
@pytest.mark.parametrize("projected", [0.0, 1.0])
def test_watch_names_the_setting_that_makes_rollouts_old(tmp_path, updates, reuse, projected):
    ((_, message),) = observed(watch(tmp_path, **updates), 220, projected, of=2)
    assert reuse in message


@pytest.mark.parametrize("projected", [0.0, 1.0])
def test_watch_names_a_section_that_the_page_has(tmp_path, projected):
    ((_, message),) = observed(watch(tmp_path), 220, projected, of=2)
    page, _, anchor = message.rpartition(": see ")[2].partition("#")
    headings = re.findall("^## (.*)$", (Path(__file__).parents[3] / page).read_text("utf-8"), re.M)
    assert anchor in {heading.lower().replace("`", "").replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("of", [1, 2, 8, 32])
@pytest.mark.parametrize("projected", [0.35, 0.86, 1.0])
def test_watch_says_after_two_rollouts_that_much_is_projected(tmp_path, of, projected):
    found = observed(watch(tmp_path), 10 * of, projected, first=projected, of=of, kl_bound=0.001)
    ((update, message),) = found
    assert update == 2 * of
    assert f"{projected:.0%} {MANY}" in message
    assert message.index("raise kl_bound (now 0.001)") < message.index("learning_rate") < message.index("per_rollout (")


def test_watch_sees_that_more_and_more_is_projected(tmp_path):
    watched = watch(tmp_path)
    assert observed(watched, 32, 0.2) == []
    ((update, _),) = observed(watched, 64, 0.5, start=32)
    assert update == 48


@pytest.mark.parametrize(
    "settings",
    [{"surrogate": "clip"}, {"constraint": "sequence"}],
    ids=str,
)
def test_watch_accepts_many_projected_tokens_that_were_asked_for(tmp_path, settings):
    assert observed(watch(tmp_path, **settings), 64, 0.9) == []


@pytest.mark.parametrize("projected", [0.0, 1.0], ids=["none", "many"])
@pytest.mark.parametrize("interrupted", [4, 13, 90, 200])
def test_watch_of_a_resumed_run_says_what_an_uninterrupted_one_does(tmp_path, projected, interrupted):
    whole = observed(watch(tmp_path), 300, projected)
    watched = watch(tmp_path)
    before = observed(watched, interrupted, projected)
    state = json.loads(json.dumps(watched.state_dict()))
    resumed = watch(tmp_path)
    resumed.load_state_dict(state)
    assert before + observed(resumed, 300, projected, start=interrupted) == whole
    assert len(whole) == 1


@pytest.mark.parametrize(
    ("settings", "steps", "idle", "many"),
    [
        (PROJECTS_MANY, 10, 0, 1),
        (PROJECTS_MANY, 3, 0, 0),
        (PROJECTS_NONE, 5, 0, 0),
        (PROJECTS_NONE, 12, 1, 0),
        # Every update is on-policy, which is said before training.
        ({**PROJECTS_NONE, "steps_per_generation": 1}, 12, 0, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("logging_steps", [1, 100])
def test_training_warns_of_its_trust_region(make, monkeypatch, recwarn, settings, steps, idle, many, logging_steps):
    monkeypatch.setattr(monitor, "IDLE_UPDATES", 3)
    make(max_steps=steps, logging_steps=logging_steps, **settings).train()
    assert (len(said(recwarn, IDLE)), len(said(recwarn, MANY))) == (idle, many)


@pytest.mark.parametrize(("settings", "words"), [(PROJECTS_NONE, IDLE), (PROJECTS_MANY, MANY)], ids=["nothing", "many"])
def test_resumed_training_goes_on_counting_and_does_not_repeat_a_warning(make, monkeypatch, tmp_path, settings, words):
    """Saved in the middle of what is counted, and after the warning."""
    monkeypatch.setattr(monitor, "IDLE_UPDATES", 3)
    settings = {**settings, "save_strategy": "steps", "save_steps": 2, "max_steps": 12}
    counts = []
    for checkpoint in (None, 2, 8):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = make(TrollTrainer, **settings)
            trainer.train(resume_from_checkpoint=checkpoint and str(tmp_path / f"checkpoint-{checkpoint}"))
        counts.append(sum(words in str(warning.message) for warning in caught))
    assert counts == [1, 1, 0]
    forget(tmp_path / "checkpoint-8")
    with pytest.warns(UserWarning, match=MANY) if words == MANY else tiny.no_warnings_about(IDLE):
        make(TrollTrainer, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))


def test_resumed_training_with_another_bound_counts_anew(make, tmp_path):
    settings = {**PROJECTS_MANY, "save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    make(**settings).train()
    again = make(**{**settings, "kl_bound": 1e-5})
    with pytest.warns(UserWarning, match=rf"{MANY}.* raise kl_bound \(now 1e-05\)"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
