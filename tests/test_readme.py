"""What the README says is so: its links lead somewhere, its commands exist, its sentences about results are true."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from troll_lab.episodic.config import EpisodicConfig

ROOT = Path(__file__).parents[1]
STUDY = ROOT / "docs" / "study"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    """In the files as they are, without the site."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if "://" not in link:
            target = page.parent / path if path else page
            assert target.exists(), link
            # An anchor with a dot is a name of the reference, which the site makes of docstrings.
            assert not anchor or "." in anchor or anchor in anchors(target), link


def test_readme_links_every_page_for_users() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md", "compat.md"}
    assert pages <= {Path(link).name for link in re.findall(r"\]\((docs/[\w-]+\.md)", README)}


def test_commands_of_the_readme_exist() -> None:
    made = set(re.findall(r"\bmake ([\w-]+)", README))
    assert {"demo", "test"} <= made <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    benchmarks = set(re.findall(r"python -m benchmarks (\w+)", README))
    assert benchmarks and all((ROOT / "benchmarks" / f"{name}.py").is_file() for name in benchmarks)


def rows_of(page: Path, first: str) -> list[list[str]]:
    """The cells of the rows of a table that begin with a text."""
    lines = [line for line in page.read_text("utf-8").splitlines() if line.startswith(f"| {first}")]
    assert lines, (page, first)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_readme_says_of_the_study_what_it_found() -> None:
    """`make results` computes the table of the study's page, and its verdicts where they were tested."""
    ours, theirs = (rows_of(page, "(")[:7] for page in (ROOT / "README.md", STUDY / "results.md"))
    assert [row[0][:3] for row in ours] == ["(a)", "(a)", "(a)", "(b)", "(b)", "(c)", "(d)"]
    assert ours == [[cell.replace(" points", "") for cell in row] for row in theirs]
    for (regime, clip, penalty, use), tested in zip(ours, (True, False, False, True, False, True, False), strict=True):
        if tested:
            verdicts = {row[1]: row for row in rows_of(STUDY / "regimes.md", regime[:3]) if row[-2] == "20"}
            for cell, rival in ((clip, "clip"), (penalty, "KL penalty")):
                assert cell == " ".join(verdicts[rival][2:4])
            behind = verdicts["KL penalty"][-1] == "worse"
            assert use.startswith("KL penalty") == behind
        elif use.startswith("KL penalty"):
            assert penalty.startswith("−") and penalty.rpartition(", ")[2].startswith("−"), "clearly ahead of TROLL"


def test_readme_says_of_the_kl_target_what_it_found() -> None:
    named = {"8 updates": ("K2", "(a)"), "32 updates": ("K2", "(b)"), "SmolLM2, LoRA": ("K3", "SmolLM2")}

    def tables(*firsts: str) -> list[list[str]]:
        return [row for first in firsts for row in rows_of(STUDY / "kl-target.md", first)]

    def row(name: str, regime: str) -> list[str]:
        return next(cells for cells in tables(name) if cells[1] == regime)

    assert row("K1", "(a) and (b)")[-1] == row("K2", "(a) and (b)")[-1] == "holds"  # "to within 5 points"
    assert row("K3", "SmolLM2")[-1] == "holds"  # "nothing is lost"
    behind = {cells[0]: cells[2] for cells in tables("(", "SmolLM2") if cells[1] == "KL penalty"}
    said = [(*row(name, regime)[3:5], behind[regime]) for name, regime in named.values()]
    assert said == [tuple(cells[1:]) for first in named for cells in rows_of(ROOT / "README.md", first)]
    low = next(cells for cells in tables("TROLL") if len(cells) == 10)[8]
    assert f"In (a) TROLL does lose from 1e-6, {low}" in " ".join(README.split())


def test_readme_says_what_a_step_costs() -> None:
    """The time of a step on a GPU and on CPUs, and the head's time and memory on a GPU."""
    table = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")

    def measured(command: str) -> list[list[float]]:
        found = re.findall(
            rf"^\|[^|]*\| `python -m benchmarks {command}[^|]*` \| ([^(|]*)[^|]*\| ([^(|]*)", table, re.M
        )
        assert found, command
        return [[float(number) for row in column for number in row.split(",")] for column in zip(*found, strict=True)]

    on_gpu, on_cpu = measured("step --device cuda")[0], measured("step --repeats 3")[0]
    ((_, said, *_),) = rows_of(ROOT / "README.md", "time of a step")
    assert said == (
        f"{min(on_gpu)} to {max(on_gpu)} times the clip's on an H200, {min(on_cpu)} to {max(on_cpu)} on CPUs"
    )
    time, memory = measured("head --device cuda")
    said = f"in {min(time)} to {max(time)} of the time and {min(memory)} to {max(memory)} of the memory of TRL's"
    assert said in " ".join(README.split())


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 70


def test_options_that_pages_show_exist() -> None:
    """Of the commands that the README and the pages show, and those that they mention in a sentence."""
    recipes = pytest.importorskip("troll_lab.recipes", reason="needs TRL")
    of_commands = set(re.findall(r'"--(\w+)"', (ROOT / "src" / "troll_lab" / "cli.py").read_text()))
    of_compare = {"seeds", "jobs"}
    of_others = {"field", "logits-processors", "logprobs-mode", "max-logprobs", "machine_rank", "minutes"}
    of_others |= {"privileged", "rootless", "solution", "tune"}
    of_movements = {field.name for field in fields(EpisodicConfig)}
    known = recipes.FIELDS | of_commands | of_compare | of_movements
    found = 0
    # The study's commands are those of the commit that ran them, and may have options that have left since.
    of_study = {STUDY / "runs.md", STUDY / "study.md"}
    pages = {ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - of_study
    for path in sorted(pages):
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        commands = re.findall(
            r"\btroll (?:train|compare|eval) .*", "".join(re.findall(r"^```.*?^```", text, re.M | re.S))
        )
        options = {option for command in commands for option in re.findall(r" --([\w-]+)", command)}
        assert options <= known, path
        assert set(re.findall(r"`--([\w-]+)", text)) <= known | of_others, path
        found += len(options)
    assert found > 50
