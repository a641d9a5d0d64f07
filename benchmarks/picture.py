"""The picture of a projection in docs/method.md: policies of three outcomes while the bound changes.

`make picture` writes it. Each number comes from `troll.project`. The file needs no script: the frames lie side by side
on a strip that CSS moves, and one of them is seen at a time. For readers who prefer reduced motion, the strip stays.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

import troll
from troll.files import write_atomically
from troll_lab.runs.plot import DARK, LIGHT

FILE = Path(__file__).parents[1] / "docs" / "assets" / "projection.svg"

OLD, NEW = (torch.tensor(p, dtype=torch.float64) for p in ([0.5, 0.35, 0.15], [0.15, 0.22, 0.63]))
FRAMES, STILL = 150, 80
#: From a ball that is hardly seen to one that holds the new policy; below -log max p, so that the ball is inside.
BOUNDS = torch.logspace(math.log10(0.004), math.log10(0.68), FRAMES, dtype=torch.float64)
#: Points on the boundary of a ball.
AROUND = 64

WIDTH, HEIGHT, SIDE, LEFT, BASE = 720, 350, 320, 40, 318
BARS, BAR, TALL = 430, 22, 220
SECONDS = 12


def main() -> None:
    """Writes the picture."""
    write_atomically(FILE, picture())
    print(f"{FILE.stat().st_size / 1024:.0f} KiB in {FILE}")


def projected(bounds: Tensor = BOUNDS) -> troll.Projection:
    """The new policy, projected onto each of the balls around the old one."""
    return troll.project(NEW.log().expand(len(bounds), 3), OLD.log().expand(len(bounds), 3), kl_bound=bounds)


def boundaries(bounds: Tensor = BOUNDS) -> Tensor:
    """What policies far away, all around, are projected to: a line around each ball, `(len(bounds), AROUND, 3)`.

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
    path = projected(torch.logspace(-6, 0, 60, dtype=torch.float64)).log_probs.exp()  # to where nothing is projected
    frames = "\n".join(
        f'<g transform="translate({WIDTH * i})">{_frame(policies[i], rings[i], BOUNDS[i].item(), multiplier)}</g>'
        for i, multiplier in enumerate(found.multiplier.tolist())
    )
    corners = [_place(corner) for corner in torch.eye(3)]
    names = "".join(
        f'<text x="{x:.1f}" y="{y + dy}" class="soft" text-anchor="middle">{name}</text>'
        for name, (x, y), dy in zip("ABC", corners, (20, 20, -8), strict=True)
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">
<title>The projection of a new policy onto a ball around the old one, as the bound changes</title>
<style>
svg {{ {_variables(LIGHT)} font: 13px system-ui, sans-serif; fill: var(--ink); }}
@media (prefers-color-scheme: dark) {{ svg {{ {_variables(DARK)} }} }}
.soft {{ fill: var(--soft); }} .line {{ fill: none; stroke: var(--soft); }} .old {{ fill: var(--soft); }}
.new {{ fill: var(--second); }} .q {{ fill: var(--first); }}
.ball {{ fill: var(--first); fill-opacity: 0.14; stroke: var(--first); stroke-linejoin: round; }}
#strip {{ transform: translateX(-{WIDTH * STILL}px); }}
@media (prefers-reduced-motion: no-preference) {{
#strip {{ animation: {SECONDS}s steps({FRAMES}, jump-none) -{SECONDS * STILL / FRAMES:.1f}s infinite alternate grow; }}
}}
@keyframes grow {{ from {{ transform: none; }} to {{ transform: translateX(-{WIDTH * (FRAMES - 1)}px); }} }}
</style>
<rect width="{WIDTH}" height="{HEIGHT}" rx="8" style="fill: var(--card)"/>
<path d="{_path(torch.eye(3))}Z" class="line"/>
{names}
<path d="{_path(path)}" class="line" stroke-dasharray="3 4"/>
{_bars()}
{_dot(OLD, "old", "old p", -10)}
{_dot(NEW, "new", "new p̃", -10)}
<g id="strip">
{frames}
</g>
</svg>
"""


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {colours[name]};" for name in ("card", "ink", "soft", "rule", "first", "second"))


def _place(policy: Tensor) -> tuple[float, float]:
    """Where a policy is in the triangle: the corners are those that are certain of A, B and C."""
    _, b, c = policy.tolist()
    return LEFT + SIDE * (b + c / 2), BASE - SIDE * math.sqrt(3) / 2 * c


def _path(policies: Tensor) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in map(_place, policies))


def _dot(policy: Tensor, kind: str, name: str, right: float) -> str:
    x, y = _place(policy)
    anchor = "end" if right < 0 else "start"
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" class="{kind}"/>'
        f'<text x="{x + right:.1f}" y="{y + 4:.1f}" class="{kind}" text-anchor="{anchor}">{name}</text>'
    )


def _bar(outcome: int, place: int, share: float, kind: str) -> str:
    x, height = BARS + 90 * outcome + (BAR + 2) * place, TALL * share
    return f'<rect x="{x}" y="{BASE - height:.1f}" width="{BAR}" height="{height:.1f}" class="{kind}"/>'


def _bars() -> str:
    """Those that stay: the old and the new policy's probabilities."""
    bars = [
        _bar(outcome, place, policy[outcome].item(), kind)
        for outcome in range(3)
        for place, policy, kind in ((0, OLD, "old"), (2, NEW, "new"))
    ]
    middle = BARS + (3 * BAR + 4) / 2
    names = [
        f'<text x="{middle + 90 * outcome}" y="{BASE + 20}" class="soft" text-anchor="middle">{name}</text>'
        for outcome, name in enumerate("ABC")
    ]
    line = f'<path d="M{BARS - 8} {BASE}H{BARS + 180 + 3 * BAR + 12}" class="line"/>'
    return "".join((*bars, *names, line))


def _frame(policy: Tensor, ring: Tensor, bound: float, multiplier: float) -> str:
    """What a bound changes: the ball, the projected policy, and what is said about it."""
    says = f"projected, η = {multiplier:.2f}" if multiplier > 0 else "within the ball: q = p̃"
    return (
        f'<path d="{_path(ring)}Z" class="ball"/>'
        f"{_dot(policy, 'q', 'q', 9)}"
        f"{''.join(_bar(outcome, 1, policy[outcome].item(), 'q') for outcome in range(3))}"
        f'<text x="{BARS - 8}" y="40" style="font-size: 20px">ε = {bound:.3f}</text>'
        f'<text x="{BARS - 8}" y="64" class="soft">{says}</text>'
    )


if __name__ == "__main__":
    main()
