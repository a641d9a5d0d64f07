"""What the tests of the core share."""

import pytest

from troll.trust_region.reading import head, logits


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles each way, and a remainder, for 12 tokens and 1,000 entries."""
    monkeypatch.setattr(head, "TOKEN_TILE", 5)
    monkeypatch.setattr(head, "VOCABULARY_TILE", 300)
    monkeypatch.setattr(head, "WHOLE_ROWS", {"cpu": 4 * 1000, "gpu": 4 * 1000})
    monkeypatch.setattr(logits, "TILE_LOGITS", 5 * 1000)
