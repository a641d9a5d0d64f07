"""What a rollout is drawn from is the old policy, whoever set it; or the run is refused before its first step."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, GenerationMixin, LogitsProcessor
from trl import GRPOTrainer

from tests.tolerance import within
from tests.troll.trl import tiny, vision
from tests.troll.trl.engine import Engine, take_the_place_of_vllm
from troll.trl import complete, sampling, seam
from troll.trl.old_policy import OLD_POLICY
from troll.trust_region.policy.packed import PackedPolicy

SIZE = len(tiny.VOCABULARY)
#: The whole policy, so that it can be compared.
WHOLE: dict[str, Any] = {"support_top_k": SIZE, "mass_threshold": 0.0}

#: Settings of transformers that change what is drawn, and that the old policy cannot contain.
OTHERS: dict[str, Any] = {
    "typical_p": 0.5,
    "epsilon_cutoff": 0.05,
    "eta_cutoff": 0.05,
    "top_h": 0.5,
    "repetition_penalty": 1.5,
    "encoder_repetition_penalty": 1.5,
    "no_repeat_ngram_size": 1,
    "encoder_no_repeat_ngram_size": 1,
    "bad_words_ids": [[7], [8, 9]],
    "suppress_tokens": [7, 8],
    "begin_suppress_tokens": [7, 8],
    "sequence_bias": [[[7], 3.0]],
    "min_new_tokens": 5,
    "min_length": 12,
    "forced_bos_token_id": 10,
    "forced_eos_token_id": 2,
    "exponential_decay_length_penalty": [1, 1.5],
    "guidance_scale": 1.5,
    "watermarking_config": {"greenlist_ratio": 0.5},
    "num_beams": 2,
    "num_return_sequences": 2,
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "constraints": ["any"],
    "force_words_ids": [[7]],
    "prompt_lookup_num_tokens": 2,
    "use_mtp": True,
    "token_healing": True,
    "cache_implementation": "quantized",
    "stop_strings": ["ab"],
    "return_dict_in_generate": True,
    "a_setting_of_next_year": 0.5,
}

#: Settings that the old policy follows, as fields or in `generation_kwargs`, and what else is in the model's file.
FOLLOWED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "temperature": ({"temperature": 0.6}, {}),
    "top_k": ({"top_k": 5}, {}),
    "top_p": ({"top_p": 0.8}, {}),
    "min_p": ({"min_p": 0.3}, {}),
    "all": ({"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.02}, {}),
    "none": ({"top_k": None, "top_p": None, "min_p": None}, {}),
    "all of the file": (
        {"top_k": None, "top_p": None},
        {"temperature": 0.6, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
    ),
    "min_p of the file": ({}, {"min_p": 0.3}),
    "no top_k of the file": ({"top_k": None}, {"top_k": 0}),
    "Qwen3": ({}, {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}),
    "Qwen2.5": ({}, {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}),
    "greedy": ({}, {"do_sample": False}),
    "integers": ({"temperature": 2, "top_p": 1, "min_p": 0}, {}),
    "neutral": (
        {"repetition_penalty": 1, "cache_implementation": "static"},
        {"suppress_tokens": [], "begin_suppress_tokens": [], "typical_p": 1, "num_beams": 1.0, "min_p": 0, "top_k": -1},
    ),
}


class Recorder(LogitsProcessor):
    """Keeps the log-probabilities from which `generate` draws: [call][token], (B, V)."""

    def __init__(self) -> None:
        self.calls: list[list[Tensor]] = []

    def watch(self, model: Any) -> None:
        """Adds itself after all others, in every call of `generate` from now on."""
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        processors = model._get_logits_processor

        def with_recorder(*args: Any, **kwargs: Any) -> Any:
            found = processors(*args, **kwargs)
            self.calls.append([])
            return type(found)([*found, self])

        model._get_logits_processor = with_recorder

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        self.calls[-1].append(scores.log_softmax(-1))
        return scores

    def rows(self) -> list[list[Tensor]]:
        """[completion][token], (V,)."""
        return [list(row) for call in self.calls for row in torch.stack(call, 1)]


def assert_drawn_from_old_policy(trainer: Any) -> None:
    """A rollout's tokens are drawn from the old policy: the same tokens, with the same probabilities."""
    recorder = Recorder()
    recorder.watch(trainer.model)
    rolled_out = tiny.rolled_out(trainer)
    drawn, tokens = recorder.rows(), 0
    assert len(drawn) == len(rolled_out[OLD_POLICY]) == 8
    for row, packed in enumerate(rolled_out[OLD_POLICY]):
        policy = packed.unpack()
        for place in rolled_out["completion_mask"][row].nonzero().flatten().tolist():
            one, expected = policy[place], drawn[row][place]
            kept = one.token_ids[one.used]
            assert set(kept.tolist()) == set((expected > -torch.inf).nonzero().flatten().tolist())
            torch.testing.assert_close(one.log_probs[one.used], expected[kept], rtol=0, atol=within(1e-5))
            own = rolled_out["old_per_token_logps"][row, place]
            token = rolled_out["completion_ids"][row, place]
            torch.testing.assert_close(own, expected[token], rtol=0, atol=within(1e-5))
            tokens += 1
    assert tokens > 20


def model_with(file: dict[str, Any], architecture: str = "llama") -> Any:
    """A tiny model whose generation_config.json has these settings."""
    model: Any = tiny.make_model(architecture)
    known = GenerationConfig(**{"do_sample": True} | file)  # which makes objects of some
    for name in file:
        setattr(model.generation_config, name, getattr(known, name))
    return model


@pytest.mark.parametrize("name", FOLLOWED)
def test_rollout_is_drawn_from_the_old_policy(make, name):
    settings, file = FOLLOWED[name]
    assert_drawn_from_old_policy(make(model=model_with(file), **WHOLE, **settings))


@pytest.mark.parametrize("name", ["all", "none", "integers", "neutral"])
def test_generation_kwargs_become_fields(config, name):
    """So the sampler is the same wherever they are from."""
    settings, _ = FOLLOWED[name]
    by_field, by_kwargs = config(**settings), config(generation_kwargs=settings)
    assert {each: getattr(by_kwargs, each) for each in sampling.POLICY} == {
        each: getattr(by_field, each) for each in sampling.POLICY
    }
    assert (by_kwargs.generation_kwargs or {}).keys() == settings.keys() - {*sampling.POLICY}


def test_what_only_the_file_sets_is_switched_off_for_rollouts(make):
    model = model_with(OTHERS)
    before = copy.deepcopy(model.generation_config)
    with pytest.warns(UserWarning, match="generation_config.json: .* switched off") as caught:
        trainer = make(model=model, **WHOLE)
    (said,) = [text for warning in caught if "switched off" in (text := str(warning.message))]
    assert [name for name in OTHERS if f"{name}=" not in said] == []
    assert_drawn_from_old_policy(trainer)
    before.pad_token_id = model.generation_config.pad_token_id  # which TRL sets
    assert model.generation_config == before and model.generation_config.typical_p == OTHERS["typical_p"]


@pytest.mark.parametrize(
    "name", [*sorted(OTHERS.keys() - {"suppress_tokens"}), "do_sample", "logit_bias", "min_tokens", "top_z"]
)
def test_a_setting_that_the_old_policy_cannot_follow_is_refused(config, name):
    value = OTHERS.get(name, False if name == "do_sample" else {3: 1.0} if name == "logit_bias" else 2)
    with pytest.raises(ValueError, match=rf"{name}=.* old policy .* (set {name}=|leave {name} out)"):
        config(generation_kwargs={name: value})


def test_a_penalty_by_a_field_is_refused_too(config):
    with pytest.raises(ValueError, match=r"repetition_penalty=1.05 .* set repetition_penalty=1.0"):
        config(repetition_penalty=1.05)


@pytest.mark.parametrize("anchor", [{}, {"anchor": "rollout", "rollout_func": lambda *_: {}}], ids=["old", "rollout"])
def test_suppressed_tokens_are_refused(make, anchor):
    with pytest.raises(ValueError, match=r"suppress_tokens=.* set suppress_tokens=None"):
        make(generation_kwargs={"suppress_tokens": [7, 8]}, **anchor)


@pytest.mark.parametrize(("name", "value"), [(name, x) for name in sampling.NEUTRAL for x in sampling.NEUTRAL[name]])
def test_neutral_values_are_left_alone(name, value):
    assert not sampling.changes_distribution(name, value) and not sampling.changes_distribution(name, None)
    plain, neutral = (GenerationConfig(**{"do_sample": True, **given}) for given in ({}, {name: value}))
    # An empty list of tokens to suppress makes a processor that does nothing.
    empty = {f"Suppress{when}LogitsProcessor" for when in ("Tokens", "TokensAtBegin")} if value == [] else set()
    model = tiny.make_model("llama")
    assert seam.score_processors(model, neutral) - empty == seam.score_processors(model, plain)


def test_neutral_values_are_left_alone_without_a_word(make):
    neutral = {"suppress_tokens": [], "begin_suppress_tokens": [], "typical_p": 1, "min_p": 0, "top_k": 0, "top_p": 1}
    with tiny.no_warnings_about("generation_config.json"):
        trainer = make(model=model_with(neutral), top_k=None, top_p=None, generation_kwargs=neutral, **WHOLE)
    assert_drawn_from_old_policy(trainer)
    assert trainer.args.truncation is None


def test_every_setting_of_transformers_processors_is_known():
    """To change the distribution."""
    names = set(GenerationMixin._get_logits_processor.__code__.co_names) & vars(GenerationConfig()).keys()
    harmless = {"max_length", "use_cache", "renormalize_logits", "remove_invalid_values"}
    assert names & sampling.INERT == harmless
    for name, default in GenerationConfig._get_default_generation_params().items():
        assert name in sampling.POLICY or name == "do_sample" or not sampling.changes_distribution(name, default)


def own_rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A rollout function that samples as the trainer does."""
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    completion_ids, _ = complete(trainer, ids)
    return {"prompt_ids": ids, "completion_ids": completion_ids, "logprobs": None}


DOORS: dict[str, dict[str, Any]] = {
    "rollout function": {"rollout_func": own_rollout},
    "LoRA": {"peft_config": LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)},
    "other surrogate": {"surrogate": "kl_penalty"},
    "clip on the kept set": {"surrogate": "clip", "truncated_ratio": True},
}


@pytest.mark.parametrize("door", DOORS)
def test_every_way_to_generate_draws_from_the_old_policy(make, door):
    file = {"min_p": 0.1, "typical_p": 0.5, "no_repeat_ngram_size": 1, "num_beams": 2}
    settings = {"top_p": 0.9, "temperature": 0.8} | DOORS[door]
    assert_drawn_from_old_policy(make(model=model_with(file), **WHOLE, **settings))


@pytest.mark.parametrize("top_p", [None, 0.8])
def test_continuous_batching_draws_from_the_old_policy(make, top_p):
    """Which reads no file. It mixes the rows of a call, so every old policy must be one of what was drawn from."""
    file = {"min_p": 0.3, "top_p": 0.2, "typical_p": 0.5}
    trainer = make(model=model_with(file), use_transformers_continuous_batching=True, top_k=None, top_p=top_p, **WHOLE)
    trainer.continuous_batching_config.num_blocks = 16  # of its cache, which it makes as large as the memory allows
    trainer.continuous_batching_config.max_batch_tokens = 64
    recorder = Recorder()
    recorder.watch(trainer.model)
    rolled_out = tiny.rolled_out(trainer)
    drawn = torch.cat([step for call in recorder.calls for step in call]).exp()
    scored = rolled_out["completion_mask"].bool()
    old = PackedPolicy.stack(rolled_out[OLD_POLICY]).unpack()[scored]
    whole = torch.zeros(len(old.slot), SIZE + 1)
    whole.scatter_(-1, old.token_ids.where(old.used, SIZE), old.log_probs.exp())
    apart = (whole[:, None, :SIZE] - drawn).abs().amax(-1).amin(-1)
    assert float(apart.max()) <= within(1e-5)
    assert bool((old.used.sum(-1) < SIZE).all()) == (top_p is not None)
    with pytest.raises(RuntimeError, match="generation left the model in training mode"):
        trainer.evaluate(tiny.make_dataset(4))


@pytest.mark.parametrize(("asked", "kept"), [(None, 50), (0, 100), (5, 5)])
def test_top_k_none_is_what_transformers_makes_of_it(make, asked, kept):
    """A vocabulary of more than its default of 50."""
    model = model_with({})
    model.resize_token_embeddings(100, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[SIZE:].normal_(std=float(model.lm_head.weight[:SIZE].std()))
    trainer = make(model=model, support_top_k=100, mass_threshold=0.0, top_k=asked)
    assert_drawn_from_old_policy(trainer)
    assert tiny.rolled_out(trainer)[OLD_POLICY][0].unpack()[0].used.sum() == kept


def test_configuration_says_what_the_sampler_does(make):
    with pytest.warns(UserWarning, match="sampled with min_p=0.3, which the old policy follows"):
        trainer = make(model=model_with({"min_p": 0.3}), top_k=None)
    assert (trainer.args.top_k, trainer.args.min_p) == (50, 0.3)
    assert trainer.args.truncation is not None
    assert make(top_p=0.9).args.min_p is None


def test_file_that_does_not_go_with_the_configuration_is_named(make, tmp_path):
    model_with({"do_sample": True, "min_p": 0.3}).save_pretrained(tmp_path / "model")
    settings = {"kl_in_reward": True, "beta": 0.1, "advantage_estimator": "rloo"}
    with pytest.raises(ValueError, match=r"min_p=0.3, from the model's generation_config.json, and kl_in_reward"):
        make(model=AutoModelForCausalLM.from_pretrained(tmp_path / "model"), **settings)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert make(model=model, min_p=0.0, **settings).args.truncation is None


def test_temperature_has_one_value_everywhere(make):
    trainer = make(generation_kwargs={"temperature": 0.6, "max_new_tokens": 4})
    assert trainer.temperature == trainer.args.temperature == trainer.generation_config.temperature == 0.6
    assert trainer.args.generation_kwargs == {"max_new_tokens": 4}
    assert trainer.generation_config.max_new_tokens == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"generation_kwargs": {"temperature": None}}, "temperature must be a number"),
        ({"use_vllm": True, "temperature": 0.001}, r"temperature must be at least 0.01 with vLLM, .* got 0.001"),
    ],
)
def test_a_temperature_that_no_policy_has_is_refused(config, settings, message):
    with pytest.raises(ValueError, match=message):
        config(**settings)


@pytest.mark.parametrize(("ends", "by"), [(20, "generation_kwargs"), ([7, 9], "file")])
def test_a_completion_ends_where_the_sampler_ends_it(make, ends, by):
    """What `generate` fills a row up with was not sampled."""
    given = {"eos_token_id": ends}
    trainer = make(model=model_with(given if by == "file" else {}), generation_kwargs=None if by == "file" else given)
    rows = tiny.unpadded(tiny.rolled_out(trainer))
    ends = {*trainer.eos_token_ids}
    assert ends >= ({20} if 20 in ends else {7, 9}) and any(row[-1] in ends for row in rows)
    assert all(not ends & {*row[:-1]} and trainer.processing_class.pad_token_id not in row for row in rows)


@pytest.mark.parametrize(
    ("name", "value"), [("top_p", 0.5), ("temperature", 0.6), ("min_p", 0.1), ("typical_p", 0.5), ("num_beams", 2)]
)
def test_settings_changed_after_the_trainer_was_made_are_refused(make, name, value):
    trainer = make()
    setattr(trainer.model.generation_config, name, value)  # of the saved file, and of no rollout
    sampling.refuse_changes(trainer)
    setattr(trainer.generation_config, name, value)
    with pytest.raises(ValueError, match=f"{name}="):
        trainer.train()
    trainer.generation_config = GenerationConfig(**{"do_sample": True, "max_new_tokens": 8, name: value})
    with pytest.raises(ValueError, match="old policy"):
        sampling.refuse_changes(trainer)


def test_a_changed_temperature_of_the_trainer_is_refused(make):
    trainer = make()
    trainer.temperature = 0.6
    with pytest.raises(ValueError, match=r"trainer.temperature was changed to temperature=0.6"):
        sampling.refuse_changes(trainer)


FILE_OF_TRL = {"min_p": 0.3, "no_repeat_ngram_size": 1}


@pytest.mark.parametrize("settings", [{}, {"generation_kwargs": {"temperature": 0.6, "typical_p": 0.9}}], ids=str)
def test_clip_samples_and_learns_as_grpo(make, settings):
    with tiny.no_warnings_about("generation_config.json"):
        ours = make(model=model_with(FILE_OF_TRL), surrogate="clip", **settings)
    theirs = make(GRPOTrainer, model=model_with(FILE_OF_TRL), **settings)
    found = []
    for trainer in (ours, theirs):
        inputs = tiny.rollout(trainer)[0]
        found.append((inputs, *tiny.loss_and_gradients(trainer, inputs)))
    (one, loss, gradients), (other, expected, expected_gradients) = found
    assert torch.equal(one["completion_ids"], other["completion_ids"])
    assert torch.equal(one["old_per_token_logps"], other["old_per_token_logps"])
    assert loss == expected
    assert all(torch.equal(gradients[name], x) for name, x in expected_gradients.items())


@pytest.mark.parametrize("family", vision.FAMILIES)
def test_vision_models_suppress_their_placeholders(make, family):
    data = {"train_dataset": vision.make_dataset(), "processing_class": vision.make_processor(family)}
    model = vision.make_model(family)
    number = model.config.image_token_id
    for settings in ({}, {"generation_kwargs": {"suppress_tokens": [number]}}):
        with tiny.no_warnings_about("generation_config.json"):
            trainer = make(model=model, **data, **settings)
        assert trainer.generation_config.suppress_tokens == [number]
    tiny.rollout(trainer)
    with pytest.raises(ValueError, match="suppress_tokens="):
        make(model=model, **data, generation_kwargs={"suppress_tokens": [number, 7]})


def test_vllm_gets_every_setting_that_a_file_could_fill_in(make, monkeypatch):
    take_the_place_of_vllm(monkeypatch, Engine())
    model = model_with({"min_p": 0.3, "top_k": 5, "typical_p": 0.5})
    trainer = make(model=model, use_vllm=True, vllm_mode="colocate", top_k=None, top_p=None, repetition_penalty=None)
    engine = trainer.vllm_generation
    found = engine.temperature, engine.top_k, engine.top_p, engine.min_p, engine.repetition_penalty
    assert found == (1.0, 0, 1.0, None, 1.0)  # TRL sends 0 for min_p
    assert trainer.args.truncation is None


def test_processor_without_a_setting_is_refused(make, monkeypatch):
    class Doubling(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
            return 2 * scores

    processors = GenerationMixin._get_logits_processor

    def more(*args: Any, **kwargs: Any) -> Any:
        return [*processors(*args, **kwargs), Doubling()]

    monkeypatch.setattr(GenerationMixin, "_get_logits_processor", more)
    with pytest.raises(ValueError, match="changes the distribution of this model's tokens by Doubling"):
        make()
    make(surrogate="clip")
