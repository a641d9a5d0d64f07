"""A small language model that writes text in word-pieces, for tasks without a right answer."""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from troll_lab.runs.toy_network import (
    EOS,
    IGNORED_LABEL,
    PAD,
    TOY,
    cached_model,
    learn,
    model_config,
    pad_right,
    shuffled_batches,
    token_losses,
    warm_up_progress,
)
from troll_lab.tasks.free_text import paragraphs


@dataclass(frozen=True)
class TextWarmUp:
    """The settings of the model's warm-up by next-token prediction.

    It ends once the loss on text that the model does not learn from has risen, or after `max_steps`.

    Attributes:
        vocab_size: The largest number of word-pieces; the text may have fewer.
        batch_size: The rows of a step. A row begins at a sentence and ends with its paragraph, or after `max_length`.
        max_length: The largest number of tokens of a row.
        learning_rate: The learning rate, constant after a linear rise over the first `rise_steps`.
        test_size: The largest number of rows of a test of the loss.
        test_every: The steps between two tests.
    """

    vocab_size: int = 4096
    max_steps: int = 300
    batch_size: int = 16
    max_length: int = 64
    learning_rate: float = 3e-3
    rise_steps: int = 20
    test_size: int = 256
    test_every: int = 50


def toy_text_model(
    name: str = TOY, *, seed: int = 0, cache_dir: str | Path | None = None, warm_up: TextWarmUp = TextWarmUp()
) -> Path:
    """Returns the folder of a small language model that continues English prose; makes it if the cache lacks it.

    The model is a Qwen3 of about 1.2 million parameters over 4096 word-pieces. It learns from paragraphs that are
    neither in the training nor in the evaluation data of the task `free_text`.

    Args:
        name: One of `TOY_MODELS`.
        seed: The seed of the initial weights and of the order of the text.
        cache_dir: The folder in which models are kept, see `troll_lab.runs.toy_network.cached_model`.
        warm_up: The settings of the warm-up before reinforcement learning.

    Raises:
        OSError: If the cache folder cannot be written.
    """
    learned, tested = paragraphs("warmup"), paragraphs("train")
    tokenizer = word_piece_tokenizer([" ".join(sentences) for sentences in learned], warm_up.vocab_size)
    config = model_config(tokenizer, name)

    def learn_text(model: PreTrainedModel) -> dict[str, Any]:
        rows = _rows(tokenizer, learned, warm_up.max_length)
        return _train(model, rows, _rows(tokenizer, tested, warm_up.max_length)[: warm_up.test_size], warm_up)

    text = hashlib.sha256(repr((learned, tested)).encode()).hexdigest()
    determined_by = {"text": text, "warm_up": asdict(warm_up)}
    return cached_model(config, tokenizer, learn_text, determined_by=determined_by, seed=seed, cache_dir=cache_dir)


def word_piece_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learns a byte-level BPE tokenizer of at most `vocab_size` ids, two of them special (padding, end of text).

    Any text can be encoded, and decoding gives it back exactly.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _rows(tokenizer: PreTrainedTokenizerFast, texts: list[list[str]], max_length: int) -> list[torch.Tensor]:
    """Each sentence with the rest of its paragraph, as ids of at most `max_length` tokens."""
    starts = [" ".join(sentences[first:]) + EOS for sentences in texts for first in range(len(sentences))]
    encoded: list[list[int]] = tokenizer(starts)["input_ids"]
    return [torch.tensor(ids[:max_length]) for ids in encoded]


def _train(
    model: PreTrainedModel, learned: list[torch.Tensor], tested: list[torch.Tensor], warm_up: TextWarmUp
) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=warm_up.learning_rate)
    best, weights, step = float("inf"), model.state_dict(), 0
    with warm_up_progress() as progress:
        bar = progress.add_task("", total=warm_up.max_steps)
        batches = shuffled_batches(len(learned), warm_up.batch_size, warm_up.max_steps)
        for step, batch in enumerate(batches, start=1):
            optimizer.param_groups[0]["lr"] = warm_up.learning_rate * min(1.0, step / warm_up.rise_steps)
            learn(model, optimizer, *_padded([learned[index] for index in batch], model))
            progress.update(bar, advance=1)
            if step % warm_up.test_every == 0 or step == warm_up.max_steps:
                loss = _loss(model, tested, warm_up.batch_size)
                progress.update(bar, description=f"loss {loss:.2f} nats a token on other text")
                if loss > best:
                    break
                best, weights = loss, {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(weights)
    return {"steps": step, "loss": best}


@torch.no_grad()
def _loss(model: PreTrainedModel, rows: list[torch.Tensor], batch_size: int) -> float:
    """The mean loss of a token, in nats."""
    total = sum(
        float(token_losses(model, *_padded(rows[start : start + batch_size], model)).sum())
        for start in range(0, len(rows), batch_size)
    )
    return total / sum(len(row) - 1 for row in rows)


def _padded(rows: list[torch.Tensor], model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    assert model.config.pad_token_id is not None
    return pad_right(rows, model.config.pad_token_id), pad_right(rows, IGNORED_LABEL)
