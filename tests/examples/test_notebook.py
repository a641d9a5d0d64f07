"""The notebook for Colab runs from its first cell to its chart, with a tiny model and a few problems."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

from benchmarks.memory import GIB, Estimate, Machine  # noqa: E402
from tests.troll_lab.runs.conftest import tiny_model  # noqa: E402, F401  a fixture
from troll_lab import recipes  # noqa: E402

NOTEBOOK = Path(__file__).parents[2] / "examples" / "gsm8k_colab.ipynb"

#: In place of the notebook's own settings, or next to them.
TINY = dict.fromkeys(("max_completion_length", "num_generations", "eval_steps", "eval_size"), "4")
TINY |= {"per_device_train_batch_size": "4", "per_device_eval_batch_size": "4", "gradient_accumulation_steps": "1"}
TINY |= {"generation_chunk_size": "32", "max_steps": "8", "logging_steps": "1"}
TINY |= {"use_cpu": "true", "gradient_checkpointing": "false"}


def tagged(notebook: Any, tag: str) -> Any:
    (cell,) = (cell for cell in notebook.cells if tag in cell.metadata.get("tags", ()))
    return cell


def settings(notebook: Any) -> dict[str, str]:
    values: dict[str, str] = {}
    exec(tagged(notebook, "parameters").source, values)
    words = values["SETTINGS"].split()
    return dict(zip((word.removeprefix("--") for word in words[::2]), words[1::2], strict=True))


@pytest.mark.slow
def test_notebook_runs(tiny_model: Path, tmp_path: Path) -> None:  # noqa: F811
    data = tmp_path / "gsm8k.jsonl"
    rows = [{"question": f"{n} + 1 = ?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(20)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    tagged(notebook, "install").source = ""
    local = {"model_name_or_path": str(tiny_model), "dataset_path": str(data)}
    arguments = " ".join(f"--{name} {value}" for name, value in (settings(notebook) | TINY | local).items())
    tagged(notebook, "parameters").source += f"\nSETTINGS = {arguments!r}"
    # `troll` is where this Python is, and the chart is drawn as in a notebook.
    variables = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    variables |= {"PATH": f"{Path(sys.executable).parent}:{variables['PATH']}", "HF_HUB_OFFLINE": "1"}
    variables |= {"HF_HOME": str(tmp_path / "hub"), "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(tmp_path / "ipython")}
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, allow_errors=True, resources=place).execute(env=variables)

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    said = "".join(output.get("text", "") for output in outputs)
    assert not [output for output in outputs if output.output_type == "error"], said
    assert (tmp_path / "gsm8k" / "comparison.html").is_file(), said
    charts = [output for output in notebook.cells[-2].outputs if "image/png" in output.get("data", {})]
    assert len(charts) == 1
    for method in ("clip", "troll"):
        (config,) = (tmp_path / "gsm8k").glob(f"*-{method}*/config.yaml")
        assert "use_peft: true" in config.read_text()
        (summary,) = (tmp_path / "gsm8k").glob(f"*-{method}*/summary.json")
        assert json.loads(summary.read_text())["status"] == "finished"


@pytest.mark.slow
def test_notebook_fits_the_gpu_that_it_names() -> None:
    own = settings(nbformat.read(NOTEBOOK, as_version=4))
    arguments = [part for name, value in own.items() for part in (f"--{name}", value)]
    recipe = recipes.load("gsm8k-qwen3-24gb", [*arguments, "--use_cpu", "true"], vllm=True)
    assert max(Estimate(recipe, Machine(14.5 * GIB), longest_prompt=256).totals) <= 14.5 * GIB
    training = recipe.training
    assert (training.generation_batch_size, training.updates_per_rollout, training.max_steps) == (128, 8, 25 * 8)
