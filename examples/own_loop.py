"""TROLL in a loop of one's own: one rollout, eight updates of a random categorical policy.

python examples/own_loop.py
"""

import torch

import troll

torch.manual_seed(0)
batch, length, vocabulary = 16, 8, 1000
logits = torch.randn(batch, length, vocabulary, requires_grad=True)  # in earnest, a model's output
optimizer = torch.optim.Adam([logits], lr=0.3)

tokens = torch.distributions.Categorical(logits=logits.detach()).sample()
rewards = (tokens % 2 == 0).float().mean(-1)  # even tokens are good
advantages = rewards - rewards.mean()
mask = torch.ones(batch, length, dtype=torch.bool)
old = troll.SparsePolicy.from_logits(logits, tokens)

for update in range(8):
    step = troll.trust_region_log_probs(logits, tokens, old, kl_bound=0.05)
    loss, metrics = troll.troll_loss(step, old.log_prob(tokens), advantages, mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(
        f"update {update}  loss {loss.item():+.4f}  KL before {metrics['kl_before_mean']:.4f}  "
        f"after {metrics['kl_after_max']:.4f}  projected {metrics['projected_fraction']:.0%}"
    )
