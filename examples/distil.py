"""Distillation from a teacher's largest log-probabilities, as inference servers report them, without full logits.

python examples/distil.py

The teacher sends 16 of its 1,000 log-probabilities at every position. All other tokens together are one more outcome,
the tail: without it, the student could move its mass to tokens where the teacher has none.
"""

import torch

import troll

TOP = 16

torch.manual_seed(0)
positions, width, vocabulary = 512, 64, 1000
hidden = torch.randn(positions, width)
teacher_head = torch.randn(vocabulary, width) * 3 * width**-0.5
teacher_log_probs = torch.log_softmax(hidden @ teacher_head.t(), -1)

# What a server sends: a token that was sampled, its log-probability, and the largest ones.
sampled = torch.distributions.Categorical(logits=teacher_log_probs).sample()
sampled_log_probs = teacher_log_probs.gather(-1, sampled.unsqueeze(-1)).squeeze(-1)
top_log_probs, top_ids = teacher_log_probs.topk(TOP)
teacher = troll.capture_top(top_ids, top_log_probs, sampled, sampled_log_probs, vocabulary, top_k=TOP, mass_threshold=0)

student_head = torch.nn.Linear(width, vocabulary, bias=False)
optimizer = torch.optim.Adam(student_head.parameters(), lr=1e-2)
for update in range(201):
    # The student on the teacher's tokens, from the head without its full logits; differentiable.
    student = troll.log_probs_at(troll.LMHead(hidden, student_head.weight), teacher.token_ids)
    loss = troll.sparse_kl(teacher, student).mean()  # forward KL; sparse_kl(student, teacher) is the reverse
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if update % 50 == 0:
        with torch.no_grad():
            student_log_probs = torch.log_softmax(student_head(hidden), -1)
            full = (teacher_log_probs.exp() * (teacher_log_probs - student_log_probs)).sum(-1).mean()
        print(
            f"update {update:3d}  KL on {TOP} tokens and the tail {loss.item():.4f}  on the whole vocabulary {full:.4f}"
        )
