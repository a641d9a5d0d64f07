"""What tests ask of pages: that they are one file for phones and both themes, and what they say."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Checks that tags balance, and collects what the tests ask about."""

    def __init__(self, path):
        super().__init__()
        self.source = Path(path).read_text(encoding="utf-8")
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.data: list[str] = []
        self.attributes: dict[str, list[str]] = {}
        self.feed(self.source)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)
        self.tags.append(tag)
        for name, value in attributes:
            self.attributes.setdefault(name, []).append(value or "")
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "srcset", "data"):
                self.references.append(value)
            self.references += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        if "style" not in self.open:
            self.data.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", "".join(self.data))

    def card(self, slug):
        found = re.search(rf'<figure class="card" id="{slug}">.*?</figure>', self.source, flags=re.DOTALL)
        return None if found is None else found[0]


def check_page(page):
    """A page is self-contained, its ids are unique across the plots, and it is for phones and both themes."""
    assert page.references, "the plots refer to their own clip paths"
    assert {reference[0] for reference in page.references} == {"#"}
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert "http://" not in page.source and "https://" not in page.source
    assert "@import" not in page.source and "url(" not in page.source.split("</style>")[0]
    assert len(page.ids) == len(set(page.ids))
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page.source
    assert "prefers-color-scheme: dark" in page.source
    plots = "".join(re.findall(r"<svg.*?</svg>", page.source, flags=re.DOTALL))
    # A colour that is not one of the page's variables stays as it is in the other theme.
    assert re.findall(r"(?:fill|stroke|color): *(#[0-9a-f]{3,6})", plots) == []
    assert set(re.findall(r"var\(--(\w+)\)", plots)) <= set(re.findall(r"--(\w+):", page.source))


def hide_package(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Makes a package look as if it were not installed, to the reports too."""
    for name in [name for name in sys.modules if name.split(".")[0] == package or name.startswith("troll_lab.reports")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
