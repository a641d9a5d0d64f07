from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from troll_lab.evaluation.generate import InverseSampling, Sampling, TransformersGenerator, seed_of, uniform_rows

PROMPTS = ["1 + 1 =", "What is the sum of 12 and 30?", "x", "2 * 3 ="]


def load(folder: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def generator(folder: Path, **changed: Any) -> TransformersGenerator:
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 12} | changed
    return TransformersGenerator(*load(folder), Sampling(**sampling))


def encoded(folder: Path, texts: list[str] = PROMPTS) -> list[list[int]]:
    ids: list[list[int]] = AutoTokenizer.from_pretrained(folder)(texts)["input_ids"]
    return ids


def test_greedy_completions_are_those_of_transformers_for_single_prompts(tiny_model: Path) -> None:
    model, tokenizer = load(tiny_model)
    expected = []
    for ids in encoded(tiny_model):
        row = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12)[0, len(ids) :]
        expected.append(tokenizer.decode(row, skip_special_tokens=True))
    greedy = generator(tiny_model, temperature=0.0)
    assert [one.text for one in greedy.generate(encoded(tiny_model), [0] * 4)] == expected
    assert greedy.generate(encoded(tiny_model), [0] * 4) == greedy.generate(encoded(tiny_model), [1] * 4)


def test_a_completion_depends_only_on_its_prompt_and_seed(tiny_model: Path) -> None:
    sampled = generator(tiny_model)
    ids = encoded(tiny_model)
    together = sampled.generate(ids * 2, list(range(8)))
    alone = [sampled.generate([prompt], [seed])[0] for seed, prompt in enumerate(ids * 2)]
    assert together == alone
    torch.rand(3)  # the global stream of random numbers is not used
    assert sampled.generate(ids[::-1], [3, 2, 1, 0]) == together[:4][::-1]
    assert len({one.text for one in sampled.generate([ids[0]] * 8, list(range(8)))}) > 1


def test_tokens_have_the_probabilities_of_the_logits() -> None:
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


def test_the_ends_of_the_unit_interval_draw_tokens_that_are_possible() -> None:
    scores = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]] * 2)
    ends = torch.tensor([[0.0], [1 - 2**-53]], dtype=torch.float64)
    chosen = InverseSampling(ends, prompt_length=1)(torch.zeros(2, 1, dtype=torch.long), scores)
    assert chosen.argmax(dim=1).tolist() == [1, 3]


def test_top_k_and_top_p_keep_few_tokens(tiny_model: Path) -> None:
    ids, seeds = encoded(tiny_model), [5, 6, 7, 8]
    greedy = generator(tiny_model, temperature=0.0).generate(ids, seeds)
    assert generator(tiny_model, top_k=1).generate(ids, seeds) == greedy
    assert generator(tiny_model, top_p=1e-6).generate(ids, seeds) == greedy
    assert generator(tiny_model, temperature=1e-4).generate(ids, seeds) == greedy
    assert generator(tiny_model).generate(ids, seeds) != greedy


def test_the_models_own_generation_settings_do_not_matter(tiny_model: Path) -> None:
    model, tokenizer = load(tiny_model)
    expected = generator(tiny_model).generate(encoded(tiny_model), [0] * 4)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, do_sample=True, temperature=0.1, top_k=2, repetition_penalty=2.0
    )
    other = TransformersGenerator(model, tokenizer, Sampling(1.0, 1.0, 0, 12))
    assert other.generate(encoded(tiny_model), [0] * 4) == expected


def test_where_a_completion_ends(tiny_model: Path) -> None:
    model, tokenizer = load(tiny_model)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("a")]
    completions = TransformersGenerator(model, tokenizer, Sampling(1.0, 1.0, 0, 60)).generate(
        encoded(tiny_model) * 5, list(range(20))
    )
    whole = generator(tiny_model, max_new_tokens=60).generate(encoded(tiny_model) * 5, list(range(20)))
    assert {one.finished for one in completions} == {True, False}
    for one, other in zip(completions, whole, strict=True):
        assert one.tokens <= 60
        assert one.finished or one.tokens == 60
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


def test_rows_of_random_numbers_are_a_prefix_of_longer_ones() -> None:
    short, long = uniform_rows([4, 5], 10), uniform_rows([5, 4], 30)
    assert torch.equal(short, long.flip(0)[:, :10])


@pytest.mark.parametrize("padding", [None, "<new>"])
def test_padding_that_is_missing_or_has_no_embedding_is_replaced(tiny_model: Path, padding: str | None) -> None:
    expected = generator(tiny_model).generate(encoded(tiny_model), [0, 1, 2, 3])
    model, tokenizer = load(tiny_model)
    if padding is None:
        tokenizer.pad_token = None
    else:
        tokenizer.add_special_tokens({"pad_token": padding})
        assert tokenizer.pad_token_id == model.get_input_embeddings().num_embeddings
    found = TransformersGenerator(model, tokenizer, Sampling(1.0, 1.0, 0, 12))
    assert found.generate(encoded(tiny_model), [0, 1, 2, 3]) == expected
