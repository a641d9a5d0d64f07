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


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", README) if "://" not in link]
    assert len(links) > 20
    for link in links:
        path, _, anchor = link.partition("#")
        assert (ROOT / path).is_file(), link
        assert not anchor or anchor in anchors(ROOT / path), link


def test_every_page_for_users_is_linked() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md", "compat.md"}
    assert pages <= {Path(link).name for link in re.findall(r"\]\((docs/[\w-]+\.md)", README)}


def test_commands_exist() -> None:
    made = set(re.findall(r"\bmake ([\w-]+)", README))
    assert {"demo", "test"} <= made <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    benchmarks = set(re.findall(r"python -m benchmarks (\w+)", README))
    assert benchmarks and all((ROOT / "benchmarks" / f"{name}.py").is_file() for name in benchmarks)


def test_what_it_says_of_the_study_is_so() -> None:
    pytest.importorskip("matplotlib")
    from experiments import figures

    left, middle, right = figures.shown(ROOT / "docs" / "results" / "robustness.svg")
    assert "8 updates" in left["title"] and "32 updates" in middle["title"] and "rewards replaced" in right["title"]
    assert not any("interim" in panel["title"] for panel in (left, middle, right))
    lead: list[int] = []
    for panel, rate, fast in ((left, 1e-4, 3e-4), (middle, 3e-5, 1e-4), (right, 1e-4, 3e-4)):
        success = {name: dict(zip(line["rate"], line["mean"], strict=True)) for name, line in panel["lines"].items()}
        assert success["clip"][rate] == max(success["clip"].values())
        lead.append(round(100 * (success["TROLL"][fast] - success["clip"][fast])))
        assert success["KL penalty"][fast] > success["TROLL"][fast] + 0.05, "ahead where TROLL beats the clip"

    regimes, exploration = ((STUDY / f"{name}.md").read_text("utf-8") for name in ("regimes", "exploration"))

    def difference(regime: str, rival: str) -> tuple[float, str]:
        (row,) = re.findall(rf"^\| \({regime}\) \| {rival} \|(.*)\|$", regimes, re.M)
        points, *_, seeds, verdict = (cell.strip() for cell in row.split("|"))
        assert seeds == "20"
        return float(points.replace("−", "-")), verdict

    equal = [difference("a", "clip"), difference("a", "KL penalty"), difference("c", "clip")]
    assert [verdict for _, verdict in equal] == 3 * ["equivalent within 5 points"]
    found = [difference("b", rival) for rival in ("clip", "KL penalty")]
    assert [(round(points), verdict) for points, verdict in found] == [(7, "better"), (-7, "worse")]
    (minus_troll,) = re.findall(r"^\| clip epsilon=0\.2 \| \S+ ± \S+ \(20\) \| (\S+) ", exploration, re.M)
    assert minus_troll.startswith("−")
    text = " ".join(README.split())
    assert f"{min(lead)} to {max(lead)} points ahead of the clip" in text
    (other_seeds,) = re.findall(
        r"TROLL is ahead by 7\. .* other seeds, that lead is only (\+\S+ points \[\S+ \S+\])\.", text
    )
    results = (STUDY / "results.md").read_text("utf-8")
    assert f"20 other seeds, that lead is only {other_seeds}" in " ".join(results.split())
    (old_rollouts,) = re.findall(r"is ahead of the clip by (\+\S+ points \[\S+ \S+\])\.", text)
    assert f"far ahead of the clip, each at its best rate: {old_rollouts}" in " ".join(results.split())


def test_what_it_says_of_the_cost_is_measured() -> None:
    (low, high) = re.findall(r"([\d.]+) to ([\d.]+) of the time of TRL's head", README)[0]
    table = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| TRL's fused head.*\| `python -m benchmarks head --repeats 3` \| ([^(|]*)", table, re.M)
    ratios = [float(number) for number in row.split(",")]
    assert (min(ratios), max(ratios)) == (float(low), float(high))


def test_options_exist() -> None:
    """Of the commands that the README and the pages show, and those that they mention in a sentence."""
    recipes = pytest.importorskip("troll_lab.recipes", reason="needs TRL")
    of_commands = set(re.findall(r'"--(\w+)"', (ROOT / "src" / "troll_lab" / "cli.py").read_text()))
    of_compare = {"seeds", "jobs"}
    of_others = {
        "field",
        "logits-processors",
        "logprobs-mode",
        "max-logprobs",
        "machine_rank",
        "minutes",
        "privileged",
        "rootless",
    }
    of_others |= {"solution", "tune"}
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
