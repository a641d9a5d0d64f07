"""The frame of the report's pages: one HTML file without any other.

Styles and plots are inline, so a page opens offline, by mail and on a phone, in the reader's light or dark theme.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from string import Template

from troll_lab.runs.plot import COLOURS, DARK, LIGHT

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root { color-scheme: light dark; $light }
@media (prefers-color-scheme: dark) { :root { $dark } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); -webkit-text-size-adjust: 100%;
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 74rem; margin: 0 auto; padding: clamp(1.25rem, 4vw, 3rem) clamp(0.9rem, 3vw, 2rem) 3rem; }
h1, h2, h3, p, dl, dd, ul { margin: 0; }
h1 { font-size: 1rem; font-weight: 600; color: var(--soft); overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.75rem 0 0.9rem; }
h3 { font-size: 1.05rem; }
header { padding-bottom: 1.75rem; border-bottom: 1px solid var(--rule); }
.headline { margin-top: 0.4rem; font-size: clamp(1.9rem, 5.5vw, 3rem); font-weight: 650; line-height: 1.15;
  letter-spacing: -0.02em; font-variant-numeric: tabular-nums; }
.headline b { color: var(--first); font-weight: inherit; }
.label { display: block; font-size: 1.05rem; font-weight: 500; letter-spacing: 0; line-height: 1.6; }
.outcome { margin-top: 0.35rem; font-size: 1.1rem; }
.note { margin-top: 0.35rem; color: var(--soft); max-width: 46rem; }
.interrupted { display: inline-block; margin-left: 0.5rem; padding: 0 0.55rem; border: 1px solid var(--second);
  border-radius: 1rem; color: var(--second); font-size: 0.85rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
.card, details { background: var(--card); border: 1px solid var(--rule); border-radius: 0.6rem; min-width: 0; }
.card { padding: 1rem 1.1rem 1.1rem; margin: 0; }
.unit { font-weight: 400; color: var(--soft); font-size: 0.9rem; white-space: nowrap; }
figcaption { font-size: 0.92rem; color: var(--soft); }
.legend { display: flex; flex-wrap: wrap; gap: 0 1.1rem; font-size: 0.88rem; padding: 0; list-style: none; }
.legend i { display: inline-block; vertical-align: middle; width: 1.2rem; margin-right: 0.4rem;
  border-top: 3px solid var(--soft); }
$legend
.legend .points { width: 0.6rem; height: 0.6rem; border: 0; border-radius: 50%; background: var(--second); }
.legend .dashed { border-top-style: dashed; }
.legend .dotted { border-top-style: dotted; }
.legend .bound { border-top: 2px dashed var(--ink); }
svg { display: block; width: 100%; height: auto; overflow: visible; margin: 0.35rem 0 0.5rem; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif !important; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.35rem 1.1rem 0.35rem 0; text-align: left; vertical-align: top; white-space: nowrap; }
.cards th { white-space: normal; }
thead th { font-size: 0.85rem; font-weight: 500; color: var(--soft); }
tbody th { font-weight: 500; }
tbody tr { border-top: 1px solid var(--rule); }
td small { display: block; color: var(--soft); }
td .best { color: var(--first); font-weight: 650; }
.missing { margin-top: 1rem; padding-left: 1.1rem; color: var(--soft); }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 9.5rem), 1fr)); gap: 0.7rem 1.5rem; }
.facts div:last-child { grid-column: 1 / -1; }
.facts dt { font-size: 0.85rem; color: var(--soft); }
.facts dd { overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
details { margin-top: 1rem; }
summary { padding: 0.75rem 1.1rem; cursor: pointer; font-weight: 600; }
details ul { padding: 0 1.1rem 1.1rem 2.2rem; columns: 20rem; overflow-wrap: anywhere; }
a { color: var(--first); }
pre { margin: 0; padding: 0 1.1rem 1.1rem; overflow-x: auto;
  font: 0.82rem/1.5 ui-monospace, Menlo, Consolas, monospace; }
footer { margin-top: 2.5rem; font-size: 0.85rem; color: var(--soft); }
</style>
</head>
<body>
<main>
<header>
<h1>$heading</h1>
$headline
</header>
$body
<footer>$footer</footer>
</main>
</body>
</html>
""")


def render(title: str, heading: str, headline: str, body: str, footer: str) -> str:
    """Renders a page. All texts are HTML, except for the title, which is escaped."""
    return _PAGE.substitute(
        title=escape(title),
        light=_css_variables(LIGHT),
        dark=_css_variables(DARK),
        legend="\n".join(f".legend .{colour} {{ border-color: var(--{colour}); }}" for colour in COLOURS),
        heading=heading,
        headline=headline,
        body=body,
        footer=footer,
    )


def figure_card(
    slug: str, title: str, plot: str, legend: Mapping[str, str] | None = None, caption: str | None = None
) -> str:
    """A card with a plot from `troll_lab.runs.plot`. All texts are HTML.

    The slug is the card's id, unique on the page; the legend has the classes of each line's mark by the line's name.
    """
    marks = "".join(f'<li><i class="{classes}"></i>{name}</li>' for name, classes in (legend or {}).items())
    parts = [f'<figure class="card" id="{slug}">', f"<h3>{title}</h3>"]
    parts += [f'<ul class="legend">{marks}</ul>'] if marks else []
    parts += [plot, *([] if caption is None else [f"<figcaption>{caption}</figcaption>"]), "</figure>"]
    return "\n".join(parts)


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A card with a table; the first cell of each row is its name. All texts are HTML."""
    lines = ["<tr>" + "".join(f'<th scope="col">{text}</th>' for text in head) + "</tr>"]
    body = [
        f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{text}</td>" for text in rest) + "</tr>"
        for first, *rest in rows
    ]
    parts = ['<div class="card wide"><table>', "<thead>", *lines, "</thead>", "<tbody>", *body, "</tbody>"]
    return "\n".join([*parts, "</table></div>"])


def percent(share: float) -> str:
    """A share in per cent."""
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"


def duration(seconds: float) -> str:
    """A time in words, such as 2 h 5 min."""
    whole = round(seconds)
    if whole < 600:
        return f"{whole} s"
    hours, minutes = divmod(round(whole / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _css_variables(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())
