"""Checks of shapes: what they let through, and what their errors say."""

import pytest
import torch

from troll.trust_region.checks import check_shape, expanded


@pytest.mark.parametrize("shapes", [[(2, 3)], [("B", "T")], [(2, "T")], [(2,), ("B", 3)], [torch.Size([2, 3])]])
def test_check_shape_takes_any_of_the_shapes_and_any_size_for_a_letter(shapes):
    check_shape("values", torch.zeros(2, 3), *shapes)


@pytest.mark.parametrize(
    ("shapes", "takes"),
    [
        ([(2, 4)], r"\(2, 4\)"),
        ([(2,)], r"\(2\)"),
        ([("B", "T", "V")], r"\(B, T, V\)"),
        ([("B", 4), ()], r"\(B, 4\) or \(\)"),
    ],
)
def test_check_shape_names_argument_and_shapes(shapes, takes):
    with pytest.raises(ValueError, match=rf"^values must be {takes}, got \(2, 3\)$"):
        check_shape("values", torch.zeros(2, 3), *shapes)


def test_expanded_broadcasts_or_names_the_argument():
    assert expanded("bound", torch.tensor(1.0), ()).shape == ()
    assert expanded("bound", torch.zeros(2, 1), (4, 2, 3)).shape == (4, 2, 3)
    with pytest.raises(ValueError, match=r"bound must broadcast to \(4, 3\), got \(2, 1\)"):
        expanded("bound", torch.zeros(2, 1), (4, 3))
