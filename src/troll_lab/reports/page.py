"""A page from its template: a single HTML file that needs no other.

Styles and figures are inline, so a page opens offline, by mail and on a phone, in the reader's light or dark theme.
Jinja2 escapes every text that a template is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from troll_lab.reports.figures import COLOURS, DARK, LIGHT
from troll_lab.runs.text import duration, percent

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Card:
    """A figure with its words.

    Attributes:
        slug: Its id, unique on the page.
        figure: The figure, from `inline_figure`; None if there is nothing to draw.
        legend: For the name of each line, the classes of its mark.
    """

    slug: str
    title: str
    figure: Markup | None
    unit: str = ""
    legend: Mapping[str, str] = field(default_factory=dict)
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """Cards below a heading.

    Attributes:
        note: A sentence about all of them.
        missing: A sentence for each card that is left out.
    """

    title: str
    cards: Sequence[Card]
    note: str = ""
    missing: Sequence[str] = ()


def render(template: str, folder: Path = _TEMPLATES, **values: Any) -> str:
    """Fills in a template.

    Args:
        template: The name of its file; it extends `base.html`, and finds the macros in `macros.html`.
        folder: The folder of the file, if it is not one of this package's.
        values: The values that the template names.
    """
    environment = Environment(
        loader=FileSystemLoader([folder, _TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"percent": percent, "duration": duration}
    return environment.get_template(template).render(light=LIGHT, dark=DARK, colours=COLOURS, **values)
