"""Refusals and warnings before training starts."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from tests.troll.huggingface.test_precision import Weights
from tests.troll.trl import tiny
from tests.troll.trl.engine import Engine, take_the_place_of_vllm
from troll.trl import TrollTrainer
from troll.trl.checks import warn_about_precision
from troll.trl.seam import sequences
from troll_lab.evaluation.model import find_model, load_model


@pytest.mark.parametrize(
    ("back_end", "precision", "learning_rate", "dtype", "warned"),
    [
        ("NO", "bf16", 1e-6, torch.bfloat16, True),
        ("NO", "bf16", 1e-6, torch.float16, True),
        ("NO", "bf16", 1e-6, torch.float32, False),
        ("NO", "bf16", 1e-2, torch.bfloat16, False),
        # FSDP and DeepSpeed keep float32 weights of their own in mixed precision.
        ("FSDP", "bf16", 1e-6, torch.bfloat16, False),
        ("FSDP", "no", 1e-6, torch.bfloat16, True),
    ],
)
def test_weights_that_never_move_are_warned_about(back_end, precision, learning_rate, dtype, warned):
    accelerator: Any = SimpleNamespace(distributed_type=DistributedType[back_end], mixed_precision=precision)
    args: Any = SimpleNamespace(learning_rate=learning_rate)
    message = r'9\d% of the trained weights .*learning_rate=1e-06.* dtype="float32".*bf16=True; or train LoRA'
    with pytest.warns(UserWarning, match=message) if warned else tiny.no_warnings_about("trained weights"):
        warn_about_precision(accelerator, Weights(dtype), args.learning_rate)


TAKEN = ["prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"]


def with_column(name: str, size: int = 16) -> Dataset:
    return tiny.make_dataset(size).add_column(name, ["x"] * size)


COLUMN = r"cannot have a column named '{0}': .*rename_column\('{0}', ...\).*remove_columns"


@pytest.mark.parametrize("name", TAKEN)
def test_a_column_that_reward_functions_cannot_get_is_refused_before_training(make, name):
    with pytest.raises(ValueError, match=COLUMN.format(name)):
        make(train_dataset=with_column(name))


def test_such_a_column_is_refused_in_every_data_set(make, monkeypatch):
    data, message = with_column("completions"), COLUMN.format("completions")
    for held_out in (data, {"other": tiny.make_dataset(), "one": data}):
        with pytest.raises(ValueError, match=message):
            make(eval_dataset=held_out)
    trainer = make(train_dataset=IterableDataset.from_generator(lambda: iter(data)))
    monkeypatch.setattr(trainer, "_generate", lambda prompts: pytest.fail("generated"))
    with pytest.raises(ValueError, match=message):
        trainer.train()
    with pytest.raises(ValueError, match=message):  # given later
        trainer.evaluate(data)


def test_other_columns_reach_the_reward_functions(make):
    seen: list[str] = []

    def reward(completions: list[str], completion_id: list[str], **columns: Any) -> list[float]:
        seen.extend(completion_id)
        return [float(len(text)) for text in completions]

    # TRL drops `completion` without a word: data sets for other trainers have it.
    dataset = with_column("completion").add_column("completion_id", [str(row) for row in range(16)])
    dataset = dataset.add_column("environments", ["x"] * 16)
    make(train_dataset=dataset, reward_funcs=reward, max_steps=1).train()
    assert len(seen) == 8


def test_a_removed_column_reaches_no_reward_function(make):
    trainer = make(train_dataset=with_column("completions"), remove_unused_columns=True, max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1


def tokenizer_with(*tokens: str, **special: str) -> Any:
    """The tests' tokenizer with more tokens than the tiny models have rows, 48."""
    tokenizer: Any = tiny.make_tokenizer()
    tokenizer.add_tokens(list(tokens))
    tokenizer.add_special_tokens(special)
    return tokenizer


SIZES = r"ids up to 48, and the model's embedding has 48 rows: it lacks '<new>' \(id 48\)"
RESIZE = r"call model.resize_token_embeddings\(len\(tokenizer\)\)"


def test_a_token_without_an_embedding_in_the_prompts_is_refused_before_generation(make, monkeypatch):
    prompts = Dataset.from_dict({"prompt": ["1+1=", "1<new>1="] * 8})
    for data in ({"train_dataset": prompts}, {"eval_dataset": prompts}, {"eval_dataset": {"one": prompts}}):
        with pytest.raises(ValueError, match=rf"{SIZES}, which is in the prompts. To train, {RESIZE}"):
            make(processing_class=tokenizer_with("<new>"), **data)
    stream = IterableDataset.from_generator(lambda: iter(prompts))
    trainer = make(processing_class=tokenizer_with("<new>"), train_dataset=stream)
    monkeypatch.setattr(trainer, "_generate", lambda prompts: pytest.fail("generated"))
    with pytest.raises(ValueError, match=SIZES):
        trainer.train()
    with pytest.raises(ValueError, match=SIZES):
        trainer.evaluate(prompts)


def test_a_chat_template_counts_as_a_prompt(make):
    tokenizer = tokenizer_with("<new>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}<new>"
    prompts = Dataset.from_dict({"prompt": [[{"role": "user", "content": "1+1="}]] * 8})
    with pytest.raises(ValueError, match=SIZES):
        make(processing_class=tokenizer, train_dataset=prompts)
    assert make(processing_class=tokenizer).model is not None  # prompts of text do not use it


def test_rows_without_a_prompt_train_in_an_environment_that_brings_it(make):
    class Sum:
        def reset(self, **row: Any) -> str:
            return "1+1="

    tokenizer: Any = tiny.make_tokenizer()
    tokenizer.chat_template = (  # TRL asks for one that renders calls of tools
        "{{ tools }}{% for message in messages %}{{ message.role }}{{ message.content }}"
        "{% for call in message.tool_calls or [] %}{{ call.function }}{% endfor %}{% endfor %}"
    )
    rows = Dataset.from_dict({"environment": ["sum"] * 8})
    environments = {"train_dataset": rows, "environment_factory": {"sum": Sum}}
    trainer = make(processing_class=tokenizer, max_steps=1, **environments)
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("role", ["pad_token", "eos_token"])
def test_padding_or_end_without_an_embedding_is_refused(make, role):
    with pytest.raises(ValueError, match=rf"{SIZES}, which ends completions, or fills up their rows. To train"):
        make(processing_class=tokenizer_with(**{role: "<new>"}))


def test_tokens_that_occur_nowhere_and_padded_embeddings_are_accepted(make):
    padded = tiny.make_model("llama")
    padded.resize_token_embeddings(64)
    for model, tokenizer in (("llama", tokenizer_with("<new>")), (padded, tokenizer_with("<new>", pad_token="<pad2>"))):
        trainer = make(model=model, processing_class=tokenizer, max_steps=1)
        trainer.train()
        assert trainer.state.global_step == 1


def test_a_reference_without_the_models_tokens_is_refused(make):
    model = make.model("llama")  # the reference is loaded by its name, without the new row
    model.resize_token_embeddings(49)
    tokenizer = tokenizer_with("<new>")
    message = (
        r"embedding of the reference model has 48 rows, and that of the trained model 49: it lacks '<new>' \(id 48\)"
    )
    with pytest.raises(ValueError, match=message):
        make(model=model, processing_class=tokenizer, beta=0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["q_proj", "embed_tokens"]}, "use_vllm merges the adapter into the weight that .* share"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "use_vllm merges the adapter into the weight"),
        (
            {"target_modules": ["q_proj"], "trainable_token_indices": [4]},
            "use_vllm cannot be used with trainable_token_indices",
        ),
    ],
)
def test_an_adapter_that_an_engine_would_get_wrong_is_refused(make, monkeypatch, settings, message):
    take_the_place_of_vllm(monkeypatch, Engine())
    model = tiny.make_model("llama", tie_word_embeddings=True)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, **settings)
    with pytest.raises(ValueError, match=message):
        make(model=model, peft_config=config, use_vllm=True, vllm_mode="colocate")


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_an_engine_with_another_vocabulary_is_refused(make, monkeypatch, mode):
    """A server says itself that the weights do not fit."""
    take_the_place_of_vllm(monkeypatch, Engine())
    model = tiny.make_model("llama")
    model.resize_token_embeddings(64)
    message = r"vLLM has read a model of 48 tokens from .*, and the trained one has 64"
    with pytest.raises(ValueError, match=message) if mode == "colocate" else nullcontext():
        make(model=model, use_vllm=True, vllm_mode=mode)


@pytest.mark.parametrize("surrogate", ["troll", "clip"])
def test_an_adapter_of_the_head_is_refused_with_any_surrogate(make, surrogate):
    """TRL scores with the weight of the head, without its adapter."""
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "lm_head"])
    with pytest.raises(ValueError, match="Applying a PEFT adapter to `lm_head` is not supported"):
        make(peft_config=config, surrogate=surrogate)


@pytest.mark.parametrize("surrogate", ["troll", "clip"])
@pytest.mark.parametrize("tied", [True, False])
def test_single_tokens_are_scored_by_the_models_own_logits(make, surrogate, tied):
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], trainable_token_indices=[10, 11])
    model = tiny.adapted(tiny.make_model("llama", tie_word_embeddings=tied), config)
    trainer = make(model=model, surrogate=surrogate, temperature=1.0)
    batch = tiny.rolled_out(trainer)
    ids, mask = sequences(batch)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits[:, -batch["completion_ids"].shape[1] - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)
    acts = batch["completion_mask"].bool()
    torch.testing.assert_close(batch["old_per_token_logps"][acts], expected[acts], rtol=0, atol=tiny.LOG_PROB_ERROR)


@pytest.mark.parametrize("surrogate", ["troll", "clip"])
@pytest.mark.parametrize("tied", [True, False])
def test_single_tokens_are_trained_and_saved(make, surrogate, tied, tmp_path):
    """Of the embedding, and of the head that it is tied to; what is loaded again is what was trained."""
    model = tiny.make_model("llama", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], trainable_token_indices=[10, 11])
    trainer = make(model=model, peft_config=config, surrogate=surrogate, beta=0.1)
    before = tiny.parameters(trainer.model)
    trainer.train()
    assert any("trainable_tokens_delta" in name for name in tiny.changed(before, trainer.model))
    trainer.save_model(str(tmp_path / "adapter"))
    ids = torch.arange(3, 30).unsqueeze(0)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    expected = trainer.model.eval()(ids).logits
    again = PeftModel.from_pretrained(base, tmp_path / "adapter")(ids).logits
    torch.testing.assert_close(again, expected, rtol=0, atol=tiny.LOG_PROB_ERROR)
    merged = load_model(find_model(str(tmp_path / "adapter")), "float32")(ids).logits
    torch.testing.assert_close(merged, expected, rtol=0, atol=tiny.LOG_PROB_ERROR)


# Data sets that are too small


#: Rollouts of two prompts in two updates, and of eight in eight.
EIGHT = {"steps_per_generation": None, "updates_per_rollout": 8}


@pytest.mark.parametrize(
    ("prompts", "settings", "takes"),
    [
        (1, {}, 2),
        (5, EIGHT, 8),
        (5, {**EIGHT, "max_steps": -1, "num_train_epochs": 2}, 8),
        (5, {"steps_per_generation": None, "updates_per_rollout": None}, 8),
        (3, {"generation_batch_size": 16, "steps_per_generation": None}, 4),
        (3, {**EIGHT, "gradient_accumulation_steps": 2, "num_iterations": 4}, 4),
        (1, {"per_device_train_batch_size": 8, "steps_per_generation": 1}, 2),
        (0, {}, 2),
    ],
    ids=str,
)
def test_fewer_prompts_than_a_rollout_takes_are_refused_before_training(make, monkeypatch, prompts, settings, takes):
    data = tiny.make_dataset(max(1, prompts)).select(range(prompts))
    monkeypatch.setattr(GRPOTrainer, "training_step", lambda *_: pytest.fail("a step was made"))
    says = rf"^a rollout takes {takes} prompts .* the training set has {prompts} to train on: lower .*, or add prompts$"
    with pytest.raises(ValueError, match=says):
        make(train_dataset=data, **settings).train()


@pytest.mark.parametrize("settings", [{}, {"max_steps": -1, "num_train_epochs": 1}], ids=str)
@pytest.mark.parametrize("prompts", [2, 3])
def test_as_many_prompts_as_a_rollout_takes_train(make, prompts, settings):
    trainer = make(train_dataset=tiny.make_dataset(prompts), **settings)
    trainer.train()
    assert trainer.state.global_step == settings.get("num_train_epochs", 2) * 2


def test_a_sampler_of_ones_own_decides_what_fills_a_rollout(make):
    class Oversampling(TrollTrainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return [0] * 64

    trainer = make(Oversampling, train_dataset=tiny.make_dataset(1))
    trainer.train()
    assert trainer.state.global_step == 4


def test_a_stream_that_ends_within_a_rollout_is_no_finished_training(make):
    trainer = make(train_dataset=tiny.make_dataset(5).to_iterable_dataset(), **EIGHT)
    with pytest.raises(ValueError, match=r"^training ended without a step: a rollout takes 8 prompts .* has fewer"):
        trainer.train()


def test_training_that_has_had_all_its_steps_resumes_without_one(make, tmp_path):
    settings = {"train_dataset": tiny.make_dataset(2), "max_steps": -1, "num_train_epochs": 1}
    settings |= {"save_strategy": "steps", "save_steps": 2}
    make(**settings).train()
    resumed = make(**settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 2


DROPS = {"dataloader_drop_last": True, "per_device_eval_batch_size": 16}


@pytest.mark.parametrize(
    ("sizes", "settings", "says"),
    [
        (0, {}, "eval_dataset has 0 rows to evaluate: leave it out"),
        ({"a": 2, "b": 0}, {}, r"eval_dataset\['b'\] has 0 rows to evaluate"),
        (
            3,
            DROPS,
            "eval_dataset has 3 rows to evaluate, fewer than a batch of 16 completions, which dataloader_drop_",
        ),
    ],
)
def test_an_evaluation_of_nothing_is_refused_before_training(make, sizes, settings, says):
    rows = tiny.make_dataset(9)
    evaluated: Any = rows.select(range(sizes)) if isinstance(sizes, int) else None
    if evaluated is None:
        evaluated = {name: rows.select(range(size)) for name, size in sizes.items()}
    when = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2}
    with pytest.raises(ValueError, match=f"^{says}"):
        make(eval_dataset=evaluated, **{**when, **settings}).train()
    make(eval_dataset=evaluated, max_steps=2, **settings).train()  # which evaluates nothing


def test_a_whole_batch_is_evaluated_where_the_last_one_is_dropped(make):
    trainer = make(eval_dataset=tiny.make_dataset(4), **DROPS)
    assert trainer.evaluate()["eval_completions/mean_length"] > 0


class OfTokens:
    """A reward of single tokens."""

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [0.0] * len(completion_ids)

    def of_tokens(self, completion_ids: list[list[int]], **_: Any) -> list[list[float]]:
        return [[0.0] * len(ids) for ids in completion_ids]


def test_rewards_of_tokens_are_refused_with_the_trainer_that_takes_them(make):
    with pytest.raises(ValueError, match=r"'OfTokens' has of_tokens, .* to 0, or .* LabTrainer of troll_lab\.trl"):
        make(reward_funcs=OfTokens())
    make(reward_funcs=[tiny.reward, OfTokens()], reward_weights=[1.0, 0.0])
