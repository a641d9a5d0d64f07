"""The picture of docs/gaussian.md is what the library computes."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks import gaussian_picture as picture
from troll import gaussian

NUMBER = re.compile(r"-?\d+\.\d+")


def test_the_picture_is_what_the_script_draws() -> None:
    found, drawn = picture.FILE.read_text(), picture.picture()
    assert NUMBER.sub("0", found) == NUMBER.sub("0", drawn)
    # The last digit may differ with the platform.
    numbers = [torch.tensor([float(number) for number in NUMBER.findall(text)]) for text in (found, drawn)]
    torch.testing.assert_close(*numbers, atol=0.11, rtol=0)


def test_panels_show_projections_on_their_bounds() -> None:
    whole = gaussian.kl(picture.NEW, picture.OLD).item()
    panels = picture.panels()
    assert len(panels) == 4
    for share, policy in zip(picture.SHARES, panels["KL, one bound"], strict=True):
        assert gaussian.kl(policy, picture.OLD).item() == pytest.approx(share * whole)
