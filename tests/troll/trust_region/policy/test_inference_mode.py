"""A policy that was made under `torch.inference_mode` can be used in a backward pass."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import troll
from troll import LMHead, PackedPolicy, SparsePolicy, Truncation

V, H = 30, 8


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, H, generator=generator)
    return hidden, torch.randn(V, H, generator=generator), torch.randint(0, V, (2, 5), generator=generator)


def from_logits(**options: object) -> SparsePolicy:
    hidden, weight, sampled = inputs()
    return troll.capture(hidden @ weight.T, sampled, top_k=6, **options)  # type: ignore[arg-type]


def from_engine() -> SparsePolicy:
    hidden, weight, sampled = inputs()
    log_probs, ids = (hidden @ weight.T).log_softmax(-1).topk(8)
    own = (hidden @ weight.T).log_softmax(-1).gather(-1, sampled.unsqueeze(-1)).squeeze(-1)
    return troll.capture_top(ids, log_probs, sampled, own, V, top_k=6)


def from_head() -> SparsePolicy:
    hidden, weight, sampled = inputs()
    return troll.capture(LMHead(hidden, weight), sampled, top_k=6)


def packed() -> SparsePolicy:
    policies = PackedPolicy.of(from_logits()).unbind()
    return PackedPolicy.stack([policies[0], policies[1]]).unpack()


def joined() -> SparsePolicy:
    policy = PackedPolicy.of(from_logits())
    return PackedPolicy.cat([policy[:1], policy[1:]]).unpack()


MAKERS: dict[str, Callable[[], SparsePolicy]] = {
    "capture of logits": from_logits,
    "capture of a head": from_head,
    "truncated capture": lambda: from_logits(truncation=Truncation(top_p=0.9)),
    "capture_top": from_engine,
    "packed": packed,
    "indexed and moved": lambda: from_logits()[torch.arange(2)].view((2, 5)).to(torch.float32),
    "joined": joined,
}


@pytest.mark.parametrize("made", MAKERS)
def test_capture_in_inference_mode_gives_same_gradient(made):
    gradients = []
    for mode in (True, False):
        with torch.inference_mode(mode):
            old = MAKERS[made]()
        assert not any(value.is_inference() for value in vars(old).values() if isinstance(value, Tensor))
        hidden, weight, _ = inputs()
        new = (1.3 * hidden @ weight.T).requires_grad_()
        step = troll.trust_region_step(new, old, kl_bound=0.01)
        loss, _ = troll.troll_loss(step, torch.tensor([1.0, -1.0]), torch.ones(2, 5, dtype=torch.bool))
        loss.backward()
        assert new.grad is not None
        gradients.append(new.grad)
    assert gradients[0].any()
    assert torch.equal(gradients[0], gradients[1])


def test_log_probs_at_in_inference_mode_can_teach():
    hidden, weight, sampled = inputs()
    logits = hidden @ weight.T
    with torch.inference_mode():
        teacher = troll.log_probs_at(logits, sampled.unsqueeze(-1))
    student = (1.3 * logits).requires_grad_()
    troll.sparse_kl(teacher, troll.log_probs_at(student, sampled.unsqueeze(-1))).sum().backward()
    assert student.grad is not None and student.grad.any()
