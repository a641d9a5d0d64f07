import pytest

from troll_lab.rewards.style import Style, is_one_sentence, length_score, variety, words_of

GOOD = " value of its first argument, which must be an integer."


@pytest.mark.parametrize(
    ("function", "text", "expected"),
    [
        (words_of, "", []),
        (words_of, "  One, two;\nTHREE.", ["one", "two", "three"]),
        (words_of, "os.path isn't 3.5 __init__", ["os", "path", "isn't", "3", "5", "__init__"]),
        (words_of, "it’s", ["it’s"]),
        (variety, "", 1),
        (variety, "a a a of of", 1),
        (variety, "same same", 0.5),
        (variety, "Same words, same WORDS", 0.5),
        (variety, "four different long words", 1),
        (is_one_sentence, "ends here.", True),
        (is_one_sentence, " spaces around. ", True),
        (is_one_sentence, "see os.path and 3.5.", True),
        (is_one_sentence, "an ellipsis...", True),
        (is_one_sentence, "does not end", False),
        (is_one_sentence, "", False),
        (is_one_sentence, "Two of. them.", False),
        (is_one_sentence, "A question? Yes.", False),
        (is_one_sentence, "loud!", False),
        (lambda text: length_score(text, 4), "word " * 0, 0),
        (lambda text: length_score(text, 4), "word " * 3, 0.75),
        (lambda text: length_score(text, 4), "word " * 4, 1),
        (lambda text: length_score(text, 4), "word " * 6, 0.5),
        (lambda text: length_score(text, 4), "word " * 40, 0),
    ],
)
def test_parts_of_style(function, text, expected):
    assert function(text) == expected


def test_style_is_met_by_all_parts_and_scored_by_their_mean():
    style = Style(words=10, tolerance=1)
    assert style.is_met(GOOD) and style.score(GOOD) == 1
    assert style.is_met(GOOD.replace("first ", ""))
    for worse in (GOOD.rstrip("."), GOOD.replace("integer", "argument"), GOOD + " More.", " It is short."):
        assert not style.is_met(worse)
        assert 0 < style.score(worse) < 1
