"""Publishes a run outside of its folder: logging back ends, and the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi
from transformers.integrations import get_available_reporting_integrations, get_reporting_integration_callbacks
from trl import GRPOConfig

from troll.terminal import one_line

# transformers can log to it, but cannot tell whether it is installed.
_WITHOUT_A_CHECK = ("flyte",)


def check_back_ends(report_to: Sequence[str]) -> None:
    """Checks, before a model is loaded, that transformers can log to these back ends, such as `tensorboard`.

    Raises:
        ValueError: If transformers does not know a back end, or its package is missing; in one line.
    """
    available = get_available_reporting_integrations()
    for name in report_to:
        get_reporting_integration_callbacks([name])  # raises for a name that it does not know
        if name not in (*available, *_WITHOUT_A_CHECK):
            raise ValueError(f"report_to: {name} is not installed or not set up: pip install {name}, or leave it out")


def check_hub(training: GRPOConfig) -> None:
    """Checks, before a model is loaded, that it can be pushed to the hub, if `push_to_hub` is set.

    Raises:
        ValueError: If nobody is logged in, or the hub cannot be reached; in one line.
    """
    if not training.push_to_hub:
        return
    try:
        HfApi(token=training.hub_token).whoami()
    except OSError as error:
        raise ValueError(
            f"push_to_hub: {one_line(error, 200)}; log in with hf auth login, or leave push_to_hub out"
        ) from error


def push(model_folder: Path, repository: str, training: GRPOConfig) -> str:
    """Uploads a model with its card and its task to the repository `owner/name`.

    Returns:
        A line to print: where the model is now, or why it is not there and what to do.
    """
    try:
        HfApi(token=training.hub_token).upload_folder(
            repo_id=repository, folder_path=model_folder, revision=training.hub_revision, commit_message="Trained model"
        )
    except OSError as error:
        return f"not pushed: {one_line(error, 200)}; push it with: hf upload {repository} {model_folder} ."
    return f"pushed  https://huggingface.co/{repository}"
