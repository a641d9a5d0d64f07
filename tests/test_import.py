"""The core depends on torch alone."""

from __future__ import annotations

import subprocess
import sys

import troll

PROBE = """
import sys
import torch
before = set(sys.modules)  # what torch itself takes is not ours to answer for
import troll
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
"""


def test_import_takes_no_heavy_dependency():
    result = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    taken = set(result.stdout.split())
    assert "troll" in taken
    assert not taken & {"trl", "transformers", "triton", "accelerate", "datasets", "peft", "verl", "numpy", "scipy"}


def test_public_names():
    assert set(troll.__all__) == {
        "Constraint",
        "LMHead",
        "Logits",
        "Outcomes",
        "PackedPolicy",
        "Projection",
        "SparsePolicy",
        "TrustRegionStep",
        "capture",
        "capture_top",
        "log_probs_at",
        "project",
        "sparse_kl",
        "troll_loss",
        "trust_region_step",
    }
    for name in troll.__all__:
        assert hasattr(troll, name)
