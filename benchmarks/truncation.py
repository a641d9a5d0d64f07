"""Truncated sampling with a real model: the ratio against the sampler before any update, and what the kept sets take.

    python -m benchmarks truncation --model FOLDER

transformers samples open text with top-p, top-k or min-p, and gives the distributions that it draws from. The trainer
scores the same tokens with the same weights: as whole policies, whose ratio to the sampler's is not 1, and on the kept
sets, whose ratio is 1 up to the rounding of the two passes.
"""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import troll
from benchmarks import coverage, measure
from troll import PackedPolicy, Truncation

#: The samplers, by their settings in transformers and in TRL.
SAMPLERS: dict[str, dict[str, Any]] = {
    "top-p 0.8": {"top_p": 0.8},
    "top-p 0.95": {"top_p": 0.95},
    "top-k 20": {"top_k": 20},
    "min-p 0.1": {"min_p": 0.1},
}
TEXT = "open text"
#: A ratio further from 1 than this looks as if an update had made it.
FAR = 0.1


def main(device: str, repeats: int, models: list[str]) -> list[dict[str, Any]]:
    """Prints a table of the samplers for the first of the models, and returns its rows."""
    tokenizer = AutoTokenizer.from_pretrained(models[0], padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32)
    model.to(device).eval()
    number, length = (4, 8) if measure.small else coverage.size(TEXT)
    table = measure.numbers(
        "sampler",
        "tokens",
        "whole: ratio",
        "far",
        "kept: ratio",
        "far",
        "added",
        "tokens kept",
        "most",
        "bytes",
        "capture",
        "step",
    )
    rows = []
    for name, settings in SAMPLERS.items():
        torch.manual_seed(0)
        rollout, sampled = sample(model, tokenizer, number, length, settings)
        row = {"sampler": name, **compare(model, rollout, sampled, Truncation(**settings), device, repeats)}
        rows.append(row)
        table.add_row(
            name,
            str(row["tokens"]),
            *(f"{row[key]:.3f}" if "ratio" in key else f"{row[key]:.1%}" for key in ("whole_ratio", "whole_far")),
            *(f"{row[key]:.3f}" if "ratio" in key else f"{row[key]:.1%}" for key in ("kept_ratio", "kept_far")),
            f"{row['added']:.2%}",
            f"{row['kept']:.1f}",
            str(row["most"]),
            f"{row['bytes']:.0f}",
            *(measure.ratio_text(row[key]) for key in ("capture", "step")),
        )
    Console(width=130).print(table)
    return rows


@torch.no_grad()
def sample(
    model: Any, tokenizer: Any, number: int, length: int, settings: dict[str, Any]
) -> tuple[coverage.Rollout, Tensor]:
    """A truncated rollout, and the log-probabilities of its N tokens in the distributions that they were drawn from."""
    encoded = tokenizer.apply_chat_template(
        coverage.conversations(TEXT, number),
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    ).to(model.device)
    start = encoded["input_ids"].shape[1]
    found = model.generate(
        **encoded,
        do_sample=True,
        temperature=1.0,
        **{"top_k": 0, "top_p": 1.0} | settings,
        max_new_tokens=length,
        return_dict_in_generate=True,
        output_scores=True,
    )
    ids = found.sequences
    ended = (ids[:, start:] == tokenizer.eos_token_id).cumsum(-1)
    scored = torch.cat([torch.ones_like(ended[:, :1]), (ended == 0)[:, :-1]], -1).bool()
    log_probs = torch.stack(found.scores, 1).log_softmax(-1).gather(-1, ids[:, start:, None]).squeeze(-1)
    labels = torch.cat([torch.full_like(ids[:, :start], -100), ids[:, start:].where(scored, -100)], -1)
    attention = torch.cat([encoded["attention_mask"], scored.long()], -1)
    return coverage.Rollout(ids, attention, labels), log_probs[scored]


def compare(
    model: Any, rollout: coverage.Rollout, sampled: Tensor, truncation: Truncation, device: str, repeats: int
) -> dict[str, Any]:
    """The figures of one sampler, whose own log-probabilities of the N tokens are `sampled`.

    `capture` is the time of a truncated capture of these tokens from the LM head, over that of a whole policy with
    K = 64; `step` that of an optimisation step after it, forward and backward.
    """
    hidden, weight = coverage.hidden_states(model, rollout), model.get_output_embeddings().weight.detach()
    leaf = troll.LMHead(hidden.clone().requires_grad_(), weight.clone().requires_grad_())
    targets = rollout.labels[:, 1:]
    head, ids = troll.LMHead(hidden, weight), targets[targets != -100]
    whole, kept = troll.capture(head, ids), troll.capture(head, ids, truncation=truncation)

    def update(old: troll.SparsePolicy) -> None:
        step = troll.trust_region_step(leaf, old)
        (step.regression - step.log_ratio.exp()).mean().backward()

    taken = measure.seconds(
        {
            "whole capture": lambda: troll.capture(head, ids),
            "kept capture": lambda: troll.capture(head, ids, truncation=truncation),
            "whole step": lambda: update(whole),
            "kept step": lambda: update(kept),
        },
        repeats,
        device,
    )
    sizes = kept.used.sum(-1).float()
    row: dict[str, Any] = {"tokens": len(ids), "kept": sizes.mean().item(), "most": int(sizes.max())}
    row |= {"bytes": PackedPolicy.of(kept).nbytes / len(ids), **ratios(head, ids, sampled, truncation)}
    for name in ("capture", "step"):
        row[name] = [own / base for own, base in zip(taken[f"kept {name}"], taken[f"whole {name}"], strict=True)]
    return row


def ratios(source: Any, ids: Tensor, sampled: Tensor, truncation: Truncation) -> dict[str, float]:
    """Ratios to a sampler of the whole policy and of the one on the kept set, and the share of tokens added to the set.

    Args:
        source: The trainer's logits, (N, V), or the head that they are made with.
        ids: (N,) the sampled tokens.
        sampled: (N,) their log-probabilities in the distributions that they were drawn from.
        truncation: What the sampler kept.
    """
    every = troll.capture(source, ids, top_k=2**20, mass_threshold=0)
    inside = truncation.kept(every).gather(-1, every.slot.unsqueeze(-1)).squeeze(-1)
    figures = {"added": (~inside).float().mean().item()}
    for name, policy in (("whole", every), ("kept", troll.capture(source, ids, truncation=truncation))):
        ratio = torch.exp(policy.log_prob - sampled)
        figures |= {
            f"{name}_ratio": ratio.mean().item(),
            f"{name}_far": ((ratio - 1).abs() > FAR).float().mean().item(),
            f"{name}_min": ratio.min().item(),
            f"{name}_max": ratio.max().item(),
        }
    return figures
