from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from troll_lab.evaluation.generate import InverseSampling, Sampling, TransformersGenerator, seed_of, uniform_rows

PROMPTS = ["1 + 1 =", "What is the sum of 12 and 30?", "x", "2 * 3 ="]
SEEDS = [5, 6, 7, 8]


def load(folder: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def generator(parts: tuple[Any, Any], **changed: Any) -> TransformersGenerator:
    return TransformersGenerator(
        *parts, Sampling(**{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 12} | changed)
    )


@pytest.fixture
def parts(tiny_model: Path) -> tuple[Any, Any]:
    """A model and its tokenizer, which a test may change."""
    return load(tiny_model)


@pytest.fixture
def ids(parts: tuple[Any, Any]) -> list[list[int]]:
    found: list[list[int]] = parts[1](PROMPTS)["input_ids"]
    return found


@pytest.fixture
def sampled(tiny_model: Path, ids: list[list[int]]) -> list[Any]:
    """The completions of the prompts with `SEEDS`, of a model that was not changed."""
    return generator(load(tiny_model)).generate(ids, SEEDS)


def test_greedy_completions_are_those_of_transformers(parts: tuple[Any, Any], ids: list[list[int]]) -> None:
    model, tokenizer = parts
    rows = [model.generate(torch.tensor([each]), do_sample=False, max_new_tokens=12)[0, len(each) :] for each in ids]
    greedy = generator(parts, temperature=0.0)
    found = greedy.generate(ids, SEEDS)
    assert [one.text for one in found] == [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    assert greedy.generate(ids, [1] * 4) == found


def test_completion_depends_only_on_its_prompt_and_seed(parts: tuple[Any, Any], ids: list[list[int]]) -> None:
    sampling = generator(parts)
    together = sampling.generate(ids, SEEDS)
    torch.rand(3)  # the global stream of random numbers is not used
    assert [sampling.generate([prompt], [seed])[0] for prompt, seed in zip(ids, SEEDS, strict=True)] == together
    assert sampling.generate(ids[::-1], SEEDS[::-1]) == together[::-1]
    assert len({one.text for one in sampling.generate([ids[0]] * 8, list(range(8)))}) > 1


def test_inverse_sampling_draws_by_the_probabilities() -> None:
    torch.manual_seed(0)
    draws, scores = 20000, torch.randn(7) * 2
    scores[3] = -torch.inf
    processor = InverseSampling(uniform_rows(range(draws), 1), prompt_length=1)
    chosen = processor(torch.zeros(draws, 1, dtype=torch.long), scores.expand(draws, 7).clone()).argmax(dim=1)
    counts = torch.bincount(chosen, minlength=7).double()
    assert counts[3] == 0
    possible = torch.arange(7) != 3
    expected = scores.double().softmax(0) * draws
    assert stats.chisquare(counts[possible], expected[possible]).pvalue > 0.001


def test_inverse_sampling_draws_possible_tokens_at_the_ends() -> None:
    scores = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]] * 2)
    ends = torch.tensor([[0.0], [1 - 2**-53]], dtype=torch.float64)
    chosen = InverseSampling(ends, prompt_length=1)(torch.zeros(2, 1, dtype=torch.long), scores)
    assert chosen.argmax(dim=1).tolist() == [1, 3]


@pytest.mark.parametrize("changed", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}])
def test_settings_that_leave_one_token_are_greedy(
    parts: tuple[Any, Any], ids: list[list[int]], sampled: list[Any], changed: dict[str, Any]
) -> None:
    greedy = generator(parts, temperature=0.0).generate(ids, SEEDS)
    assert generator(parts, **changed).generate(ids, SEEDS) == greedy != sampled


def test_generation_settings_of_the_model_do_not_matter(
    parts: tuple[Any, Any], ids: list[list[int]], sampled: list[Any]
) -> None:
    parts[0].generation_config = GenerationConfig(
        eos_token_id=parts[1].eos_token_id, do_sample=True, temperature=0.1, top_k=2, repetition_penalty=2.0
    )
    assert generator(parts).generate(ids, SEEDS) == sampled


def test_completion_ends_at_any_end_token(tiny_model: Path, parts: tuple[Any, Any], ids: list[list[int]]) -> None:
    model, tokenizer = parts
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("a")]
    completions = generator(parts, max_new_tokens=60).generate(ids * 5, list(range(20)))
    whole = generator(load(tiny_model), max_new_tokens=60).generate(ids * 5, list(range(20)))
    assert {one.finished for one in completions} == {True, False}
    for one, other in zip(completions, whole, strict=True):
        assert one.tokens == 60 or (one.finished and one.tokens < 60)
        assert "a" not in one.text
        # Characters, and the token that ended them; the two special tokens that do not end a text are not written.
        assert 0 <= one.tokens - len(one.text) - one.finished <= 4
        assert other.text.startswith(one.text)


def test_seeds_are_those_of_no_other_completion() -> None:
    seeds = {
        seed_of(seed, task, problem, sample)
        for seed in (0, 1)
        for task in ("gsm8k", "aime24")
        for problem in range(50)
        for sample in range(8)
    }
    assert len(seeds) == 2 * 2 * 50 * 8
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_uniform_rows_are_prefixes_of_longer_ones() -> None:
    short, long = uniform_rows([4, 5], 10), uniform_rows([5, 4], 30)
    assert torch.equal(short, long.flip(0)[:, :10])


@pytest.mark.parametrize("padding", [None, "<new>"])
def test_padding_without_an_embedding_is_replaced(
    parts: tuple[Any, Any], ids: list[list[int]], sampled: list[Any], padding: str | None
) -> None:
    model, tokenizer = parts
    if padding is None:
        tokenizer.pad_token = None
    else:
        tokenizer.add_special_tokens({"pad_token": padding})
        assert tokenizer.pad_token_id == model.get_input_embeddings().num_embeddings
    assert generator(parts).generate(ids, SEEDS) == sampled
