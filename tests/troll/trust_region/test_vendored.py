"""The folder works as a copy, under another name and without the rest of the project."""

import shutil
import subprocess
import sys
from pathlib import Path

import troll.trust_region

#: One training step of a tiny policy, with the folder as a package of another name.
PROGRAM = """
import sys

import torch
from borrowed.inner.policy.packed import PackedPolicy
from borrowed.inner.loss import troll_loss
from borrowed.inner.rate import KLTarget
from borrowed.inner.reading.capture import capture
from borrowed.inner.reading.head import LMHead
from borrowed.inner.step import trust_region_step

torch.manual_seed(0)
hidden, weight = torch.randn(2, 5, 8), torch.randn(40, 8, requires_grad=True)
ids = torch.randint(40, (2, 5))
old = PackedPolicy.of(capture(LMHead(hidden, weight.detach()), ids, top_k=8)).unpack()
optimizer = torch.optim.SGD([weight], lr=20.0)
for _ in range(2):
    step = trust_region_step(LMHead(hidden, weight), old, 0.01)
    loss, metrics = troll_loss(step, torch.tensor([1.0, -1.0]), torch.ones(2, 5))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
assert metrics["projected_fraction"] > 0, metrics
target = KLTarget(0.03, updates_per_rollout=2, learning_rate=1.0)
assert target.update(metrics["kl_before_mean"].item(), 0, length=1.0) == 0.01
assert not [name for name in sys.modules if name.partition(".")[0] == "troll"]
print("trained")
"""


def test_copied_folder_trains_under_another_name(tmp_path):
    """Without the kernels too."""
    source, leave = Path(troll.trust_region.__file__).parent, shutil.ignore_patterns("__pycache__", "*_triton.py")
    shutil.copytree(source, tmp_path / "borrowed" / "inner", ignore=leave)
    # Isolated: no PYTHONPATH and no folder of the tests, but torch.
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "trained\n", done.stderr
