"""Reinforcement learning of a language model with TROLL, from prompts to updates, in plain torch.

    python examples/loop.py                          # a tiny model learns to sort letters, in a minute or two on a CPU
    python examples/loop.py --model Qwen/Qwen3-0.6B --data questions.tsv --max_new_tokens 64

The tiny model begins with random weights, and learns from rewards only. For `--model`, each line of `--data` is a
prompt, a tab, and the answer. `reward` says how good a completion is: replace it by your own.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import troll

LETTERS, SHORTEST, LONGEST, END_OF_PROMPT = "abcd", 2, 4, ">"


def letters_to_sort(count: int) -> list[tuple[str, str]]:
    """Prompts such as `cab>`, each with its answer, `abc`."""
    words = ["".join(random.choices(LETTERS, k=random.randint(SHORTEST, LONGEST))) for _ in range(count)]
    return [(word + END_OF_PROMPT, "".join(sorted(word))) for word in words]


def reward(completion: str, answer: str) -> float:
    """The share of characters in their right place, between 0 and 1: a random model never gets a whole answer right."""
    same = sum(ours == right for ours, right in zip(completion, answer, strict=False))
    return same / max(len(completion), len(answer), 1)


def tiny_model() -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """A Qwen3 of 83,000 random weights, and a tokenizer with a token for each character."""
    ids = {token: token_id for token_id, token in enumerate(["<pad>", "<eos>", END_OF_PROMPT, *LETTERS])}
    characters = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>")
    config = Qwen3Config(
        vocab_size=len(ids), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, bos_token_id=None, eos_token_id=ids["<eos>"], pad_token_id=ids["<pad>"],
    )  # fmt: skip
    return Qwen3ForCausalLM(config), tokenizer


def main() -> None:
    """Reads the options and trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model of transformers, by name or path; by default a tiny one is made")
    parser.add_argument("--data", type=Path, help="for --model: lines of a prompt, a tab, and its answer")
    parser.add_argument("--rollouts", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a rollout")
    parser.add_argument("--group", type=int, default=16, help="completions of a prompt, which are compared")
    parser.add_argument("--updates", type=int, default=4, help="updates on a rollout, at least 2")
    parser.add_argument("--kl_bound", type=float, default=0.05, help="how far a token's policy may move, in nats")
    parser.add_argument("--kl_target", type=float, default=0.1, help="how far completions should move, in nats")
    parser.add_argument(
        "--learning_rate", type=float, help="the search begins at a hundredth of it; 1e-2, or 1e-5 with --model"
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max_new_tokens", type=int, default=LONGEST + 1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if (options.model is None) != (options.data is None):
        parser.error("--model and --data go together")
    if options.group < 2 or not 2 <= options.updates <= options.prompts * options.group:
        parser.error("--group and --updates must be at least 2, and each update needs a completion")
    first_rate = (1e-2 if options.model is None else 1e-5) if options.learning_rate is None else options.learning_rate
    random.seed(options.seed)
    torch.manual_seed(options.seed)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    questions: list[tuple[str, str]] = []
    model: Any  # transformers' types of models and tokenizers do not include each other
    tokenizer: Any
    if options.model is None:
        model, tokenizer = tiny_model()
    else:
        # In float32, since the rounding of bfloat16 would be measured as KL, and small updates would be lost.
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # some have none
        for line in filter(str.strip, options.data.read_text(encoding="utf-8").splitlines()):
            prompt, answer = line.split("\t")
            if tokenizer.chat_template is not None:
                message = [{"role": "user", "content": prompt}]
                prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            questions.append((prompt, answer))
    # Without dropout: with it, the old and the new policy would differ before any update.
    model = model.to(device).eval()
    ends = model.generation_config.eos_token_id
    eos = torch.tensor(ends if isinstance(ends, list) else [ends], device=device)
    # A new configuration: the model's own top-k, top-p or penalty would sample from another policy than is trained.
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=options.temperature,
        top_k=0,
        max_new_tokens=options.max_new_tokens,
        eos_token_id=eos.tolist(),
        pad_token_id=tokenizer.pad_token_id,
    )

    # The target sets the rate of every update.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    target = troll.KLTarget(options.kl_target, updates_per_rollout=options.updates, learning_rate=first_rate)
    print("         reward  all right  KL, last update  wanted  projected: tokens  largest KL  rate     a completion")
    for rollout in range(options.rollouts):
        # Sampling: a group of completions for each prompt. Prompts are padded on the left, completions on the right.
        few = random.choices(questions, k=options.prompts) if questions else letters_to_sort(options.prompts)
        asked = [question for question in few for _ in range(options.group)]
        prompts = tokenizer(
            [prompt for prompt, _ in asked],
            return_tensors="pt",
            padding=True,
            padding_side="left",
            return_token_type_ids=False,
            add_special_tokens=options.model is None or tokenizer.chat_template is None,  # a template has them
        ).to(device)
        input_ids: Tensor = model.generate(**prompts)
        completions = input_ids[:, prompts["input_ids"].shape[1] :]

        # What counts is the completion up to its end-of-sequence token, which was sampled too.
        end = torch.isin(completions, eos).long()
        counts = end.cumsum(-1) - end == 0
        attention_mask = torch.cat([prompts["attention_mask"], counts.long()], -1)
        unscored = torch.full_like(prompts["input_ids"], -100)
        labels = torch.cat([unscored, completions.masked_fill(~counts, -100)], -1)

        # Rewards, and advantages: how much better a completion is than the others of its group, as in GRPO.
        texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
        scores = [reward(text, answer) for text, (_, answer) in zip(texts, asked, strict=True)]
        rewards = torch.tensor(scores, device=device)
        groups = rewards.view(-1, options.group)
        advantages = (groups - groups.mean(-1, keepdim=True)) / (groups.std(-1, keepdim=True) + 1e-4)
        advantages = advantages.flatten()

        # The policy that sampled, as it is before the first update: its most likely tokens at every position.
        old = troll.huggingface.capture(model, input_ids, labels, attention_mask, temperature=options.temperature)

        largest_kl = 0.0
        for age, rows in enumerate(torch.randperm(len(asked), device=device).tensor_split(options.updates)):
            step = troll.huggingface.trust_region_step(
                model,
                input_ids[rows],
                labels[rows],
                old[rows],
                kl_bound=options.kl_bound,
                attention_mask=attention_mask[rows],
                temperature=options.temperature,
            )
            loss, metrics = troll.troll_loss(step, advantages[rows], mask=labels[rows, 1:] != -100)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            # The learning rate that moves the network as far as wanted. `age` updates were made since the sampling.
            kl, length = metrics["kl_before_mean"].item(), counts[rows].sum(-1).float().mean().item()
            rate = target.update(kl, age, length=length, success=rewards[rows].mean().item())
            for weights in optimizer.param_groups:
                weights["lr"] = rate
            optimizer.step()
            largest_kl = max(largest_kl, metrics["kl_after_max"].item())

        print(
            f"{rollout:7}  {rewards.mean():6.3f}  {(rewards == 1).float().mean():9.1%}  {kl * length:15.4f}"
            f"  {target.wanted(age):6.4f}  {metrics['projected_fraction']:17.1%}  {largest_kl:10.4f}  {rate:.1e}"
            f"  {asked[0][0][-20:]!r} → {texts[0][:20]!r}",
            flush=True,
        )


if __name__ == "__main__":
    main()
