import subprocess
import sys

_CODE = """
import sys
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
# Every process of the pool imports this: torch would take most of its memory, and four seconds at its start.
assert not {"torch", "troll"} & sys.modules.keys()
"""


def test_forbid_code_lets_sympy_read_numbers_without_torch(tmp_path):
    subprocess.run([sys.executable, "-c", _CODE], check=True, cwd=tmp_path)
    assert not list(tmp_path.iterdir())
