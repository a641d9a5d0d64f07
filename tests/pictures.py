"""Pictures of the docs against what their scripts draw."""

import re

import torch

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def assert_same_picture(found: str, drawn: str) -> None:
    """The same texts, and the same shapes but for the last digit, which may differ with the platform."""
    texts = [re.findall(r">([^<]*\S[^<]*)</", svg) for svg in (found, drawn)]
    assert texts[0] == texts[1]
    shapes = [NUMBER.findall(" ".join(re.findall(r' d="([^"]*)"', svg))) for svg in (found, drawn)]
    numbers = [torch.tensor([float(number) for number in each]) for each in shapes]
    torch.testing.assert_close(*numbers, atol=0.011, rtol=0)
