import json

import pytest

from tests.troll_lab.rewards import datasets
from tests.troll_sandbox import idioms
from troll_lab.rewards.demands import borrowed_packages, needs_plain
from troll_sandbox.cases import CodeTests

REPLACED = "what the program prints or reads is replaced"
PATCHED = "a name is patched"
PASSED_OBJECT = "the program is passed an object of a class of the tests"


def parsed(*asserts: str, **fields: object) -> CodeTests:
    return datasets.code_tests(json.dumps({"asserts": asserts, **fields}))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (idioms.PLAIN["a subclass"], "a class inherits from the program's Base"),
        (idioms.PLAIN["printed text"], REPLACED),
        (idioms.PLAIN["a replaced input"], REPLACED),
        (idioms.PLAIN["an object of the tests"], PASSED_OBJECT),
        (idioms.PLAIN["a signature"], "the program's code is inspected"),
        ("import sys, io\nsys.stdin = io.StringIO('3')\nassert f() == 3", REPLACED),
        ("import io\nassert f(io.StringIO('3')) == 3", PASSED_OBJECT),
        ("class A: pass\na = A()\nassert f(x=a)", PASSED_OBJECT),
        ("import os\nos.environ['A'] = '1'\nassert f() == 1", "the environment is changed"),
        ("with open('/tmp/a', 'w') as file:\n    file.write('1')\nassert f('/tmp/a') == 1", "a file is written"),
        ("from unittest.mock import patch\nwith patch('random.random', return_value=4):\n    assert f() == 4", PATCHED),
        ("assert f.__code__.co_argcount == 1", "__code__ of the program's f is read"),
    ],
)
def test_needs_plain_names_the_reason(source, reason):
    assert needs_plain(parsed("assert f(0)", source)) == [reason]
    assert needs_plain(parsed("assert f(0)", setup=source)) == [reason]


def test_needs_plain_knows_the_parameter_of_check():
    check = "import io\ndef check(candidate):\n    assert candidate(io.StringIO('x'))"
    tests = datasets.code_tests(json.dumps({"check": check, "entry_point": "f"}))
    assert needs_plain(tests) == [PASSED_OBJECT]


@pytest.mark.parametrize("name", idioms.JUDGED)
def test_needs_plain_is_empty_for_tests_that_a_judge_can_run(name):
    assert needs_plain(parsed(idioms.JUDGED[name])) == []


def test_real_tasks_demand_nothing():
    for problem in datasets.mbpp() + datasets.humaneval():
        tests = datasets.code_tests(problem.tests)
        assert (problem.name, needs_plain(tests), borrowed_packages(tests)) == (problem.name, [], [])


@pytest.mark.parametrize(
    ("asserts", "setup", "packages"),
    [
        (["assert np.allclose(f(1), 2)", "with pytest.raises(ValueError):\n    f(2)"], "", ["np", "pytest"]),
        (["assert np.allclose(f(1), 2)"], "import numpy as np", []),
        (["assert math.isclose(f(1), 2)"], "", []),
    ],
)
def test_borrowed_packages_are_used_and_not_imported(asserts, setup, packages):
    assert borrowed_packages(parsed(*asserts, setup=setup)) == packages
