import json

import pytest
from datasets import Dataset, DatasetDict

from troll_lab.tasks import splits as splits_module


@pytest.fixture(autouse=True)
def own_datasets_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets-cache")


@pytest.fixture
def hub(monkeypatch):
    """The hub, which has one data set: `hub((name, configuration), train=[row, ...], ...)`."""

    def fill(data_set, **splits):
        def load_dataset(name, configuration=None):
            assert (name, configuration) == data_set
            return DatasetDict({split: Dataset.from_list(rows) for split, rows in splits.items()})

        monkeypatch.setattr(splits_module, "load_dataset", load_dataset)

    return fill


@pytest.fixture
def write(tmp_path):
    """Writes rows as JSON lines: `write("train.jsonl", rows)` returns the path as text."""

    def to_file(name, rows):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return to_file
