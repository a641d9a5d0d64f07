import re
from pathlib import Path
from typing import Any
from unittest.mock import ANY, Mock, call

import pytest
from datasets import Dataset
from huggingface_hub import HfApi, ModelCard
from transformers.integrations import integration_utils

from troll.trl import TrollConfig
from troll_lab import recipes
from troll_lab.evaluation.training_task import TrainingTask
from troll_lab.runs import publishing
from troll_lab.runs.publishing import check_back_ends, check_hub, model_card, push
from troll_lab.runs.statistics import wilson_interval
from troll_lab.tasks import Task

SUMMARY: dict[str, Any] = {
    "status": "finished",
    "recipe": "quickstart",
    "surrogate": "troll",
    "surrogate_settings": {"kl_bound": 0.05, "tail": "bucket"},
    "steps": 16,
    "updates_per_rollout": 8,
    "training_seconds": 70.0,
    "machine": "1 x GPU",
    "success_before": 0.25,
    "success_after": 0.5,
    "success_after_step": 16,
    "reward_before": 0.3,
    "reward_after": 0.6,
    "eval_size": 64,
    "eval_questions": 60,
    "versions": {"trl": "1.16.0"},
}


def task_of(prompts: list[Any], **changed: Any) -> Task:
    rows = Dataset.from_dict({"prompt": prompts})
    return Task("gsm8k", rows, rows, [], **changed)


def card(*overrides, task=None, variables=None, model="m", **changed):
    recipe = recipes.load("quickstart", ["--output_dir", "runs/sums", *overrides])
    trained_on = TrainingTask.of(recipe.task, variables)
    return model_card(recipe, task or task_of(["1 + 1 ="]), trained_on, SUMMARY | changed, model)


def test_check_back_ends_refuses_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "trackio", "tensorboard"):
        monkeypatch.setattr(integration_utils, f"is_{name}_available", lambda: False)
        with pytest.raises(ValueError, match=rf"^report_to: {name} is not installed or not set up: pip install {name}"):
            check_back_ends([name])
        monkeypatch.setattr(integration_utils, f"is_{name}_available", lambda: True)
    check_back_ends(["trackio", "tensorboard", "flyte"])
    check_back_ends([])
    with pytest.raises(ValueError, match="nonsense is not supported"):
        check_back_ends(["nonsense"])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Mock:
    hub = Mock(spec=HfApi)
    monkeypatch.setattr(publishing, "HfApi", hub)
    return hub


NO_TOKEN = RuntimeError("Token is required\nbut no token was found")  # those of HTTP libraries are no OSError


def pushing(tmp_path: Path, **changed: Any) -> TrollConfig:
    return TrollConfig(str(tmp_path), use_cpu=True, bf16=False, hub_token="secret", **changed)


def test_check_hub_refuses_in_one_line(tmp_path: Path, hub: Mock) -> None:
    hub.return_value.whoami.side_effect = NO_TOKEN
    check_hub(pushing(tmp_path))
    with pytest.raises(ValueError, match=r"^push_to_hub: Token is required but no token was found; log in") as error:
        check_hub(pushing(tmp_path, push_to_hub=True))
    assert "\n" not in str(error.value)


def test_push_says_where_the_model_is_or_how_to_push_it(tmp_path: Path, hub: Mock) -> None:
    training = pushing(tmp_path, push_to_hub=True, hub_revision="v2")
    check_hub(training)
    assert push(tmp_path, "you/model", training) == "pushed  https://huggingface.co/you/model"
    upload = hub.return_value.upload_folder
    upload.assert_called_once_with(repo_id="you/model", folder_path=tmp_path, revision="v2", commit_message=ANY)
    assert hub.call_args_list == [call(token="secret")] * 2
    upload.side_effect = NO_TOKEN
    told = push(tmp_path, "you/model", training)
    assert told.startswith("not pushed: Token is required") and f"hf upload you/model {tmp_path} ." in told


HUB_MODEL = ("--model_name_or_path", "Qwen/Qwen3-0.6B")


@pytest.mark.parametrize(
    ("overrides", "hub_dataset", "metadata", "texts"),
    [
        ((), None, {}, ["# sums", "This is the small language model that `troll train` makes itself, trained by"]),
        (
            HUB_MODEL,
            "openai/gsm8k",
            {"base_model": "Qwen/Qwen3-0.6B", "datasets": ["openai/gsm8k"], "library_name": "transformers"},
            [
                "[Qwen/Qwen3-0.6B](https://huggingface.co/Qwen/Qwen3-0.6B), trained",
                "`gsm8k` ([openai/gsm8k](https://huggingface.co/datasets/openai/gsm8k)) with [TROLL]",
            ],
        ),
        (
            (*HUB_MODEL, "--use_peft", "true"),
            None,
            {"base_model": "Qwen/Qwen3-0.6B", "library_name": "peft"},
            ["This is a LoRA adapter of [Qwen/Qwen3-0.6B]"],
        ),
        (
            ("--model_name_or_path", "FOLDER/my-model", "--dataset_path", "FOLDER/rows.jsonl"),
            None,
            {},
            ["This is the model of a local folder, `my-model`, trained", "(local data, `rows.jsonl`)"],
        ),
    ],
    ids=["toy", "hub", "adapter", "local"],
)
def test_model_card_links_what_is_on_the_hub(tmp_path, overrides, hub_dataset, metadata, texts):
    (tmp_path / "my-model").mkdir()
    given = [part.replace("FOLDER", str(tmp_path)) for part in overrides]
    text = card(*given, task=task_of(["?"], hub_dataset=hub_dataset))
    found = ModelCard(text).data.to_dict()
    assert {name: found.get(name) for name in metadata} == metadata
    assert {"base_model", "datasets"} & found.keys() == {"base_model", "datasets"} & metadata.keys()
    assert found["tags"] == ["trl", "reinforcement-learning", "troll"]
    assert all(part in text for part in texts)
    assert "None" not in text and str(tmp_path) not in text


def test_model_card_has_intervals_of_success() -> None:
    text = card().replace("\N{NO-BREAK SPACE}", " ")
    low, high = wilson_interval(0.5, 60)
    assert "Wilson's intervals over 60 different problems." in text
    assert f"| after step 16 | 50.0 % | {100 * low:.1f} % to {100 * high:.1f} % |" in text
    assert "| before training | 25.0 % |" in text
    assert "64 held-out problems, one completion of each, at temperature 1." in text
    text = card("--eval_temperature", "0.5", "--num_generations_eval", "2", success_before=None)
    assert "2 completions of each, at temperature 0.5" in text and "before training" not in text


def test_model_card_of_a_task_without_success_has_rewards() -> None:
    text = card(success_before=None, success_after=None)
    assert "| before training | 0.300 |\n| after step 16 | 0.600 |" in text
    assert "Not measured." in card(success_before=None, success_after=None, reward_before=None, reward_after=None)


def test_model_card_has_settings_and_citations_of_the_method() -> None:
    text = card()
    assert "| `surrogate` | `troll` |\n| `kl_bound` | `0.05` |" in text
    assert "- trl 1.16.0" in text
    assert "arXiv:2510.03817" in text and "vonwerra2020trl" in text
    clip = card(surrogate="clip", surrogate_settings={"epsilon": 0.2}, status="interrupted")
    assert "with the clipped ratio of GRPO." in clip
    assert "2510.03817" not in clip and "vonwerra2020trl" in clip
    assert "(interrupted)" in clip
    assert ModelCard(clip).data.to_dict()["tags"] == ["trl", "reinforcement-learning"]


@pytest.mark.parametrize("conversational", [False, True])
def test_the_quick_start_runs(conversational, tiny_model, chat_model, capsys):
    prompt: Any = 'a "quoted"\nprompt ='
    model = tiny_model
    if conversational:
        model = chat_model("{{ shout }}{% for message in messages %}{{ message.content }}{% endfor %}")
        prompt = [{"role": "user", "content": prompt}]
    text = card(task=task_of([prompt]), model=str(model), variables={"shout": "LOUD "})
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    found: dict[str, Any] = {}
    exec(code, found)
    read = found["tokenizer"].decode(found["inputs"]["input_ids"][0])
    assert read == ('LOUD a "quoted"\nprompt =' if conversational else prompt)
    assert 0 < found["output"].shape[1] - found["inputs"]["input_ids"].shape[1] <= 8
    assert capsys.readouterr().out.endswith("\n")


def test_images_have_no_quick_start() -> None:
    rows = Dataset.from_dict({"prompt": ["?"], "images": [[]]})
    text = card(task=Task("geometry3k", rows, rows, []))
    assert "Quick start" not in text and ModelCard(text).data.to_dict()["pipeline_tag"] == "image-text-to-text"
