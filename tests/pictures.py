"""Pictures of the docs against what their scripts draw."""

import re

import torch

NUMBER = re.compile(r"-?\d+\.\d+")


def assert_same_picture(found: str, drawn: str) -> None:
    """The same SVG but for the last digit of its numbers, which may differ with the platform."""
    assert NUMBER.sub("0", found) == NUMBER.sub("0", drawn)
    numbers = [torch.tensor([float(number) for number in NUMBER.findall(text)]) for text in (found, drawn)]
    torch.testing.assert_close(*numbers, atol=0.11, rtol=0)
