"""Refusals and warnings before training starts."""

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.utils import DistributedType
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, Trainer
from trl import GRPOTrainer

from tests.troll.huggingface.test_precision import Weights
from tests.troll.trl import tiny
from tests.troll.trl.engine import Engine, take_the_place_of_vllm
from troll.grading import clash
from troll.trl import TrollTrainer
from troll.trl.checks import (
    refuse_an_empty_reference,
    refuse_model_parallelism,
    warn_about_precision,
    warn_about_saving,
)
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
    accelerator: Any = SimpleNamespace(
        distributed_type=DistributedType[back_end], mixed_precision=precision, is_main_process=True
    )
    args: Any = SimpleNamespace(learning_rate=learning_rate)
    message = r'9\d% of the trained weights .*learning_rate=1e-06.* dtype="float32".*bf16=True; or train LoRA'
    with pytest.warns(UserWarning, match=message) if warned else tiny.no_warnings_about("trained weights"):
        warn_about_precision(accelerator, Weights(dtype), args.learning_rate)


TAKEN = ["prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"]


def with_column(name: str, size: int = 16) -> Dataset:
    return tiny.make_dataset(size).add_column(name, ["x"] * size)


COLUMN = r"cannot have a column named '{0}': .*rename_column\('{0}', ...\).*remove_columns"


def test_a_column_that_reward_functions_cannot_get_is_refused(make, monkeypatch):
    """In every data set; of a stream, and of one that is given later, before anything is generated."""
    message = COLUMN.format("completions")
    data = with_column("completions")
    for held_out in (data, {"other": tiny.make_dataset(), "one": data}):
        with pytest.raises(ValueError, match=message):
            make(eval_dataset=held_out)
    trainer = make(train_dataset=IterableDataset.from_generator(lambda: iter(data)))
    monkeypatch.setattr(trainer, "_generate", lambda prompts: pytest.fail("generated"))
    with pytest.raises(ValueError, match=message):
        trainer.train()
    with pytest.raises(ValueError, match=message):
        trainer.evaluate(data)


@pytest.mark.parametrize("name", TAKEN)
def test_clash_names_the_column_and_the_remedy(name):
    assert re.search(COLUMN.format(name), str(clash(["prompt", name])))
    assert clash(["prompt", "completion", "completion_id", "environments"]) is None


def test_a_removed_column_reaches_no_reward_function(make):
    make(train_dataset=with_column("completions"), remove_unused_columns=True, max_steps=1).train()


def tokenizer_with(*tokens: str, **special: str) -> Any:
    """The tests' tokenizer with more tokens than the tiny models have rows, 48."""
    tokenizer: Any = tiny.make_tokenizer()
    tokenizer.add_tokens(list(tokens))
    tokenizer.add_special_tokens(special)
    return tokenizer


SIZES = r"ids up to 48, and the model's embedding has 48 rows: it lacks '<new>' \(id 48\)"
RESIZE = r"call model.resize_token_embeddings\(len\(tokenizer\)\)"


def test_a_prompt_token_without_an_embedding_is_refused(make, monkeypatch):
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


def test_an_environment_brings_the_prompt_of_a_row(make):
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
    make(processing_class=tokenizer, max_steps=1, **environments).train()


@pytest.mark.parametrize("role", ["pad_token", "eos_token"])
def test_padding_or_end_without_an_embedding_is_refused(make, role):
    with pytest.raises(ValueError, match=rf"{SIZES}, which ends completions, or fills up their rows. To train"):
        make(processing_class=tokenizer_with(**{role: "<new>"}))


@pytest.mark.parametrize(("rows", "special"), [(48, {}), (64, {"pad_token": "<pad2>"})], ids=["nowhere", "padded"])
def test_unused_tokens_and_padded_embeddings_are_accepted(make, rows, special):
    model = tiny.make_model("llama")
    model.resize_token_embeddings(rows)
    make(model=model, processing_class=tokenizer_with("<new>", **special), max_steps=1).train()


def test_a_reference_without_the_models_tokens_is_refused(make):
    model = make.model("llama")  # the reference is loaded by its name, without the new row
    model.resize_token_embeddings(49)
    tokenizer = tokenizer_with("<new>")
    with pytest.raises(ValueError, match=r"reference model has 48 rows, .* trained model 49: it lacks '<new>'"):
        make(model=model, processing_class=tokenizer, beta=0.1)


def test_an_adapter_that_an_engine_would_get_wrong_is_refused(make, monkeypatch):
    """Which ones: test_adapters."""
    take_the_place_of_vllm(monkeypatch, Engine())
    model = tiny.make_model("llama", tie_word_embeddings=True)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(ValueError, match=r"use_vllm merges the adapter into the weight that .* share"):
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


def test_an_adapter_of_the_head_is_refused(make):
    """By TRL, which scores with the weight of the head, without its adapter."""
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "lm_head"])
    with pytest.raises(ValueError, match="Applying a PEFT adapter to `lm_head` is not supported"):
        make(peft_config=config, surrogate="clip")


@pytest.mark.parametrize(("surrogate", "tied"), [("troll", True), ("troll", False), ("clip", True)])
def test_single_tokens_are_scored_trained_and_saved(make, surrogate, tied, tmp_path):
    """Of the embedding, and of the head that it is tied to; what is loaded again is what was trained."""
    tiny.make_model("llama", tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
    base, again = (AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32) for _ in range(2))
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], trainable_token_indices=[10, 11])
    trainer = make(model=base, peft_config=config, surrogate=surrogate, beta=0.1)
    before = tiny.parameters(trainer.model)
    trainer.train()
    assert any("trainable_tokens_delta" in name for name in tiny.changed(before, trainer.model))

    batch = tiny.rolled_out(trainer)
    ids, mask = sequences(batch)
    with torch.no_grad():
        logits = trainer.model.eval()(input_ids=ids, attention_mask=mask).logits
    scores = logits[:, -batch["completion_ids"].shape[1] - 1 : -1].log_softmax(-1)
    scores = scores.gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)
    acts = batch["completion_mask"].bool()
    torch.testing.assert_close(batch["old_per_token_logps"][acts], scores[acts], rtol=0, atol=tiny.LOG_PROB_ERROR)

    trainer.save_model(str(tmp_path / "adapter"))
    merged = load_model(find_model(str(tmp_path / "adapter")), "float32")
    some = torch.arange(3, 30).unsqueeze(0)
    for model in (PeftModel.from_pretrained(again, tmp_path / "adapter"), merged):
        torch.testing.assert_close(model(some).logits, trainer.model(some).logits, rtol=0, atol=tiny.LOG_PROB_ERROR)


# Data sets that are too small


#: Rollouts of two prompts in two updates, and of eight in eight.
EIGHT = {"steps_per_generation": None, "updates_per_rollout": 8}


@pytest.mark.parametrize(
    ("prompts", "settings", "takes"),
    [
        (1, {}, 2),
        (5, {**EIGHT, "max_steps": -1, "num_train_epochs": 2}, 8),
        (3, {"generation_batch_size": 16, "steps_per_generation": None}, 4),
        (1, {"per_device_train_batch_size": 8, "steps_per_generation": 1}, 2),
        (0, {}, 2),
    ],
    ids=str,
)
def test_fewer_prompts_than_a_rollout_takes_are_refused(make, monkeypatch, prompts, settings, takes):
    data = tiny.make_dataset(max(1, prompts)).select(range(prompts))
    monkeypatch.setattr(GRPOTrainer, "training_step", lambda *_: pytest.fail("a step was made"))
    says = rf"^a rollout takes {takes} prompts .* the training set has {prompts} to train on: lower .*, or add prompts$"
    with pytest.raises(ValueError, match=says):
        make(train_dataset=data, **settings).train()


@pytest.mark.parametrize(
    ("prompts", "settings"), [(2, {"max_steps": 2}), (3, {"max_steps": -1, "num_train_epochs": 1})]
)
def test_as_many_prompts_as_a_rollout_takes_train(make, prompts, settings):
    trainer = make(train_dataset=tiny.make_dataset(prompts), **settings)
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_sampler_of_ones_own_decides_what_fills_a_rollout(make):
    class Oversampling(TrollTrainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return [0] * 64

    make(Oversampling, train_dataset=tiny.make_dataset(1), max_steps=1).train()


def test_a_stream_that_ends_within_a_rollout_is_refused(make):
    trainer = make(train_dataset=tiny.make_dataset(5).to_iterable_dataset(), **EIGHT)
    with pytest.raises(ValueError, match=r"^training ended without a step: a rollout takes 8 prompts .* has fewer"):
        trainer.train()


def test_a_stream_is_evaluated(make):
    held_out = tiny.make_dataset(4).to_iterable_dataset()
    trainer = make(eval_dataset=held_out, eval_strategy="steps", eval_steps=2, max_steps=2)
    trainer.train()
    assert any("eval_reward" in entry for entry in trainer.state.log_history)


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
        ({"": 0}, {}, "eval_dataset has 0 rows to evaluate: leave it out"),
        ({"a": 2, "b": 0}, {}, r"eval_dataset\['b'\] has 0 rows to evaluate"),
        (
            {"": 3},
            DROPS,
            "eval_dataset has 3 rows to evaluate, fewer than a batch of 16 completions, which dataloader_d",
        ),
    ],
)
def test_an_evaluation_of_nothing_is_refused_before_training(make, sizes, settings, says):
    evaluated = {name: tiny.make_dataset(9).select(range(size)) for name, size in sizes.items()}
    trainer = make(eval_dataset=evaluated.get("", evaluated), max_steps=1, **settings)
    trainer.train()  # which evaluates nothing
    trainer.args.eval_strategy = "steps"
    with pytest.raises(ValueError, match=f"^{says}"):
        trainer.train()


def test_a_whole_batch_is_evaluated_if_the_last_is_dropped(make):
    trainer = make(eval_dataset=tiny.make_dataset(4), **DROPS)
    assert trainer.evaluate()["eval_completions/mean_length"] > 0


class OfTokens:
    """A reward of single tokens."""

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [0.0] * len(completion_ids)

    def of_tokens(self, completion_ids: list[list[int]], **_: Any) -> list[list[float]]:
        return [[0.0] * len(ids) for ids in completion_ids]


def test_rewards_of_tokens_are_refused_with_their_trainer(make):
    with pytest.raises(ValueError, match=r"'OfTokens' has of_tokens, .* to 0, or .* LabTrainer of troll_lab\.trl"):
        make(reward_funcs=OfTokens())
    make(reward_funcs=[tiny.reward, OfTokens()], reward_weights=[1.0, 0.0])


# Back ends of accelerate


@pytest.mark.parametrize("setting", ["tp_size", "cp_size", "sp_size"])
def test_model_parallelism_is_refused(setting):
    sizes: dict[str, Any] = {f"get_{name}": lambda: 1 for name in ("tp_size", "cp_size", "sp_size")}
    refuse_model_parallelism(SimpleNamespace(**sizes))
    with pytest.raises(ValueError, match=f"cannot be used with {setting}=2: .* Set {setting} to 1, and share .* FSDP2"):
        refuse_model_parallelism(SimpleNamespace(**{**sizes, f"get_{setting}": lambda: 2}))


def test_trainer_refuses_model_parallelism_before_it_prepares(make, monkeypatch):
    """accelerate itself wants as many processes, so that the accelerator is told of them afterwards."""
    original = Trainer.create_accelerator_and_postprocess

    def create(self: Any) -> None:
        original(self)
        self.accelerator.state.parallelism_config = ParallelismConfig(cp_size=2)

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", create)
    with pytest.raises(ValueError, match="cannot be used with cp_size=2"):
        make()


@pytest.mark.parametrize(("empty", "another_empty"), [(False, False), (False, True), (True, False)])
def test_a_reference_that_one_process_lacks_is_refused_in_all(empty, another_empty):
    model = tiny.make_model("llama")
    if empty:
        torch.nn.init.zeros_(model.get_output_embeddings().weight)
    others = torch.tensor([another_empty])
    accelerator: Any = SimpleNamespace(is_fsdp2=True, device="cpu", gather=lambda own: torch.cat([own, others]))
    refuses = pytest.raises(ValueError, match="set fsdp_cpu_ram_efficient_loading to false")
    with refuses if empty or another_empty else nullcontext():
        refuse_an_empty_reference(accelerator, model)
    refuse_an_empty_reference(accelerator, None)
    accelerator.is_fsdp2 = False
    refuse_an_empty_reference(accelerator, model)


def fsdp(kind: str) -> dict[str, Any]:
    return {"fsdp_plugin": SimpleNamespace(state_dict_type=f"StateDictType.{kind}")}


@pytest.mark.parametrize(
    ("plugins", "message"),
    [(fsdp("SHARDED_STATE_DICT"), "FULL_STATE_DICT"), (fsdp("FULL_STATE_DICT"), None), ({}, None)],
)
def test_fsdp_that_saves_only_shards_is_warned_about(recwarn, plugins, message):
    accelerator: Any = SimpleNamespace(state=SimpleNamespace(**plugins))
    warn_about_saving(accelerator)
    assert [message in str(warning.message) for warning in recwarn] == ([] if message is None else [True])
