"""Which K, δ and tail the distributions of a real model need.

    python -m benchmarks coverage --model FOLDER [FOLDER ...]

At each temperature the model samples a rollout on sums, on GSM8K's questions and on open text, and is trained on it for
the updates of a rollout, with random rewards. So the old policy p and the new one p̃ are both known on the whole
vocabulary. What K + 1 outcomes show is compared with that, in float64.
"""

from __future__ import annotations

import copy
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

import troll
from benchmarks import measure
from troll.trust_region.diagnostics import outside_support
from troll_lab import recipes
from troll_lab.tasks import TaskConfig, load_task

TEMPERATURES = (1.0, 0.7, 0.3)
TOP_KS = (16, 32, 64, 128, 256, 512, 1024)
MASS_THRESHOLDS = (1e-5, 1e-3, 1e-2, 0.1)
#: K and δ: every K, and every δ where K hardly limits what is kept.
SUPPORTS = [
    *((top_k, MASS_THRESHOLDS[0]) for top_k in TOP_KS),
    *((TOP_KS[-1], delta) for delta in MASS_THRESHOLDS[1:]),
]
KL_BOUNDS = (0.05, 0.005)
#: How many outcomes the tail beyond so many tokens could be: equal shares of its old mass, likelier tokens first.
TAIL_BEYOND, TAIL_BUCKETS = 64, (1, 4, 16, 64)

#: All weights, at a rate that moves every text's policy by about a bound.
UPDATES, LEARNING_RATE = 8, 1e-5
#: Sequences, and the most tokens of each: about as many tokens of each kind of text.
ROLLOUT = {"sums": (56, 14), "GSM8K": (16, 48), "open text": (16, 48)}
#: Positions whose whole vocabulary is compared at a time.
ROWS = 64

GSM8K = Path("../shared/data/gsm8k/test.jsonl")
OPEN = [
    "Write the beginning of a story about a lighthouse.",
    "Describe a market in the morning.",
    "Write a letter to a friend whom you have not seen for years.",
    "What makes a good teacher?",
    "Write a poem about rain.",
    "Tell me about an animal that you like.",
    "Invent a recipe for a soup, and say where it comes from.",
    "Write a dialogue between a cat and a clockmaker.",
]


@dataclass(frozen=True)
class Rollout:
    """Sampled sequences.

    Attributes:
        ids: (B, L), prompts padded on the left.
        attention: (B, L), 0 where padded.
        labels: (B, L), the sampled tokens; −100 elsewhere.
    """

    ids: Tensor
    attention: Tensor
    labels: Tensor

    def part(self, rows: Tensor) -> Rollout:
        """Some of the sequences."""
        return Rollout(self.ids[rows], self.attention[rows], self.labels[rows])


def texts() -> list[str]:
    """The kinds of text with prompts on this machine; says which are skipped, and why."""
    missing = [] if GSM8K.is_file() else ["GSM8K"]
    for text in missing:
        Console().print(f"skipped: {text} ({GSM8K} is missing)")
    return [text for text in ROLLOUT if text not in missing]


def size(text: str) -> tuple[int, int]:
    """The sequences of a rollout of a kind of text, and the most tokens of each."""
    return (8, 4) if measure.small else ROLLOUT[text]


def conversations(text: str, count: int) -> list[list[dict[str, str]]]:
    """The prompts, as conversations.

    Args:
        text: A kind of text, of `ROLLOUT`. Sums are asked as the recipe smollm2-sums asks them.
        count: How many; each of the open prompts is asked several times.
    """
    if text == "sums":
        recipe, _ = recipes.read("smollm2-sums")
        config = TaskConfig(recipe["task"], task_options=recipe["task_options"], train_size=count, eval_size=1)
        return list(load_task(config, conversational=True).train_dataset["prompt"])
    if text == "GSM8K":
        lines = GSM8K.read_text(encoding="utf-8").splitlines()[:count]
        asked = [json.loads(line)["question"] for line in lines]
    else:
        asked = list(itertools.islice(itertools.cycle(OPEN), count))
    return [[{"role": "user", "content": prompt}] for prompt in asked]


@torch.no_grad()
def sample(
    model: Any, tokenizer: PreTrainedTokenizerBase, text: str, temperature: float, count: int, length: int
) -> Rollout:
    """Samples a rollout of so many sequences, of at most so many tokens, from the whole vocabulary."""
    encoded: Any = tokenizer.apply_chat_template(
        conversations(text, count), add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    encoded.to(model.device)
    start = encoded["input_ids"].shape[1]
    ids = model.generate(**encoded, do_sample=True, temperature=temperature, top_k=0, top_p=1.0, max_new_tokens=length)
    ended = (ids[:, start:] == tokenizer.eos_token_id).cumsum(-1)
    sampled = torch.cat([torch.ones_like(ended[:, :1]), (ended == 0)[:, :-1]], -1).bool()
    labels = torch.cat([torch.full_like(ids[:, :start], -100), ids[:, start:].where(sampled, -100)], -1)
    attention = torch.cat([encoded["attention_mask"], sampled.long()], -1)
    return Rollout(ids, attention, labels)


def train(model: Any, rollout: Rollout, temperature: float) -> None:
    """Updates the model on a rollout by TROLL; the advantage of a sequence is 1 or −1 at random."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0)
    inputs = {"attention_mask": rollout.attention, "temperature": temperature}
    old = troll.huggingface.capture(model, rollout.ids, rollout.labels, **inputs)
    advantages = (torch.randint(2, (len(rollout.ids),)) * 2.0 - 1).to(rollout.ids.device)
    for rows in torch.arange(len(rollout.ids)).chunk(UPDATES):
        part = rollout.part(rows)
        step = troll.huggingface.trust_region_step(
            model, part.ids, part.labels, old[rows], attention_mask=part.attention, temperature=temperature
        )
        loss, _ = troll.troll_loss(step, advantages[rows], part.labels[:, 1:] != -100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def hidden_states(model: Any, rollout: Rollout) -> Tensor:
    """The input of the LM head at the sampled tokens, (N, width)."""
    scored = rollout.labels[:, 1:] != -100
    positions = (rollout.attention.cumsum(-1) - 1).clamp(min=0)
    read = model.base_model(input_ids=rollout.ids, attention_mask=rollout.attention, position_ids=positions)
    return read.last_hidden_state[:, :-1][scored]


def compare(new: Tensor, old: Tensor, token_ids: Tensor) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Compares what the K + 1 outcomes say with the whole vocabulary, token by token.

    Args:
        new: (N, V) float64, the logits of p̃ at the temperature.
        old: (N, V) float64, those of p.
        token_ids: (N,), the sampled tokens.

    Returns:
        A row for each K and δ, of tensors (N,); and one for each number of buckets of the tail beyond 64 tokens.
    """
    every = troll.capture(old, token_ids, top_k=old.shape[-1], mass_threshold=0)
    dense = {bound: troll.trust_region_step(new, every, kl_bound=bound) for bound in KL_BOUNDS}
    whole_kl = dense[KL_BOUNDS[0]].kl_before
    rows, of_tails = [], []
    for top_k, delta in SUPPORTS:
        policy = troll.capture(old, token_ids, top_k=top_k, mass_threshold=delta)
        steps = {bound: troll.trust_region_step(new, policy, kl_bound=bound) for bound in KL_BOUNDS}
        row: dict[str, Any] = {
            "top_k": top_k,
            "mass_threshold": delta,
            "support": policy.used.sum(-1),
            "tail_mass": policy.tail_log_prob.exp(),
            "kl": whole_kl,
            "gap": whole_kl - steps[KL_BOUNDS[0]].kl_before,
        }
        for bound, whole in dense.items():
            row |= {
                f"projected_{bound}": whole.projected,
                f"disagree_{bound}": whole.projected != steps[bound].projected,
                f"ratio_error_{bound}": torch.expm1(steps[bound].log_ratio - whole.log_ratio).abs(),
            }
        rows.append(row)
        if top_k == TAIL_BEYOND:
            tail = outside_support(policy)
            of_tails = [
                {"buckets": count, "gap": row["gap"], "seen": seen_by_buckets(new, old, tail, count)}
                for count in TAIL_BUCKETS
            ]
    return rows, of_tails


def seen_by_buckets(new: Tensor, old: Tensor, tail: Tensor, count: int) -> Tensor:
    """The part of the gap that a tail of several outcomes would see: `p̃(T) KL(p̃(·|T) ‖ p(·|T))` over buckets, (N,).

    Args:
        new: (N, V), the logits of p̃.
        old: (N, V), those of p.
        tail: (N, V) bool, T.
        count: The buckets: equal shares of p(T), likelier tokens first.
    """
    p, q = (logits.softmax(-1).where(tail, 0.0) for logits in (old, new))
    order = p.argsort(-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    middle = (p.cumsum(-1) - p / 2) / p.sum(-1, keepdim=True)
    bucket = (middle * count).long().clamp(0, count - 1)
    old_mass, new_mass = (p.new_zeros(len(p), count).scatter_add(-1, bucket, x) for x in (p, q))
    ratio = (new_mass / old_mass) * (p.sum(-1) / q.sum(-1))[:, None]
    return torch.special.xlogy(new_mass, ratio).where(old_mass > 0, 0.0).sum(-1)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one K and δ, from the rows of all its positions."""
    all_of = {
        name: torch.cat([row[name] for row in rows]).double() for name in rows[0] if torch.is_tensor(rows[0][name])
    }
    means = {name: all_of[name].mean().item() for name in all_of}
    errors = {name: values for name, values in all_of.items() if name.startswith("ratio_error")}
    return {
        **{name: value for name, value in rows[0].items() if not torch.is_tensor(value)},
        **means,
        "tokens": len(all_of["gap"]),
        "gap_p99": all_of["gap"].quantile(0.99).item(),
        "gap_max": all_of["gap"].max().item(),
        **{f"{name}_p99": values.quantile(0.99).item() for name, values in errors.items()},
        **{f"{name}_max": values.max().item() for name, values in errors.items()},
    }


def of_text(model: Any, tokenizer: PreTrainedTokenizerBase, text: str, temperature: float) -> list[dict[str, Any]]:
    """The figures of one kind of text at one temperature, for each K and δ, and for each number of buckets."""
    torch.manual_seed(0)
    rollout = sample(model, tokenizer, text, temperature, *size(text))
    new_model = copy.deepcopy(model)
    train(new_model, rollout, temperature)
    hidden = [hidden_states(each, rollout) for each in (new_model, model)]
    weights = [each.get_output_embeddings().weight.detach().double() for each in (new_model, model)]
    targets = rollout.labels[:, 1:]
    collected: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for new, old, ids in zip(*(x.split(ROWS) for x in (*hidden, targets[targets != -100])), strict=True):
        logits = [h.double() @ weight.t() / temperature for h, weight in zip((new, old), weights, strict=True)]
        for row in itertools.chain(*compare(logits[0], logits[1], ids)):
            key = (row.get("top_k"), row.get("mass_threshold"), row.get("buckets"))
            collected.setdefault(key, []).append(row)
    return [{"text": text, "temperature": temperature, **summary(rows)} for rows in collected.values()]


def costs(model: Any, tokenizer: PreTrainedTokenizerBase, device: str, repeats: int) -> list[dict[str, Any]]:
    """Times of capture and step, and bytes of a token's old policy, by K, at the model's own head, on open text."""
    rollout = sample(model, tokenizer, "open text", 1.0, *size("open text"))
    hidden, weight = hidden_states(model, rollout), model.get_output_embeddings().weight.detach()
    moved = hidden + 0.05 * hidden.std() * torch.randn_like(hidden)
    ids = rollout.labels[:, 1:][rollout.labels[:, 1:] != -100]
    olds = {k: troll.capture(troll.LMHead(hidden, weight), ids, top_k=k) for k in TOP_KS}

    def step(old: troll.SparsePolicy) -> None:
        inputs = moved.clone().requires_grad_(), weight.clone().requires_grad_()
        outcome = troll.trust_region_step(troll.LMHead(*inputs), old)
        (outcome.log_ratio + outcome.regression).sum().backward()

    captures = {f"{k}": lambda k=k: troll.capture(troll.LMHead(hidden, weight), ids, top_k=k) for k in TOP_KS}
    steps = {f"{k}": lambda old=old: step(old) for k, old in olds.items()}
    taken = [measure.seconds(each, repeats, device) for each in (captures, steps)]
    rows = []
    for name, contenders in zip(("capture", "step, forward and backward"), taken, strict=True):
        title = f"{name}, {len(hidden)} tokens, head {tuple(weight.shape)}, by K"
        rows += [{"what": name, **row} for row in measure.show(title, contenders)]
    sizes = {k: troll.PackedPolicy.of(old).nbytes / len(ids) for k, old in olds.items()}
    Console().print("bytes a token, packed: " + ", ".join(f"K = {k}: {size:.0f}" for k, size in sizes.items()))
    return [*rows, *({"what": "bytes a token", "top_k": k, "bytes": size} for k, size in sizes.items())]


def show(name: str, rows: list[dict[str, Any]]) -> None:
    """Prints a model's tables."""
    console = Console(width=130)
    bound = KL_BOUNDS[0]
    headings = ("KL", "support", "tail mass", "gap", "gap p99", "ratio error", "max", "projected", "other")
    by_k = measure.numbers("text", "T", "K", *headings, names=1, title=f"{name}: by K, δ = {MASS_THRESHOLDS[0]:g}")
    by_delta = measure.numbers("text", "T", "δ", *headings, names=1, title=f"{name}: by δ, K = {TOP_KS[-1]}")
    tails = measure.numbers("text", "T", "gap", *map(str, TAIL_BUCKETS), title=f"{name}: of the gap, seen by buckets")
    for row in rows:
        if "top_k" not in row:
            continue
        cells = [
            f"{row['kl']:.1e}",
            f"{row['support']:.1f}",
            f"{row['tail_mass']:.2%}",
            f"{row['gap'] / max(row['kl'], 1e-300):.1%}",
            f"{row['gap_p99']:.1e}",
            f"{row[f'ratio_error_{bound}']:.1e}",
            f"{row[f'ratio_error_{bound}_max']:.1e}",
            f"{row[f'projected_{bound}']:.1%}",
            f"{row[f'disagree_{bound}']:.2%}",
        ]
        first = (row["text"], f"{row['temperature']:g}")
        if row["mass_threshold"] == MASS_THRESHOLDS[0]:
            by_k.add_row(*first, f"{row['top_k']}", *cells)
        if row["top_k"] == TOP_KS[-1]:
            by_delta.add_row(*first, f"{row['mass_threshold']:g}", *cells)
    buckets = [row for row in rows if "buckets" in row]
    for text, temperature in dict.fromkeys((row["text"], row["temperature"]) for row in buckets):
        found = [row for row in buckets if (row["text"], row["temperature"]) == (text, temperature)]
        gap = found[0]["gap"]
        shares = (f"{row['seen'] / gap:.1%}" if gap else "" for row in found)
        tails.add_row(text, f"{temperature:g}", f"{gap:.1e}", *shares)
    console.print(by_k, by_delta, tails)


def main(device: str, repeats: int, models: list[str]) -> list[dict[str, Any]]:
    """Prints the tables of each model, and returns their rows."""
    results: list[dict[str, Any]] = []
    kinds = texts()
    for name in models:
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
        model.to(device)
        rows: list[dict[str, Any]] = []
        for text, temperature in track(list(itertools.product(kinds, TEMPERATURES)), description=name):
            rows += of_text(model, tokenizer, text, temperature)
        show(name, rows)
        results += [{"model": name, **row} for row in (*rows, *costs(model, tokenizer, device, repeats))]
    return results
