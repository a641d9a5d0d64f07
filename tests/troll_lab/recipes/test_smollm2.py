"""The recipes for SmolLM2: what they ask for, what they reward, and that they train all weights on a CPU."""

import json
from pathlib import Path

import pytest
from reasoning_gym.utils import extract_answer

from troll_lab import recipes
from troll_lab.tasks import load_task

MODEL = Path(__file__).parents[3] / "models" / "SmolLM2-135M-Instruct"
NAMES = [name for name in recipes.names() if name.startswith("smollm2-")]


@pytest.mark.parametrize("name", NAMES)
def test_recipes_name_the_model_of_the_hub_and_train_in_float32(name: str) -> None:
    recipe = recipes.load(name)
    assert recipe.model.model_name_or_path == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert recipe.model.dtype == "float32"
    assert not (recipe.training.bf16 or recipe.training.gradient_checkpointing)
    assert recipe.model.use_peft == (name != "smollm2-gsm8k")  # which trains all weights
    local = recipes.load(name, ["--model_name_or_path", str(MODEL)])
    assert {**local.settings, "model_name_or_path": None} == {**recipe.settings, "model_name_or_path": None}


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("smollm2-sums", "{sum} = {0}", ["{sum} = {1}", "{0}", "It is {0}.", "{sum} = {0} or {1}", "1 + 1 = 2", ""]),
        ("smollm2-reasoning", "So <answer>{0}</answer>", ["So <answer>{1}</answer>", "So {0}", "{sum} = {0}", ""]),
    ],
)
def test_sums_are_asked_by_chat_and_pay_for_the_answer_only(name: str, right: str, wrong: list[str]) -> None:
    recipe = recipes.load(name)
    recipe.task.train_size = recipe.task.eval_size = 16
    task = load_task(recipe.task, conversational=True, for_training=True)
    rows = task.eval_dataset[:1]
    question = rows["prompt"][0][-1]["content"]
    expression = question.removeprefix("What is ").removesuffix("?")
    value = eval(expression)
    success = task.reward_funcs[0]
    assert task.reward_weights in (None, [1.0, 0.0, 0.0])  # what else is measured is not trained on
    for answer, expected in [(right, 1.0), *((each, 0.0) for each in wrong)]:
        completion = answer.format(value, value + 1, sum=expression)
        assert success(prompts=[""], completions=[completion], question_id=rows["question_id"]) == [expected], (
            completion
        )


@pytest.mark.parametrize("name", ["smollm2-sums", "smollm2-reasoning"])
def test_examples_are_right_and_not_held_out(name: str) -> None:
    recipe = recipes.load(name)
    recipe.task.train_size, recipe.task.eval_size = 1, 2048
    asked = {prompt[-1]["content"] for prompt in load_task(recipe.task, conversational=True).eval_dataset["prompt"]}
    for question, answer in recipe.task.options["examples"]:
        assert question not in asked
        written = extract_answer(answer) or answer.split(" = ")[1]
        assert float(written) == eval(question.removeprefix("What is ").removesuffix("?"))


def test_gsm8k_reads_the_answer_where_the_model_writes_it() -> None:
    recipe = recipes.load("smollm2-gsm8k")
    assert (recipe.task.task, recipe.task.options) == ("gsm8k", {"answer_format": "hash"})
    assert recipe.training.generation_batch_size == 1024


@pytest.mark.slow
@pytest.mark.skipif(not MODEL.is_dir(), reason="needs models/SmolLM2-135M-Instruct: make smollm2")
def test_the_model_is_sometimes_right_at_first(tmp_path: Path) -> None:
    """Without a success among the completions of a rollout there would be nothing to learn from."""
    from troll_lab.evaluation.config import EvaluationConfig
    from troll_lab.evaluation.run import evaluate

    task = recipes.load("smollm2-sums").task
    task.eval_size = 64
    evaluate(
        EvaluationConfig(str(MODEL), [task], samples=4, max_new_tokens=14, batch_size=64, output_dir=tmp_path / "out")
    )
    (file,) = (tmp_path / "out" / "generations").glob("*.jsonl")
    scores = [json.loads(line)["score"] for line in file.read_text().splitlines()]
    assert len(scores) == 256
    assert 0.1 < sum(scores) / 256 < 0.5
