import pytest

from troll_sandbox.output import same_output


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ("3", "3"),
        ("3\n", "3"),
        ("3  \n\n\n", "3"),
        ("\n3", "3"),
        ("3", "\n \n3"),
        ("  3\n4", "3\n4"),
        ("1 2\n3\n", "1  2 \n3"),
        ("a\r\nb\r\n", "a\nb"),
        ("1.5e300", "1.5e300"),
        ("", ""),
        ("\n\n", ""),
        ("é", "é"),
    ],
)
@pytest.mark.parametrize("compare", ["tokens", "numbers"])
def test_same_output_accepts(actual, expected, compare):
    assert same_output(actual, expected, compare)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ("12", "1 2"),
        ("1 2", "12"),
        ("1\n2", "1 2"),
        ("1\n\n2", "1\n2"),
        ("3\n3", "3"),
        ("3", ""),
        ("", "3"),
        ("4", "3"),
        ("1000000", "1000001"),
        ("9007199254740993", "9007199254740992"),
        ("nan", "3"),
        ("1e999", "1.5e999"),
        ("3", "1e400"),
        ("5", "9" * 350 + ".5"),
        ("1_0.5", "10.5"),
        ("1_0", "10"),
        ("0.5x", "0.5"),
        ("YES", "Yes"),
        ("٣.٠", "3.0"),
        ("٣", "3"),
        ("²", "2"),
        ("3." + "0" * 500, "3.0"),
    ],
)
@pytest.mark.parametrize("compare", ["tokens", "numbers"])
def test_same_output_rejects(actual, expected, compare):
    assert not same_output(actual, expected, compare)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ("3.0", "3"),
        ("03", "3"),
        ("+3", "3"),
        ("3.0000001", "3"),
        ("3e0", "3"),
        ("-0", "0"),
        ("+" + "7" * 5000, "0" + "7" * 5000),
        ("-0" + "7" * 5000, "-" + "7" * 5000),
    ],
)
def test_same_output_compares_integers_as_texts_unless_compare_is_numbers(actual, expected):
    assert not same_output(actual, expected)
    assert same_output(actual, expected, "numbers")


def test_same_output_rejects_numbers_far_from_the_expected_one():
    assert not same_output("3.1", "3", "numbers")
    assert not same_output("1e400", "3", "numbers")
    assert not same_output("7" * 5000, "7" * 4999 + "8", "numbers")
    assert not same_output("-" + "7" * 5000, "7" * 5000, "numbers")
