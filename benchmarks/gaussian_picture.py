"""The picture of docs/gaussian.md: one pair of Gaussians, and what each projection makes of it as the bound grows.

`python -m benchmarks.gaussian_picture` writes it. Each ellipse comes from `troll.gaussian`.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from troll import gaussian
from troll.files import write_atomically
from troll.gaussian import Gaussian
from troll_lab.runs.plot import DARK, LIGHT

FILE = Path(__file__).parents[1] / "docs" / "assets" / "gaussian.svg"


def _policy(mean: tuple[float, float], factor: tuple[float, float, float]) -> Gaussian:
    a, b, c = factor
    root = torch.tensor([[a, 0.0], [b, c]], dtype=torch.float64)
    return Gaussian(torch.tensor(mean, dtype=torch.float64), root)


OLD, NEW = _policy((0.0, 0.0), (1.0, 0.75, 0.5)), _policy((2.1, 1.0), (0.55, -0.75, 0.45))
#: The bounds that are drawn, as shares of the distance between both policies; the last but one is drawn solid.
SHARES = (0.02, 0.1, 0.3, 0.6)
SOLID = 2

WIDTH, HEIGHT, PANEL, SCALE = 900, 260, 225, 44
LEFT, BASE = 64, 156


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
    drawn = "\n".join(
        f'<g transform="translate({PANEL * i})">{_panel(name, policies)}</g>'
        for i, (name, policies) in enumerate(panels().items())
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">
<title>An old and a new Gaussian policy, and the projected policy in four trust regions as the bound grows</title>
<style>
svg {{ {_variables(LIGHT)} font: 13px system-ui, sans-serif; fill: var(--ink); }}
@media (prefers-color-scheme: dark) {{ svg {{ {_variables(DARK)} }} }}
path {{ fill: none; stroke-width: 1.4; }} .faint {{ stroke-opacity: 0.4; }} .solid {{ stroke-width: 2.4; }}
path.old {{ stroke: var(--soft); }} path.new {{ stroke: var(--second); }} path.q {{ stroke: var(--first); }}
text.old {{ fill: var(--soft); }} text.new {{ fill: var(--second); }} text.q {{ fill: var(--first); }}
</style>
<rect width="{WIDTH}" height="{HEIGHT}" rx="8" style="fill: var(--card)"/>
{drawn}
</svg>
"""


def _panel(name: str, policies: list[Gaussian]) -> str:
    ellipses = [_ellipse(OLD, "old"), _ellipse(NEW, "new")]
    ellipses += [_ellipse(q, "q solid" if i == SOLID else "q faint") for i, q in enumerate(policies)]
    words = [
        _word(OLD.mean, "old", "p", -10),
        _word(NEW.mean, "new", "p̃", 4),
        _word(policies[SOLID].mean, "q", "q", -4),
    ]
    title = f'<text x="{PANEL / 2}" y="26" text-anchor="middle">{name}</text>'
    return "".join((title, *ellipses, *words))


def _word(mean: Tensor, kind: str, word: str, right: float) -> str:
    x, y = _place(mean)
    return f'<text x="{x + right:.1f}" y="{y + 4:.1f}" class="{kind}">{word}</text>'


def _ellipse(policy: Gaussian, kind: str) -> str:
    """Where the density is e^{-1/2} of its maximum: one standard deviation in every direction."""
    angles = torch.linspace(0, 2 * math.pi, 61, dtype=torch.float64)
    circle = torch.stack([angles.cos(), angles.sin()])
    points = (policy.factor @ circle).mT + policy.mean
    return f'<path class="{kind}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in map(_place, points))}Z"/>'


def _place(point: Tensor) -> tuple[float, float]:
    x, y = point.tolist()
    return LEFT + SCALE * x, BASE - SCALE * y


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {colours[name]};" for name in ("card", "ink", "soft", "first", "second"))


def main() -> None:
    """Writes the picture."""
    write_atomically(FILE, picture())
    print(f"{FILE.stat().st_size / 1024:.0f} KiB in {FILE}")


if __name__ == "__main__":
    main()
