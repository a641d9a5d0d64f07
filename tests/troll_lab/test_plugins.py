"""Surrogates of a user's own in recipes: `plugins`, from the recipe to every process of a run."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from tests.troll_lab.runs.conftest import short, write_tiny_model
from troll.trl.estimators import ESTIMATORS
from troll.trl.surrogates import SURROGATES
from troll_lab import cli, plugins, recipes
from troll_lab.recipes import RecipeError
from troll_lab.runs.grid import expand
from troll_lab.tasks import registry

#: The complete file that docs/surrogates.md shows, which registers "near".
PAGE = (Path(__file__).parents[2] / "docs" / "surrogates.md").read_text()
PLUGIN = re.findall(r"```python\n(\"\"\"my_surrogate.py.*?)```", PAGE, re.S)[0]
RECIPE = re.findall(r"```yaml\n(extends: quickstart\nplugins.*?)```", PAGE, re.S)[0]


@pytest.fixture
def new_process() -> Iterator[mock.Mock]:
    """Forgets what a test has registered, at its end and when it is called."""
    parts: list[dict[str, Any]] = [SURROGATES, plugins._surrogates_of, ESTIMATORS, registry._LOADERS]
    before = [dict(part) for part in parts]

    def forget() -> None:
        for part, entries in zip(parts, before, strict=True):
            for name in part.keys() - entries.keys():
                del part[name]
        for name in [name for name in sys.modules if name.startswith(("troll_file:", "my_surrogate"))]:
            del sys.modules[name]

    yield mock.Mock(side_effect=forget)
    forget()


@pytest.fixture
def recipe(tmp_path: Path, new_process: mock.Mock) -> Path:
    """The recipe of the page, next to the file that it names."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "my_surrogate.py").write_text(PLUGIN)
    (folder / "mine.yaml").write_text(RECIPE)
    return folder / "mine.yaml"


def test_load_imports_a_file_that_is_relative_to_the_recipe(recipe, monkeypatch, tmp_path, new_process):
    monkeypatch.chdir(tmp_path)
    loaded = recipes.load("mine/mine.yaml")
    assert (loaded.training.surrogate, loaded.training.own_settings.factor) == ("near", 1.5)
    assert loaded.settings["plugins"] == [str(recipe.with_name("my_surrogate.py"))]
    (tmp_path / "elsewhere").mkdir()
    recipes.save(loaded, tmp_path / "elsewhere" / "config.yaml")
    new_process()
    assert "near" not in SURROGATES
    assert recipes.load(str(tmp_path / "elsewhere" / "config.yaml")).settings == loaded.settings
    # A module is found by its name.
    new_process()
    monkeypatch.syspath_prepend(recipe.parent)
    recipe.write_text("extends: quickstart\nplugins: [my_surrogate]\nsurrogate: near\n")
    assert recipes.load(str(recipe)).settings["plugins"] == ["my_surrogate"]


def test_load_finds_the_plugins_of_the_recipe_that_is_extended(recipe, tmp_path, new_process):
    (tmp_path / "top.yaml").write_text("extends: mine/mine.yaml\nlearning_rate: 1e-4\n")
    top = recipes.load(str(tmp_path / "top.yaml"))
    assert top.settings["plugins"] == [str(recipe.with_name("my_surrogate.py"))]
    new_process()
    (tmp_path / "none.yaml").write_text("extends: mine/mine.yaml\nplugins: []\nsurrogate: troll\n")
    none = recipes.load(str(tmp_path / "none.yaml"))
    assert "plugins" not in none.settings and "near" not in SURROGATES


@pytest.mark.parametrize(
    "form", ["{rest} --plugins my_surrogate.py", "--plugins={file} {rest}", "--plugins {file} {file} {rest}"]
)
def test_the_command_line_takes_the_place_of_the_recipes_plugins(recipe, monkeypatch, form):
    """Relative to the current folder; the recipe's own need not be there."""
    monkeypatch.chdir(recipe.parent)
    recipe.write_text("extends: quickstart\nplugins: [gone.py]\n")
    rest = "--surrogate near --surrogate_kwargs.factor 4"
    loaded = recipes.load(str(recipe), form.format(file="my_surrogate.py", rest=rest).split())
    assert loaded.training.own_settings.factor == 4
    assert set(loaded.settings["plugins"]) == {str(Path("my_surrogate.py").resolve())}
    assert "plugins" not in recipes.load(str(recipe), ["--plugins"]).settings


@pytest.mark.parametrize(
    "text",
    [
        "from troll_lab.tasks import register_task\n\n@register_task('mine')\ndef load(config, argument): ...\n",
        "from troll.trl.estimators import ESTIMATORS, Estimator\n\nESTIMATORS['mine'] = Estimator()\n",
    ],
    ids=["task", "estimator"],
)
def test_a_plugin_may_register_something_else(recipe, text):
    recipe.with_name("my_surrogate.py").write_text(text)
    assert recipes.load(str(recipe), ["--surrogate", "troll"]).settings["plugins"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no file {file}"),
        ("def near(:\n", r"cannot import {file}: SyntaxError: .* line 1"),
        ("import nonsense\n", "cannot import {file}: ModuleNotFoundError: No module named 'nonsense'"),
        ("raise RuntimeError('two\\nlines')\n", "cannot import {file}: RuntimeError: two lines"),
        ("import sys\nsys.exit(3)\n", "cannot import {file}: SystemExit: 3"),
        ("near = 1\n", "{file} registers no surrogate, estimator or task: it must call register_surrogate"),
        (
            PLUGIN.replace('register_surrogate("near"', 'register_surrogate("clip"'),
            "cannot import {file}: ValueError: surrogate 'clip' is registered already: choose another name",
        ),
    ],
    ids=["missing", "syntax", "import", "raises", "exits", "registers nothing", "name of another"],
)
def test_a_plugin_that_cannot_be_used_is_named_with_its_recipe(recipe, text, message):
    file = recipe.with_name("my_surrogate.py")
    file.unlink() if text is None else file.write_text(text)
    for _ in range(2):  # the second time, too
        with pytest.raises(RecipeError, match=f"{recipe}: plugins: {message.format(file=file)}") as error:
            recipes.load(str(recipe))
        assert "\n" not in str(error.value)
    with pytest.raises(RecipeError, match=f"^--plugins: {message.format(file=file)}"):
        recipes.load("quickstart", ["--plugins", str(file)])
    with pytest.raises(RecipeError, match=message.format(file=file)):
        expand([str(recipe)], {"seed": ["0", "1"]})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plugins: my_surrogate.py", r"plugins: takes a list, got 'my_surrogate.py': write \[my_surrogate.py\]"),
        ("plugins: {my: surrogate.py}", "plugins: takes a list of Python files and modules, got {'my'"),
        ("plugins: [1]", r"plugins: takes a list of Python files and modules, got \[1\]"),
        ("plugins: [no_such_module]", "plugins: cannot import no_such_module: ModuleNotFoundError: No module named"),
        ("plugins: [./my_surrogate]", "plugins: cannot import ./my_surrogate: .*; the name of a file ends in .py"),
        ("grid: {plugins: [my_surrogate.py]}", "grid: plugins are imported before settings are read, and cannot vary"),
        ("plugin: [my_surrogate.py]", "unknown field 'plugin', did you mean plugins"),
    ],
)
def test_plugins_of_another_form_are_refused(recipe, line, message):
    recipe.write_text(f"extends: quickstart\n{line}\n")
    with pytest.raises(RecipeError, match=f"{recipe}: {message}") as error:
        recipes.load(str(recipe))
    assert "\n" not in str(error.value)


def test_a_surrogate_of_another_recipes_plugin_is_refused(recipe):
    """The run's own process will not know it."""
    recipes.load(str(recipe))
    file = recipe.with_name("my_surrogate.py")
    with pytest.raises(RecipeError, match=f"surrogate 'near' comes from {file}: add that to `plugins`"):
        recipes.load("quickstart", ["--surrogate", "near"])


@pytest.mark.parametrize("by", ["recipe", "command"])
def test_a_grid_knows_the_settings_of_a_plugins_surrogate(recipe, by):
    """Other surrogates get no extra runs for them."""
    axes = {"surrogate": ["near", "troll"], "surrogate_kwargs.factor": ["2", "3"]}
    name = str(recipe)
    if by == "command":
        name, axes = "quickstart", axes | {"plugins": [str(recipe.with_name("my_surrogate.py"))]}
    runs = expand([name], axes)
    assert [run.name.partition("-")[2] for run in runs] == ["near-factor=2", "near-factor=3", "troll"]
    assert all(run.settings["plugins"] == [str(recipe.with_name("my_surrogate.py"))] for run in runs)


def test_train_and_resume_with_a_surrogate_of_ones_own(recipe, tmp_path, new_process, capsys):
    """A resumed run imports the file again, from the settings in its folder."""
    run = tmp_path / "run"
    words = short(write_tiny_model(tmp_path / "model"), run, max_steps=2, eval_strategy="no", eval_on_start="false")
    assert cli.main(["train", str(recipe), *words]) == 0
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert (settings["surrogate"], settings["plugins"]) == ("near", [str(recipe.with_name("my_surrogate.py"))])
    assert "surrogate near" in capsys.readouterr().out
    new_process()
    more = ["--output_dir", str(run), "--max_steps", "4", "--resume_from_checkpoint"]
    assert cli.main(["train", str(run / "config.yaml"), *more]) == 0
    assert "finished" in (run / "summary.json").read_text() and "near" in SURROGATES
    recipe.with_name("my_surrogate.py").unlink()
    new_process()
    assert cli.main(["train", str(run / "config.yaml"), *more]) == 2
    assert f"troll: error: {run}/config.yaml: plugins: there is no file" in capsys.readouterr().err


@pytest.mark.slow
def test_processes_of_a_comparison_import_the_plugins(recipe, tmp_path):
    words = short(write_tiny_model(tmp_path / "model"), tmp_path / "runs", max_steps=2, eval_strategy="no")
    words += ["--eval_on_start", "false", "--save_strategy", "no", "--surrogate", "near", "dppo_kl", "--jobs", "1"]
    command = [sys.executable, "-m", "troll_lab.cli", "compare", str(recipe), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.parent.name for path in (tmp_path / "runs").glob("*/summary.json")} == {"mine-near", "mine-dppo_kl"}
