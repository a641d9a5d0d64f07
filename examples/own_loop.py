"""TROLL in a loop of your own: a causal language model, one rollout, eight updates.

python examples/own_loop.py
"""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import troll

PAD, PROMPT, COMPLETION, TEMPERATURE = 0, 6, 12, 0.8

torch.manual_seed(0)
# A small model with random weights, so that nothing is downloaded; `from_pretrained` makes one that can speak.
model = Qwen3ForCausalLM(
    Qwen3Config(vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, head_dim=16, eos_token_id=None, pad_token_id=PAD)
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters())
# The learning rate follows the KL to the policy that sampled; the search begins at a hundredth of this one. It is
# this high because the model is tiny and has one rollout: for a real one, take the rate that you use without a target.
target = troll.KLTarget(0.1, updates_per_rollout=8, learning_rate=0.5)

# Prompts of different lengths, padded on the left, four completions each.
prompts = torch.randint(1, 1000, (4, PROMPT)).repeat_interleave(4, 0)
prompt_mask = (torch.arange(PROMPT) >= torch.tensor([0, 1, 2, 3]).repeat_interleave(4).unsqueeze(-1)).long()
prompts = prompts.masked_fill(prompt_mask == 0, PAD)
sequences = model.generate(  # type: ignore[misc, unused-ignore]  # before transformers 5.24
    prompts, attention_mask=prompt_mask, do_sample=True, temperature=TEMPERATURE, top_k=0, max_new_tokens=COMPLETION
)
assert isinstance(sequences, torch.Tensor)
attention_mask = torch.cat([prompt_mask, torch.ones(len(prompts), COMPLETION, dtype=torch.long)], -1)

# Even tokens are good. The advantage is a completion's reward, less the mean of its group of four.
rewards = (sequences[:, PROMPT:] % 2 == 0).float().mean(-1).view(4, 4)
advantages = (rewards - rewards.mean(-1, keepdim=True)).flatten()

# As in transformers: the tokens that count, and -100 elsewhere. The model is read inside its forward pass, where its
# logits are never made, at the temperature that was sampled with.
labels = sequences.clone()
labels[:, :PROMPT] = -100
inputs = {"input_ids": sequences, "labels": labels, "attention_mask": attention_mask}

old = troll.huggingface.capture(model, **inputs, temperature=TEMPERATURE)

for update in range(8):
    step = troll.huggingface.trust_region_step(model, **inputs, old=old, kl_bound=0.02, temperature=TEMPERATURE)
    loss, metrics = troll.troll_loss(step, advantages, mask=labels[:, 1:] != -100)
    rate = target.update(metrics["kl_before_mean"].item(), age=update, length=COMPLETION)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(
        f"update {update}  loss {loss.item():+.4f}  KL before {metrics['kl_before_mean']:.4f}  "
        f"after, at most {metrics['kl_after_max']:.4f}  projected {metrics['projected_fraction']:.0%}"
    )
