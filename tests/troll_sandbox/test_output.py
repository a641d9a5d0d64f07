import pytest

from troll_sandbox.output import same_output

LONG = "7" * 5000

EQUAL = [
    ("3", "3"), ("3\n", "3"), ("3  \n\n\n", "3"), ("\n3", "3"), ("3", "\n \n3"), ("  3\n4", "3\n4"),
    ("1 2\n3\n", "1  2 \n3"), ("a\r\nb\r\n", "a\nb"), ("1.5e300", "1.5e300"), ("", ""), ("\n\n", ""), ("é", "é"),
]  # fmt: skip
DIFFERENT = [
    ("12", "1 2"), ("1 2", "12"), ("1\n2", "1 2"), ("1\n\n2", "1\n2"), ("3\n3", "3"), ("3", ""), ("", "3"), ("4", "3"),
    ("1000000", "1000001"), ("9007199254740993", "9007199254740992"), ("nan", "3"), ("1e999", "1.5e999"),
    ("3", "1e400"), ("5", "9" * 350 + ".5"), ("1_0.5", "10.5"), ("1_0", "10"), ("0.5x", "0.5"), ("YES", "Yes"),
    ("٣.٠", "3.0"), ("٣", "3"), ("²", "2"), ("3." + "0" * 500, "3.0"), ("3.1", "3"), ("1e400", "3"),
    (LONG, "7" * 4999 + "8"), (f"-{LONG}", LONG),
]  # fmt: skip
#: Equal numbers, but other texts.
EQUAL_NUMBERS = [
    ("3.0", "3"), ("03", "3"), ("+3", "3"), ("3.0000001", "3"), ("3e0", "3"), ("-0", "0"), (f"+{LONG}", f"0{LONG}"),
    (f"-0{LONG}", f"-{LONG}"),
]  # fmt: skip


@pytest.mark.parametrize("compare", ["tokens", "numbers"])
@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        *((*pair, {"tokens", "numbers"}) for pair in EQUAL),
        *((*pair, {"numbers"}) for pair in EQUAL_NUMBERS),
        *((*pair, set()) for pair in DIFFERENT),
    ],
)
def test_same_output(actual, expected, same, compare):
    assert same_output(actual, expected, compare) == (compare in same)
