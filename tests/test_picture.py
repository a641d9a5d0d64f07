"""The picture of docs/method.md is what the library computes, and so is the page to play with."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import troll
from benchmarks import picture
from tests.pictures import assert_same_picture

PAGE = Path(__file__).parents[1] / "docs" / "assets" / "projection.html"


def divergence(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return (new * (new.log() - old.log())).sum(-1)


def test_picture_is_what_the_script_draws() -> None:
    assert_same_picture(picture.FILE.read_text(), picture.picture())


def test_projected_policy_moves_until_the_ball_holds_it() -> None:
    far = divergence(picture.NEW, picture.OLD)
    assert picture.BOUNDS[0] < far < picture.BOUNDS[-1]
    moved = divergence(picture.projected().log_probs.exp(), picture.OLD)
    torch.testing.assert_close(moved, picture.BOUNDS.clamp(max=far.item()), atol=1e-9, rtol=0)


def test_balls_end_on_their_boundary_or_on_an_edge() -> None:
    rings = picture.boundaries()
    found, bounds = divergence(rings, picture.OLD), picture.BOUNDS.unsqueeze(-1)
    on_the_boundary, on_an_edge = (found - bounds).abs() < 1e-9, rings.amin(-1) < 1e-6
    assert (on_the_boundary | on_an_edge).all()
    assert (found < bounds + 1e-9).all()
    assert on_the_boundary.double().mean() > 0.9


def test_page_projects_as_the_library_does() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    generator = torch.Generator().manual_seed(0)
    spread = torch.tensor([0.5, 2.0, 4.0], dtype=torch.float64).repeat_interleave(100).view(-1, 1, 1)
    logits = spread * torch.randn(300, 2, 3, generator=generator, dtype=torch.float64)
    new, old = logits.log_softmax(-1).unbind(1)
    bounds = 10 ** (-3 + 3 * torch.rand(300, generator=generator, dtype=torch.float64))
    expected = troll.project(new, old, kl_bound=bounds)
    assert 100 < expected.projected.sum() < 290
    assert min(new.min(), old.min()) > math.log(1e-12)  # below, the library floors

    script = re.search(r'<script id="mathematics">(.*?)</script>', PAGE.read_text(), re.S)
    assert script is not None
    ask = "const cases = JSON.parse(require('fs').readFileSync(0)); "
    ask += "console.log(JSON.stringify(cases.map(([next, old, bound]) => project(next, old, bound))))"
    cases = list(zip(new.exp().tolist(), old.exp().tolist(), bounds.tolist(), strict=True))
    done = subprocess.run(
        [node, "-e", script[1] + ask], input=json.dumps(cases), capture_output=True, text=True, check=True, timeout=60
    )
    found = json.loads(done.stdout)
    q = torch.tensor([each["q"] for each in found], dtype=torch.float64)
    torch.testing.assert_close(q, expected.log_probs.exp(), atol=1e-8, rtol=0)
    multiplier = torch.tensor([each["multiplier"] for each in found], dtype=torch.float64)
    torch.testing.assert_close(multiplier, expected.multiplier, rtol=1e-6, atol=1e-9)


def test_page_starts_as_the_picture() -> None:
    shown = re.search(r"const policies = \{ p: (\[.*?\]), new: (\[.*?\]) \}", PAGE.read_text())
    assert shown is not None
    assert [json.loads(policy) for policy in shown.groups()] == [picture.OLD.tolist(), picture.NEW.tolist()]
