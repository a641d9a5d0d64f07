from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.integrations import integration_utils

from troll.runs import publishing
from troll.runs.publishing import check_back_ends, check_hub, push
from troll.trl import TrollConfig


def test_back_ends_that_are_not_there_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    check_back_ends([])
    for name in ("wandb", "trackio", "tensorboard"):
        monkeypatch.setattr(integration_utils, f"is_{name}_available", lambda: False)
        with pytest.raises(ValueError, match=rf"^report_to: {name} is not installed or not set up: pip install {name}"):
            check_back_ends([name])
    with pytest.raises(ValueError, match="nonsense is not supported"):
        check_back_ends(["nonsense"])


def test_back_ends_that_are_there_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("trackio", "tensorboard"):
        monkeypatch.setattr(integration_utils, f"is_{name}_available", lambda: True)
    check_back_ends(["trackio", "tensorboard", "flyte"])


class Hub:
    """Stands in for the hub: `reachable`, or not."""

    def __init__(self, reachable: bool) -> None:
        self.reachable = reachable
        self.uploads: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []

    def __call__(self, token: str | None) -> Hub:
        self.tokens.append(token)
        return self

    def whoami(self) -> None:
        if not self.reachable:
            raise OSError("Token is required\nbut no token was found")

    def upload_folder(self, **upload: Any) -> None:
        self.whoami()
        self.uploads.append(upload)


def pushing(tmp_path: Path, **changed: Any) -> TrollConfig:
    return TrollConfig(str(tmp_path), use_cpu=True, bf16=False, hub_token="secret", **changed)


def test_a_hub_that_cannot_be_used_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "HfApi", Hub(reachable=False))
    check_hub(pushing(tmp_path))
    with pytest.raises(ValueError, match=r"^push_to_hub: Token is required but no token was found; log in") as error:
        check_hub(pushing(tmp_path, push_to_hub=True))
    assert "\n" not in str(error.value)


def test_a_push_says_where_the_model_is_or_how_to_push_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(reachable=True)
    monkeypatch.setattr(publishing, "HfApi", hub)
    training = pushing(tmp_path, push_to_hub=True, hub_revision="v2")
    check_hub(training)
    assert push(tmp_path, "you/model", training) == "pushed  https://huggingface.co/you/model"
    (upload,) = hub.uploads
    assert (upload["repo_id"], upload["folder_path"], upload["revision"]) == ("you/model", tmp_path, "v2")
    assert set(hub.tokens) == {"secret"}
    hub.reachable = False
    told = push(tmp_path, "you/model", training)
    assert told.startswith("not pushed: Token is required") and f"hf upload you/model {tmp_path} ." in told
