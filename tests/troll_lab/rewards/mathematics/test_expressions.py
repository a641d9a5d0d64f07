import subprocess
import sys

from troll_lab.rewards.mathematics import worker

_CODE = """
import runpy, sys
import sympy
expressions = runpy.run_path(sys.argv[1])
expressions["forbid_code"]()
assert sympy.sympify("72") == 72
assert expressions["is_equal"]("72", r"\\frac{144}{2}")
assert expressions["is_equal"]("50", r"50 \\% + 49.5")  # math-verify passes on the space before the sign
for text in ("__import__('os').system('touch pwned')", "print(1)", "[1][0]", "().__class__", "lambda: 0"):
    try:
        sympy.sympify(text)
    except PermissionError:
        continue
    raise AssertionError(text)
"""


def test_forbid_code_lets_sympy_evaluate_only_numbers_and_names(tmp_path):
    path = worker.__file__.replace("worker", "expressions")
    subprocess.run([sys.executable, "-c", _CODE, path], check=True, cwd=tmp_path)
    assert not list(tmp_path.iterdir())
