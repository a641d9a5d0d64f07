import pytest

from troll_lab.rewards.style import Style, is_one_sentence, length_score, variety, words_of

GOOD = " value of its first argument, which must be an integer."


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        ("  One, two;\nTHREE.", ["one", "two", "three"]),
        ("os.path isn't 3.5 __init__", ["os", "path", "isn't", "3", "5", "__init__"]),
        ("it’s", ["it’s"]),
    ],
)
def test_words(text, words):
    assert words_of(text) == words


@pytest.mark.parametrize(("count", "score"), [(0, 0), (3, 0.75), (4, 1), (6, 0.5), (8, 0), (40, 0)])
def test_length_score_falls_linearly_on_both_sides(count, score):
    assert length_score("word " * count, 4) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("", 1),
        ("a a a of of", 1),
        ("same same", 0.5),
        ("Same words, same WORDS", 0.5),
        ("four different long words", 1),
    ],
)
def test_variety_counts_long_words(text, share):
    assert variety(text) == share


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ends here.", True),
        (" spaces around. ", True),
        ("see os.path and 3.5.", True),
        ("does not end", False),
        ("", False),
        ("Two of. them.", False),
        ("A question? Yes.", False),
        ("an ellipsis...", True),
        ("loud!", False),
    ],
)
def test_one_sentence(text, expected):
    assert is_one_sentence(text) is expected


def test_success_takes_all_of_the_style_and_the_score_grades_it():
    style = Style(words=10, tolerance=1)
    assert style.is_met(GOOD)
    assert style.score(GOOD) == 1
    for worse in (GOOD.rstrip("."), GOOD.replace("integer", "argument"), GOOD + " More.", " It is short."):
        assert not style.is_met(worse)
        assert 0 < style.score(worse) < 1
    assert style.is_met(GOOD.replace("first ", ""))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"words": 0}, "words must be a whole number of at least 1, got 0"),
        ({"words": 2.5}, "words must be a whole number of at least 1, got 2.5"),
        ({"tolerance": -1}, "tolerance must be a whole number of at least 0, got -1"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        Style(**arguments)
