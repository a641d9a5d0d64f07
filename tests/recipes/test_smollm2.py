"""The recipes for SmolLM2: what they ask for, what they reward, and that they train all weights on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from troll import recipes
from troll.tasks import load_task

MODEL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"
NAMES = [name for name in recipes.names() if name.startswith("smollm2-")]


def test_names_are_those_that_the_documentation_has() -> None:
    assert NAMES == ["smollm2-gsm8k", "smollm2-reasoning", "smollm2-sums"]


@pytest.mark.parametrize("name", NAMES)
def test_recipes_name_the_model_of_the_hub_and_train_all_weights_in_float32(name: str) -> None:
    recipe = recipes.load(name)
    assert recipe.model.model_name_or_path == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert recipe.model.dtype == "float32"
    assert not (recipe.training.bf16 or recipe.model.use_peft or recipe.training.gradient_checkpointing)
    local = recipes.load(name, ["--model_name_or_path", str(MODEL)])
    assert {**local.settings, "model_name_or_path": None} == {**recipe.settings, "model_name_or_path": None}


@pytest.mark.parametrize("name", ["smollm2-sums", "smollm2-reasoning"])
def test_sums_ask_by_chat_and_reward_answers_that_end_in_the_right_number(name: str) -> None:
    recipe = recipes.load(name)
    recipe.task.train_size = recipe.task.eval_size = 16
    task = load_task(recipe.task, conversational=True, for_training=True)
    rows = task.eval_dataset[:1]
    system, user = rows["prompt"][0]
    assert system == {"role": "system", "content": recipe.task.options["system_prompt"]}
    expression = user["content"].removeprefix("What is ").removesuffix("?")
    right = eval(expression)
    (success,) = task.reward_funcs
    answers = {str(right): 1.0, f"{expression} = {right}.": 1.0, f"{right} is not {right + 1}": 0.0, "Well": 0.0}
    for answer, expected in answers.items():
        assert success(prompts=rows["prompt"], completions=[answer], question_id=rows["question_id"]) == [expected]


def test_gsm8k_reads_the_answer_where_the_model_writes_it_unasked() -> None:
    recipe = recipes.load("smollm2-gsm8k")
    assert (recipe.task.task, recipe.task.options) == ("gsm8k", {"answer_format": "hash"})
    assert recipe.training.generation_batch_size == 1024


@pytest.mark.slow
@pytest.mark.skipif(not MODEL.is_dir(), reason="needs models/SmolLM2-135M-Instruct: make smollm2")
def test_the_model_is_sometimes_right_at_first(tmp_path: Path) -> None:
    """Without a success among the completions of a rollout there would be nothing to learn from."""
    from troll.evaluation.config import EvaluationConfig
    from troll.evaluation.run import evaluate

    task = recipes.load("smollm2-sums").task
    task.eval_size = 64
    evaluate(
        EvaluationConfig(str(MODEL), [task], samples=4, max_new_tokens=12, batch_size=64, output_dir=tmp_path / "out")
    )
    (file,) = (tmp_path / "out" / "generations").glob("*.jsonl")
    scores = [json.loads(line)["score"] for line in file.read_text().splitlines()]
    assert len(scores) == 256
    assert 0.02 < sum(scores) / 256 < 0.3
