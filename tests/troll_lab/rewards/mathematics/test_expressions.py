import subprocess
import sys

_CODE = """
import sympy
from troll_lab.rewards.mathematics.expressions import forbid_code, is_equal
forbid_code()
assert sympy.sympify("72") == 72
assert is_equal("72", r"\\frac{144}{2}")
assert is_equal("50", r"50 \\% + 49.5")  # math-verify passes on the space before the sign
for text in ("__import__('os').system('touch pwned')", "print(1)", "[1][0]", "().__class__", "lambda: 0"):
    try:
        sympy.sympify(text)
    except PermissionError:
        continue
    raise AssertionError(text)
"""


def test_expressions_load_neither_torch_nor_troll():
    # Every process of the pool imports them: torch would take most of its memory, and four seconds at its start.
    code = "import sys, troll_lab.rewards.mathematics.expressions; print({'torch', 'troll'}.intersection(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_forbid_code_lets_sympy_evaluate_only_numbers_and_names(tmp_path):
    subprocess.run([sys.executable, "-c", _CODE], check=True, cwd=tmp_path)
    assert not list(tmp_path.iterdir())
