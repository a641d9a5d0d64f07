"""The picture of a projection in docs/method.md: policies of three outcomes while the bound changes.

`make picture` writes it. Each number comes from `troll.project`. The file needs no script: the frames lie side by side
on a strip that CSS moves, and one of them is seen at a time. For readers who prefer reduced motion, the strip stays.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from markupsafe import Markup
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from torch import Tensor

import troll
from troll.files import write_atomically
from troll_lab.reports.figures import LIGHT, STYLE, themed_svg
from troll_lab.reports.page import render

FILE = Path(__file__).parents[1] / "docs" / "assets" / "projection.svg"

OLD, NEW = (torch.tensor(p, dtype=torch.float64) for p in ([0.5, 0.35, 0.15], [0.15, 0.22, 0.63]))
FRAMES, STILL = 100, 53
#: From a ball that is hardly seen to one that holds the new policy; below -log max p, so that the ball is inside.
BOUNDS = torch.logspace(math.log10(0.004), math.log10(0.68), FRAMES, dtype=torch.float64)
#: Points on the boundary of a ball.
AROUND = 64
SECONDS = 12

_WIDTH, _HEIGHT = 720, 350  # points, of which matplotlib has 72 to an inch
_BAR = 0.24
_OLD, _NEW, _Q = LIGHT["soft"], LIGHT["second"], LIGHT["first"]


def main() -> None:
    """Writes the picture."""
    write_atomically(FILE, picture())
    print(f"{FILE.stat().st_size / 1024:.0f} KiB in {FILE}")


def projected(bounds: Tensor = BOUNDS) -> troll.Projection:
    """The new policy, projected onto each of the balls around the old one."""
    return troll.project(NEW.log().expand(len(bounds), 3), OLD.log().expand(len(bounds), 3), kl_bound=bounds)


def boundaries(bounds: Tensor = BOUNDS) -> Tensor:
    """The projections of policies far away, all around: a line around each ball, `(len(bounds), AROUND, 3)`.

    Where the ball reaches an edge of the triangle, the line goes along the edge.
    """
    angles = torch.arange(AROUND, dtype=torch.float64) * (2 * math.pi / AROUND)
    right, up = (torch.tensor(d, dtype=torch.float64) for d in ([-1.0, 1.0, 0.0], [-1.0, -1.0, 2.0]))
    moves = angles.cos().unsqueeze(-1) * right + angles.sin().unsqueeze(-1) * up / math.sqrt(3)
    far = moves / OLD  # so that a small step goes in the direction of the move
    far = OLD.log() + far * (20 / far.abs().amax(-1, keepdim=True))
    shape = len(bounds), AROUND, 3
    found = troll.project(far.expand(shape), OLD.log().expand(shape), kl_bound=bounds.unsqueeze(-1))
    return found.log_probs.exp()


def picture() -> str:
    """All of the SVG."""
    found, rings = projected(), boundaries()
    policies = found.log_probs.exp()
    with style.context(["default", STYLE | {"font.size": 13}]):
        frames = [
            _frame(i, policies[i], rings[i], BOUNDS[i].item(), multiplier)
            for i, multiplier in enumerate(found.multiplier.tolist())
        ]
        title = "The projection of a new policy onto a ball around the old one, as the bound changes"
        return standalone(title, _WIDTH, _HEIGHT, _background(), frames)


def standalone(title: str, width: int, height: int, background: Markup, frames: Sequence[Markup] = ()) -> str:
    """A file of its own from drawings of this size in the page's colours, with coordinates of two decimals.

    So it is smaller, and the last digits of another machine's numbers do not change it.

    Args:
        title: The title for screen readers.
        width: The width in points.
        height: The height in points.
        background: The drawing below the others.
        frames: Drawings of which one is seen at a time.
    """
    svg = render(
        "picture.svg",
        folder=Path(__file__).parent,
        title=title,
        width=width,
        height=height,
        background=background,
        frames=frames,
        still=STILL,
        seconds=SECONDS,
    )
    return re.sub(r"\d+\.\d{4,}", lambda number: f"{float(number[0]):.2f}", svg)


def _panels() -> tuple[Figure, Axes, Axes]:
    """An empty figure with the axes of the triangle and of the bars."""
    figure = Figure(figsize=(_WIDTH / 72, _HEIGHT / 72))
    triangle = figure.add_axes((0.05, 0.09, 0.46, 0.82), xlim=(0, 1), ylim=(0, math.sqrt(3) / 2))
    bars = figure.add_axes((0.58, 0.09, 0.4, 0.82), xlim=(-0.5, 2.5), ylim=(0, 1.3))
    for axes in (triangle, bars):
        axes.axis("off")
    triangle.set_aspect("equal")
    return figure, triangle, bars


def _background() -> Markup:
    """The parts that all bounds share: the triangle, both policies, and the line along which the projection moves."""
    figure, triangle, bars = _panels()
    path = projected(torch.logspace(-6, 0, 60, dtype=torch.float64)).log_probs.exp()  # to where nothing is projected
    corners = torch.eye(3)
    triangle.plot(*_places(corners[[0, 1, 2, 0]]), color=LIGHT["soft"], linewidth=1, clip_on=False)
    triangle.plot(*_places(path), color=LIGHT["soft"], linewidth=1, linestyle=(0, (3, 4)), clip_on=False)
    for name, x, y, down in zip("ABC", *_places(corners), (1, 1, -1), strict=True):
        _name(triangle, (x, y), name, (0, -14 * down), LIGHT["soft"])
    for policy, colour, place, name in ((OLD, _OLD, -1, "old p"), (NEW, _NEW, 1, "new p̃")):
        _dot(triangle, policy, colour, name, -10)
        bars.bar([i + place * _BAR for i in range(3)], policy.tolist(), 0.9 * _BAR, color=colour, clip_on=False)
    bars.axhline(0, color=LIGHT["soft"], linewidth=1, clip_on=False)
    for place, name in enumerate("ABC"):
        _name(bars, (place, 0), name, (0, -14), LIGHT["soft"])
    return themed_svg(figure, "background", "")


def _frame(number: int, policy: Tensor, ring: Tensor, bound: float, multiplier: float) -> Markup:
    """The parts that a bound changes: the ball, the projected policy, and the text about it."""
    figure, triangle, bars = _panels()
    triangle.fill(*_places(ring), facecolor=to_rgba(_Q, 0.14), edgecolor=_Q, linewidth=1, clip_on=False)
    _dot(triangle, policy, _Q, "q", 9)
    bars.bar(range(3), policy.tolist(), 0.9 * _BAR, color=_Q, clip_on=False)
    says = f"projected, η = {multiplier:.2f}" if multiplier > 0 else "within the ball: q = p̃"
    bars.text(-0.5, 1.24, f"ε = {bound:.3f}", fontsize=20, color=LIGHT["ink"])
    bars.text(-0.5, 1.13, says, color=LIGHT["soft"])
    return themed_svg(figure, f"frame-{number}", "")


def _places(policies: Tensor) -> tuple[list[float], list[float]]:
    """Where policies are in the triangle: the corners are those that are certain of A, B and C."""
    _, b, c = policies.unbind(-1)
    return (b + c / 2).tolist(), (math.sqrt(3) / 2 * c).tolist()


def _dot(axes: Axes, policy: Tensor, colour: str, name: str, right: float) -> None:
    (x,), (y,) = _places(policy.unsqueeze(0))
    axes.add_patch(Circle((x, y), 0.0155, color=colour, linewidth=0, clip_on=False))
    _name(axes, (x, y), name, (right, 0), colour, "right" if right < 0 else "left")


def _name(
    axes: Axes, place: tuple[float, float], name: str, offset: tuple[float, float], colour: str, align: str = "center"
) -> None:
    axes.annotate(name, place, offset, textcoords="offset points", color=colour, ha=align, va="center")


if __name__ == "__main__":
    main()
