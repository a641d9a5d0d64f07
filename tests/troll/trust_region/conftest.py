"""What the tests of the core share."""

import pytest

from troll.trust_region.reading import head, logits


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles each way, and a remainder, for 12 tokens and 1,000 entries."""
    set_tiles(monkeypatch, rows=5, columns=300, width=1000)


@pytest.fixture
def tiles_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles each way, and a remainder, for 4 tokens and 152 entries."""
    set_tiles(monkeypatch, rows=3, columns=64, width=152)


def set_tiles(monkeypatch: pytest.MonkeyPatch, *, rows: int, columns: int, width: int) -> None:
    """Sets the sizes of tiles for a vocabulary of a width, all but one of whose rows in a tile are read whole."""
    whole = (rows - 1) * width
    monkeypatch.setattr(head, "TOKEN_TILE", rows)
    monkeypatch.setattr(head, "VOCABULARY_TILE", columns)
    monkeypatch.setattr(head, "WHOLE_ROWS", {"cpu": whole, "gpu": whole})
    monkeypatch.setattr(logits, "TILE_LOGITS", rows * width)
