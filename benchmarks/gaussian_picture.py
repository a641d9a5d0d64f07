"""The picture of docs/gaussian.md: one pair of Gaussians, and its projections as the bound grows.

`python -m benchmarks.gaussian_picture` writes it. Each ellipse comes from `troll.gaussian`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.picture import standalone
from troll import gaussian
from troll.files import write_atomically
from troll.gaussian import Gaussian
from troll_lab.reports.figures import LIGHT, STYLE, themed_svg

FILE = Path(__file__).parents[1] / "docs" / "assets" / "gaussian.svg"


def _policy(mean: tuple[float, float], factor: tuple[float, float, float]) -> Gaussian:
    a, b, c = factor
    root = torch.tensor([[a, 0.0], [b, c]], dtype=torch.float64)
    return Gaussian(torch.tensor(mean, dtype=torch.float64), root)


OLD, NEW = _policy((0.0, 0.0), (1.0, 0.75, 0.5)), _policy((2.1, 1.0), (0.55, -0.75, 0.45))
#: The bounds that are drawn, as shares of the distance between both policies; the last but one is drawn solid.
SHARES = (0.02, 0.1, 0.3, 0.6)
SOLID = 2

_WIDTH, _HEIGHT = 900, 260  # points, of which matplotlib has 72 to an inch


def panels() -> dict[str, list[Gaussian]]:
    """The projected policies of each panel, one for each share."""
    parts = [part.item() for part in gaussian.kl_parts(NEW, OLD)]
    plain = gaussian.project_wasserstein(NEW, OLD, math.inf, math.inf)
    frobenius = gaussian.project_frobenius(NEW, OLD, math.inf, math.inf)

    def bounds(share: float, projection: gaussian.GaussianProjection[Gaussian]) -> tuple[float, float]:
        return share * projection.mean_before.item(), share * projection.covariance_before.item()

    return {
        "KL, one bound": [gaussian.project_joint_kl(NEW, OLD, share * sum(parts)).policy for share in SHARES],
        "KL, two bounds": [gaussian.project_kl(NEW, OLD, *(share * part for part in parts)).policy for share in SHARES],
        "Frobenius": [gaussian.project_frobenius(NEW, OLD, *bounds(share, frobenius)).policy for share in SHARES],
        "Wasserstein-2": [gaussian.project_wasserstein(NEW, OLD, *bounds(share, plain)).policy for share in SHARES],
    }


def picture() -> str:
    """All of the SVG."""
    with style.context(["default", STYLE | {"font.size": 13}]):
        figure = Figure(figsize=(_WIDTH / 72, _HEIGHT / 72))
        for number, (name, policies) in enumerate(panels().items()):
            axes = figure.add_axes((number / 4, 0, 1 / 4, 0.9), xlim=(-1.45, 3.65), ylim=(-2.35, 3.0), aspect="equal")
            axes.axis("off")
            axes.text(0.5, 1, name, transform=axes.transAxes, color=LIGHT["ink"], ha="center", va="center")
            _draw(axes, OLD, LIGHT["soft"], "p", -0.1)
            _draw(axes, NEW, LIGHT["second"], "p̃", 0.2)
            for place, policy in enumerate(policies):
                if place == SOLID:
                    _draw(axes, policy, LIGHT["first"], "q", 0, linewidth=2.4)
                else:
                    _draw(axes, policy, LIGHT["first"], alpha=0.4)
        title = "An old and a new Gaussian policy, and the projected policy in four trust regions as the bound grows"
        return standalone(title, _WIDTH, _HEIGHT, themed_svg(figure, "gaussian", title))


def _draw(axes: Axes, policy: Gaussian, colour: str, word: str = "", right: float = 0, **line: Any) -> None:
    """A policy as the ellipse on which its density is e^{-1/2} of its maximum: one standard deviation everywhere."""
    angles = torch.linspace(0, 2 * math.pi, 61, dtype=torch.float64)
    points = policy.factor @ torch.stack([angles.cos(), angles.sin()]) + policy.mean.unsqueeze(-1)
    axes.plot(*points.tolist(), color=colour, clip_on=False, **{"linewidth": 1.4, **line})
    x, y = policy.mean.tolist()
    axes.text(x + right, y, word, color=colour, ha="center", va="center")


def main() -> None:
    """Writes the picture."""
    write_atomically(FILE, picture())
    print(f"{FILE.stat().st_size / 1024:.0f} KiB in {FILE}")


if __name__ == "__main__":
    main()
