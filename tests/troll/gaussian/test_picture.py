"""The picture of docs/gaussian.md is what the library computes."""

import pytest

from benchmarks import gaussian_picture as picture
from tests.pictures import assert_same_picture
from troll import gaussian


def test_picture_is_what_the_script_draws() -> None:
    assert_same_picture(picture.FILE.read_text(), picture.picture())


def test_panels_show_projections_on_their_bounds() -> None:
    whole = gaussian.kl(picture.NEW, picture.OLD).item()
    panels = picture.panels()
    assert len(panels) == 4
    for share, policy in zip(picture.SHARES, panels["KL, one bound"], strict=True):
        assert gaussian.kl(policy, picture.OLD).item() == pytest.approx(share * whole)
