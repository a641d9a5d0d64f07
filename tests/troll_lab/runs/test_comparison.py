import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.pages import Page
from troll_lab.runs.comparison import Comparison, Group
from troll_lab.runs.comparison_files import write_comparison
from troll_lab.runs.comparison_tables import console_table, markdown
from troll_lab.runs.recorded import MANIFEST, read_runs

READ = {"troll": ["kl_bound"], "regression": ["kl_bound"], "clip": ["epsilon"], "none": []}


def write_run(folder: Path, surrogate: str, seed: int, success: float | None, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    settings = {"surrogate": surrogate, "seed": seed, "kl_bound": 0.05, "epsilon": 0.2, "output_dir": str(folder)}
    settings |= changes
    (folder / "config.yaml").write_text("".join(f"{name}: {value}\n" for name, value in settings.items()))
    summary = {
        "status": "interrupted" if success is None else "finished",
        "recipe": "quickstart",
        "surrogate": surrogate,
        "surrogate_settings": {name: settings[name] for name in READ[surrogate]},
        "success_before": 0.3,
        "success_after": success,
        "steps": 16,
        "eval_questions": 64,
        "entropy_after": 0.25,
        "seconds": 100 + seed,
        "training_seconds": 80,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    rows = [
        {"step": step, "reward": 0.3 + step / 100 + seed / 10, "entropy": 0.5, "trust_region/kl_before_mean": 1e-3}
        for step in range(1, 17)
    ]
    rows.append({"step": 8, "eval_rewards/success/mean": 0.4})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def summarise(run: Path, **changes: Any) -> None:
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | changes))


def write_folder(folder: Path) -> Path:
    """Two bounds for TROLL, one clip, two seeds of each, and a run that was interrupted."""
    for seed in (0, 1):
        write_run(folder / f"a-{seed}", "troll", seed, 0.60 + seed / 10, kl_bound=0.01)
        write_run(folder / f"b-{seed}", "troll", seed, 0.64 + seed / 10)
        write_run(folder / f"c-{seed}", "clip", seed, 0.58 + seed / 5)
    write_run(folder / "d", "none", 0, None)
    names = ["a-0", "b-0", "c-0", "a-1", "b-1", "c-1", "d", "not started"]
    (folder / MANIFEST).write_text(json.dumps({"runs": {name: {} for name in names}}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "compare")


def groups_of(*folders: Path) -> list[Group]:
    return Comparison(read_runs([*folders])).groups


def labels_of(*folders: Path) -> list[str]:
    return [group.label.removeprefix("quickstart ") for group in groups_of(*folders)]


def test_runs_that_differ_in_their_seed_are_one_group(folder: Path) -> None:
    comparison = Comparison(read_runs([folder]))
    troll, clip = "quickstart kl_bound=", "quickstart clip"
    assert [group.label for group in comparison.groups] == [f"{troll}0.01 troll", f"{troll}0.05 troll", clip]
    assert [group.finals for group in comparison.groups][2] == {0: 0.58, 1: pytest.approx(0.78)}
    assert comparison.surrogates == ["troll", "clip"]
    assert [dict(row)["kl_bound"] for row in comparison.table] == ["0.01", "0.05"]
    assert all(cells["clip"] is comparison.groups[2] for cells in comparison.table.values()), "it reads no kl_bound"


def test_differences_are_of_troll_and_each_rival_in_a_row(folder: Path) -> None:
    differences = Comparison(read_runs([folder])).differences
    assert [found.first.label for found in differences] == [f"quickstart kl_bound={k} troll" for k in ("0.01", "0.05")]
    assert [found.second.label for found in differences] == ["quickstart clip"] * 2
    assert [found.estimate.mean for found in differences] == [pytest.approx(-0.03), pytest.approx(0.01)]
    # With one surrogate, rows are compared to the first.
    (found,) = Comparison(read_runs([folder / name for name in ("a-0", "a-1", "b-0", "b-1")])).differences
    assert found.estimate.mean == pytest.approx(0.04)
    assert "kl_bound=0.05" in found.first.label


def test_a_setting_that_differs_between_surrogates_is_not_hidden(tmp_path: Path) -> None:
    fast = write_run(tmp_path / "fast", "troll", 0, 0.5, learning_rate=1e-3)
    slow = write_run(tmp_path / "slow", "clip", 0, 0.5, learning_rate=1e-5)
    comparison = Comparison(read_runs([fast, slow]))
    assert (len(comparison.table), comparison.differences) == (2, [])


def test_a_setting_that_some_runs_leave_out_tells_them_apart(tmp_path: Path) -> None:
    """A configuration leaves out what is None; the summary has every setting that the surrogate reads."""
    runs = [write_run(tmp_path / "0.3", "clip", 0, 0.7, epsilon_high=0.3), write_run(tmp_path / "null", "clip", 0, 0.6)]
    for run, value in zip(runs, (0.3, None), strict=True):
        summarise(run, surrogate_settings={"epsilon": 0.2, "epsilon_high": value})
    assert labels_of(*runs) == ["epsilon_high=0.3 clip", "epsilon_high=null clip"]


def test_a_setting_that_a_surrogate_sets_itself_makes_no_row(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a", "troll", 0, 0.5, loss_type="grpo")]
    runs.append(write_run(tmp_path / "b", "clip", 0, 0.5, loss_type="cispo"))
    assert len(Comparison(read_runs(runs)).table) == 2
    summarise(runs[1], surrogate_sets={"loss_type": "cispo"})
    assert len(Comparison(read_runs(runs)).table) == 1


def test_two_equal_runs_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="c-0 and again do not differ"):
        groups_of(folder, write_run(tmp_path / "again", "clip", 0, 0.5))


def test_runs_that_do_not_say_what_they_read_are_not_pooled(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(i), "troll", i, 0.5, kl_bound=0.01 * (i + 1)) for i in range(2)]
    for run in runs:  # an older version's summary did not say what the surrogate reads
        summarise(run, surrogate_settings=None)
    runs += [write_run(tmp_path / name, name, 0, 0.5) for name in ("troll", "clip")]
    assert labels_of(*runs) == ["kl_bound=0.01 troll", "kl_bound=0.02 troll", "kl_bound=0.05 troll", "clip"]


def test_unfinished_runs_change_no_label(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), "troll", seed, 0.5) for seed in (0, 1)]
    runs.append(write_run(tmp_path / "interrupted", "troll", 0, None, kl_bound=3))
    runs.append(write_run(tmp_path / "killed", "troll", 0, None, learning_rate=1.0))
    (runs[-1] / "summary.json").unlink()
    assert labels_of(*runs) == ["troll"]
    assert "comparison of quickstart\n" in write_comparison(runs, tmp_path).read_text().replace("</h1>", "\n")


def test_groups_meet_that_agree_on_what_both_read(tmp_path: Path) -> None:
    bounds = [write_run(tmp_path / f"k{bound}", "troll", 0, bound, kl_bound=bound) for bound in (0.01, 0.05)]
    ranges = [write_run(tmp_path / f"e{width}", "clip", 0, width, epsilon=width) for width in (0.1, 0.2)]
    slow = write_run(tmp_path / "slow", "clip", 0, 0.5, learning_rate=1e-6)
    for run in (*bounds, *ranges):
        with (run / "config.yaml").open("a") as file:
            file.write("learning_rate: 1.0e-4\n")
    differences = Comparison(read_runs([*bounds, *ranges, slow])).differences
    assert [found.estimate.mean for found in differences] == pytest.approx([-0.09, -0.19, -0.05, -0.15])


def test_a_cell_tells_of_the_runs_that_failed(folder: Path) -> None:
    recorded = {run.name: dict(run.settings) for run in read_runs([folder])}
    recorded["late"] = recorded["c-0"] | {"seed": 2}
    recorded["other"] = recorded["c-0"] | {"seed": 3}
    content = {"runs": recorded, "recipes": {"late": "quickstart", "other": "another"}}
    (folder / MANIFEST).write_text(json.dumps(content))
    page = Page(write_comparison([folder], folder))
    assert "68.0 ± 14.1 (2 of 3)" in page.text
    assert "65.0 ± 7.1 (2)" in page.text
    assert "of planned seeds if some runs have not finished" in page.text
    assert "late is left out: it is not started" in page.text


def test_runs_without_success_are_compared_by_their_reward(tmp_path: Path) -> None:
    runs = []
    for surrogate, rewards in (("troll", (1.5, 2.5)), ("clip", (-1.0, 1.0))):
        for seed, reward in enumerate(rewards):
            runs.append(write_run(tmp_path / f"{surrogate}{seed}", surrogate, seed, 0.5))
            summarise(runs[-1], success_before=None, success_after=None, reward_before=-2.0, reward_after=reward)
    page = Page(write_comparison(runs, tmp_path))
    for text in ("Final held-out reward", "2.000 ± 0.707 (2)", "0.000 ± 1.414 (2)", "+2.000 [", "−2.000"):
        assert text in page.text
    figures = json.loads((tmp_path / "comparison.json").read_text())
    assert figures["metric"] == "final held-out reward"
    assert figures["groups"][0]["reward_by_seed"] == {"0": 1.5, "1": 2.5}
    assert figures["groups"][0]["reward_before"] == -2.0
    assert figures["differences"][0]["reward"]["mean"] == 2.0
    assert "| quickstart | 2.000 ± 0.707 (2) | 0.000 ± 1.414 (2) |" in (tmp_path / "comparison.md").read_text()


def test_tables(folder: Path) -> None:
    comparison = Comparison(read_runs([folder]))
    lines = markdown(comparison).splitlines()
    assert lines[2:5] == [
        "|  | troll | clip |",
        "| --- | --- | --- |",
        "| quickstart kl_bound=0.01 | 65.0 ± 7.1 (2) | 68.0 ± 14.1 (2) |",
    ]
    assert lines[-2].startswith("| quickstart kl_bound=0.01 troll | quickstart clip | −3.0 [−66.5, +60.5] (2) |")
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(console_table(comparison))
    assert "69.0 ± 7.1 (2)" in console.export_text()


def found(*folders: Path) -> list[tuple[str, list[str], int]]:
    """Of each group β, the names of its runs, and how many are planned."""
    groups = groups_of(*folders)
    return [(dict(group.row)["beta"], [run.name for run in group.runs], group.planned) for group in groups]


def test_groups_distinguish_runs_that_record_a_setting(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), "troll", seed, 0.6) for seed in (0, 1)]
    runs.append(write_run(tmp_path / "beta", "troll", 0, 0.1, beta=0.04))
    runs.append(write_run(tmp_path / "unfinished", "troll", 2, None))
    assert found(*runs) == [("default", ["0", "1"], 3), ("0.04", ["beta"], 1)]


def test_groups_plan_no_run_of_an_unfinished_method(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "done", "troll", 0, 0.6, kl_bound=0.01)]
    for bound in (0.01, 0.05):
        runs += [write_run(tmp_path / f"{bound}-{seed}", "troll", seed, None, kl_bound=bound) for seed in (1, 2)]
    assert [group.planned for group in groups_of(*runs)] == [3]


def test_groups_know_the_settings_that_only_the_manifest_has(tmp_path: Path) -> None:
    """A comparison that goes on with `--beta 0.0 0.04` keeps the runs that were made without it."""
    write_run(tmp_path / "old", "troll", 0, 0.6)
    write_run(tmp_path / "new", "troll", 1, 0.5, beta=0.0)
    write_run(tmp_path / "other", "troll", 1, 0.1, beta=0.04)
    runs = {"old": {"beta": 0.0}, "new": {"beta": 0.0}, "other": {"beta": 0.04}}
    (tmp_path / MANIFEST).write_text(json.dumps({"runs": runs}))
    assert found(tmp_path) == [("0.0", ["old", "new"], 2), ("0.04", ["other"], 1)]


@pytest.mark.parametrize(
    ("settled", "labels"),
    [([], ["kl_bound=0.01 troll", "kl_bound=0.2 regression"]), (["kl_bound"], ["troll", "regression"])],
)
def test_settings_that_were_chosen_for_each_method_make_no_row(tmp_path: Path, settled, labels) -> None:
    for name, surrogate, bound in (("a", "troll", 0.01), ("b", "regression", 0.2)):
        write_run(tmp_path / name, surrogate, 0, 0.5, kl_bound=bound)
    (tmp_path / MANIFEST).write_text(json.dumps({"runs": {"a": {}, "b": {}}, "settled": settled}))
    assert labels_of(tmp_path) == labels


def test_seeds_that_agree_have_no_interval(tmp_path: Path) -> None:
    for lead, text in ((0.0, "0.0 (2), no seed differs"), (0.1, "+10.0 (2), the same for every seed")):
        runs = [
            write_run(tmp_path / f"{lead}" / f"{name}{seed}", name, seed, 0.5 + 0.2 * seed + lead * (name == "troll"))
            for name in ("troll", "clip")
            for seed in (0, 1)
        ]
        assert text in markdown(Comparison(read_runs(runs)))
    equal = [write_run(tmp_path / "equal" / str(seed), "troll", seed, 0.5) for seed in (0, 1)]
    assert "50.0 ± 0.0 (2)50" not in Page(write_comparison(equal, tmp_path)).text


def test_folders_without_runs(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither a run folder"):
        read_runs([tmp_path])
    (tmp_path / MANIFEST).write_text('{"runs": {"a": {}}}')
    with pytest.raises(FileNotFoundError, match="has no runs yet"):
        read_runs([tmp_path])
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.yaml").write_text("a: [")
    with pytest.raises(ValueError, match=r"config\.yaml: not YAML"):
        read_runs([tmp_path / "bad"])
