import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS, create_dataset

from troll_lab.tasks import TaskConfig, TaskError, load_task
from troll_lab.tasks.judges import JUDGES, Judge
from troll_lab.tasks.reasoning_gym import Question, is_correct

Entry = dict[str, Any]

BY_VERIFIER, BY_TEXT = ([name for name, judge in JUDGES.items() if judge is each] for each in Judge)
REFUSED = {name: reason for name, reason in JUDGES.items() if isinstance(reason, str)}

# Options that make questions quickly.
QUICK: dict[str, dict[str, Any]] = {
    "futoshiki": {"max_board_size": 4},
    "zebra_puzzles": {"num_people": 3, "num_characteristics": 3},
}
LARGE = {"min_rows": 80, "max_rows": 80, "min_cols": 80, "max_cols": 80, "max_transforms": 1, "w_crop": 0}

# Wrong answers, with the right one as {}.
WRONG = (
    "", "x", "nan", "0x", "True", "null", "[]", "{{}}",
    "x{}", "{}x", "-{}", "{}?", "({})", "[{}]", "'{}'", "{} {}", "{}\n{}", "{},{}", "{} or {}", "{}, and more",
    "{} # {}", "{}; exit()", "It is false that {}", "not {}", "the answer is {}", "{}\n\nor 1",
)  # fmt: skip

HOSTILE = (
    "exit()", "__import__('os').abort()", "open('a', 'w')", "9**9**9**9", "60**75**8", "99999999!", "1e999999999",
    "1e-999999999", "1e" + "9" * 18, "sNaN", "-inf", "9" * 9_999, "9" * 10**6, "0." + "1" * 10**6, "x" * 10**6,
    "٣" * 10**5, "(" * 900 + "1" + ")" * 900, "(" * 10**6, "[" * 10**6, '{"a":' * 10**5, "-" * 10**6, "\n" * 10**6,
    " 1" * 10**6, "9×" * 4_999, "9×" * 10**6, "A," * 10**6, "right " * 10**5, "R99999999", "A+999999999999",
    "exp(" * 300 + "9" + ")" * 300, "lambda: 1", "1if 1else 1", "E**(E**(E**9))",
)  # fmt: skip

# Right answers that are not the data set's own text.
ALSO_RIGHT: dict[str, Callable[[Entry], str]] = {
    "chain_sum": lambda entry: f"{int(entry['answer']):+,}.0",
    "color_cube_rotation": lambda entry: entry["answer"].title(),
    "decimal_chain_sum": lambda entry: entry["answer"] + "0",
    "family_relationships": lambda entry: entry["answer"].title(),
    "futoshiki": lambda entry: re.sub(" +\n", "\n", entry["answer"]),
    "manipulate_matrix": lambda entry: entry["answer"].replace("\n", " \n"),
    "needle_haystack": lambda entry: entry["answer"].lower(),
    "palindrome_generation": lambda entry: entry["answer"].upper(),
    "path_star": lambda entry: entry["answer"].replace(" ", "  "),
    "power_function": lambda entry: f"{float(entry['answer']):.2e}",
    "prime_factorization": lambda entry: " × ".join(entry["answer"].split(" × ")[::-1]),
    "products": lambda entry: f"{int(entry['answer']):,}",
    "rectangle_count": lambda entry: "0" + entry["answer"],
    "sentence_reordering": lambda entry: entry["answer"].upper(),
    "shortest_path": lambda entry: entry["answer"].replace(" ", "\n"),
    "tsumego": lambda entry: entry["answer"].lower(),
    "word_ladder": lambda entry: entry["answer"].replace(",", ", "),
    "zebra_puzzles": lambda entry: entry["answer"].title(),
}

# Wrong answers to which the data set's own verifier gives the full score: why it does not judge them.
VERIFIER_PAYS: dict[str, Callable[[Entry], str]] = {
    "advanced_geometry": lambda entry: f"{entry['answer']}, 0",
    "arc_agi": lambda entry: f"Shape: none\n{entry['answer']}",
    "bitwise_arithmetic": lambda entry: str(int(entry["answer"], 16)),
    "coin_flip": lambda entry: "0",
    "complex_arithmetic": lambda entry: "nan",
    "cryptarithm": lambda entry: f"{entry['answer'][0]}=10,{entry['answer']}",
    "decimal_arithmetic": lambda entry: str(float(entry["answer"]) + 0.0005),
    "dice": lambda entry: f"{entry['answer'][0]}\n{entry['answer'][1:]}",
    "fraction_simplification": lambda entry: f"{entry['answer']} or 1/2",
    "game_of_life": lambda entry: f"{entry['answer'][:-1]},[1]]",
    "game_of_life_halting": lambda entry: "the question",
    "graph_color": lambda entry: '{"0": "none", ' + json.dumps(entry["metadata"]["possible_answer"])[1:],
    "group_anagrams": lambda entry: json.dumps([dict.fromkeys(x, "no") for x in entry["metadata"]["solution"]]),
    "gsm_symbolic": lambda entry: f"-{entry['answer']} or 3",
    "jugs": lambda entry: entry["answer"].replace('",', ' not",'),
    "kakurasu": lambda entry: f"{entry['answer']} 7 and more",
    "knights_knaves": lambda entry: f"It is false that {entry['answer']}",
    "letter_jumble": lambda entry: f"{entry['answer']} and more",
    "number_format": lambda entry: str(entry["metadata"]["solution"] + 0.005),
    "number_sorting": lambda entry: json.dumps([float(x) + 0.5 for x in entry["metadata"]["sorted_numbers"]]),
    "palindrome_partitioning": lambda entry: json.dumps(
        [dict.fromkeys(x, "no") if len(set(x)) == len(x) else x for x in entry["metadata"]["solution"]]
    ),
    "polynomial_equations": lambda entry: f"maybe, {entry['answer']}",
    "pool_matrix": lambda entry: f"{entry['answer']} # more",
    "propositional_logic": lambda entry: entry["metadata"]["premises"][0],
    "quantum_lock": lambda entry: f"not {entry['answer']}",
    "rearc": lambda entry: f"Shape: none\n{entry['answer']}",
    "sokoban": lambda entry: f"{entry['answer']} x",
    "spell_backward": lambda entry: f"{entry['answer']} or more",
    "survo": lambda entry: f"{entry['answer']} x",
    "time_intervals": lambda entry: f"{entry['answer']} or more",
    "tower_of_hanoi": lambda entry: f"Never{entry['answer']}",
    "word_sorting": lambda entry: f"{entry['answer']}, and, more",
}


def filled(template: str, answer: str) -> str:
    return template.replace("{{}}", "\0").replace("{}", answer).replace("\0", "{}")


def test_judges_name_every_data_set() -> None:
    assert list(JUDGES) == sorted(DATASETS)


@pytest.mark.parametrize("name", BY_VERIFIER)
def test_verifier_pays_for_right_answers_only(name: str) -> None:
    entries = create_dataset(name, seed=3, size=5, **QUICK.get(name, {}))
    for entry in entries:
        question, answer = Question("", entry), entry["answer"]
        assert is_correct(entries, answer, question)
        assert is_correct(entries, ALSO_RIGHT[name](entry), question)
        for wrong in (filled(template, answer) for template in WRONG):
            assert not is_correct(entries, wrong, question), wrong


@pytest.mark.parametrize("name", BY_VERIFIER)
def test_verifier_runs_nothing_and_ends(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    entries = create_dataset(name, seed=3, size=1, **QUICK.get(name, {}))
    entry = entries[0]
    begin = time.process_time()
    for answer in (*HOSTILE, *(f"{entry['answer']}{hostile}" for hostile in HOSTILE)):
        assert not is_correct(entries, answer, Question("", entry)), answer[:40]
    assert time.process_time() - begin < 2  # prime_factorization would take 12 seconds for a million characters
    assert not list(tmp_path.iterdir())


def test_verifier_reads_long_right_answers() -> None:
    entries = create_dataset("manipulate_matrix", seed=3, size=1, **LARGE)
    entry = entries[0]
    assert len(entry["answer"]) > 10_000
    assert is_correct(entries, entry["answer"], Question("", entry))


@pytest.mark.parametrize("name", BY_TEXT)
def test_text_is_compared_without_the_verifier(name: str) -> None:
    for entry in create_dataset(name, seed=3, size=5, **QUICK.get(name, {})):
        question, answer = Question("", entry), entry["answer"]
        assert answer == answer.strip()
        assert is_correct(None, answer, question) and is_correct(None, f" {answer}\n", question)
        others = {filled(template, answer) for template in WRONG} | {*HOSTILE, answer.swapcase(), f"0{answer}"}
        for wrong in others - {answer}:
            assert not is_correct(None, wrong, question), wrong[:40]


def test_every_process_draws_the_same_questions() -> None:
    """Python's order of sets of texts differs between processes."""
    script = f"""
import hashlib, json, sys
from reasoning_gym.factory import create_dataset
quick = {QUICK!r}
for name in {BY_VERIFIER + BY_TEXT!r}:
    entries = [entry["question"] for entry in create_dataset(name, seed=3, size=4, **quick.get(name, {{}}))]
    print(name, hashlib.sha256(json.dumps(entries).encode()).hexdigest())
"""
    found = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout.splitlines()
        for seed in ("1", "2")
    ]
    assert len(found[0]) > 60 and found[0] == found[1]


@pytest.mark.parametrize("name", REFUSED)
def test_refused_data_sets_are_named_with_the_reason(name: str) -> None:
    with pytest.raises(TaskError, match=f"'{name}' is refused: {REFUSED[name]}; .*a task in Python"):
        load_task(TaskConfig(f"reasoning_gym:{name}"))
    with pytest.raises(TaskError, match=f"'{name}' is refused"):
        is_correct(None, "1", Question("", {"answer": "1", "metadata": {"source_dataset": name}}))


def test_data_sets_that_nobody_checked_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASETS, "brand_new", DATASETS["chain_sum"])
    with pytest.raises(TaskError, match="'brand_new' is refused: nobody has checked yet"):
        load_task(TaskConfig("reasoning_gym:brand_new"))


def test_unknown_data_set_lists_those_that_are_not_refused() -> None:
    with pytest.raises(TaskError, match="unknown reasoning-gym data set") as error:
        load_task(TaskConfig("reasoning_gym:chain_sums"))
    assert str(error.value).partition("it has ")[2].split(", ") == sorted(BY_VERIFIER + BY_TEXT)


@pytest.mark.parametrize("name", VERIFIER_PAYS)
def test_verifier_that_pays_for_wrong_answers_is_not_asked(name: str) -> None:
    entries = create_dataset(name, seed=3, size=60)
    answers = ((VERIFIER_PAYS[name](entry), entry) for entry in entries)
    paid = next((pair for pair in answers if entries.score_answer(*pair) >= 1), None)
    assert paid is not None, "reasoning-gym has mended this verifier"
    assert JUDGES[name] is not Judge.VERIFIER
    if JUDGES[name] is Judge.TEXT:
        assert not is_correct(entries, paid[0], Question("", paid[1]))


def test_verifier_that_evaluates_the_answer_is_not_asked() -> None:
    evaluated = re.compile(r"\b(?:eval|parse_expr|sympify|exec)\(answer")
    found = {
        path.stem
        for path in Path(reasoning_gym.__file__).parent.rglob("*.py")
        if evaluated.search(path.read_text(encoding="utf-8"))
    }
    assert len(found) == 9
    assert not found.intersection(BY_VERIFIER)


@pytest.mark.parametrize(
    ("name", "answer", "wrong"), [("calendar_arithmetic", "-1", "7"), ("figlet_font", "ABCDEFGHIJ", "ABCDEFGHIJK")]
)
def test_generous_verifier_is_not_asked(name: str, answer: str, wrong: str) -> None:
    verifier = create_dataset(name, size=1)
    entry = {"question": "", "answer": answer, "metadata": {"source_dataset": name, "task": "count_days"}}
    assert verifier.score_answer(wrong, entry) >= 1
    assert not is_correct(verifier, wrong, Question("", entry))
