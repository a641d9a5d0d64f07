import threading

import pytest

from troll.rewards.math import final_answer, success


def _score(text, answer="72"):
    return success(prompts=["?"], completions=[text], answer=[answer])[0]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{72}.", "72"),
        (r"\boxed{1} then \boxed{72}", "72"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{72} and an open \boxed{7", "72"),
        (r"\boxed{}", ""),
        (r"\boxed{72", None),
        ("72", None),
        ("", None),
    ],
)
def test_final_answer(text, content):
    assert final_answer(text) == content


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{72}",
        r"\boxed{ 72 }",
        r"\boxed{72.00}",
        r"\boxed{\$72}",
        r"\boxed{$72}",
        r"\boxed{72 \text{ clips}}",
        r"\boxed{\frac{144}{2}}",
        r"\boxed{70} no, $70$, \boxed{72}",
    ],
)
def test_right_answers(text):
    assert _score(text) == 1.0
    assert _score([{"role": "assistant", "content": text}]) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "72",
        "#### 72",
        r"\boxed{}",
        r"\boxed{72",
        r"\boxed{73}",
        r"\boxed{-72}",
        r"\boxed{0.72}",
        r"\boxed{72} no, \boxed{73}",
        r"\boxed{71, 72, 73}",
        r"\boxed{71 \text{ or } 72}",
        r"\boxed{x}",
        r"\boxed{72 < x}",
        r"\boxed{\text{seventy-two}}",
        r"\boxed{\frac{72}{0}}",
        r"\boxed{\left(}",
    ],
)
def test_wrong_answers(text):
    assert _score(text) == 0.0
    assert _score([{"role": "assistant", "content": text}]) == 0.0


def test_thousands_separators():
    assert _score(r"\boxed{109,200,000}", "109200000") == 1.0
    assert _score(r"\boxed{109{,}200{,}000}", "109200000") == 1.0


def test_an_explosive_expression_is_wrong_in_time():
    assert _score(r"\boxed{9^{9^{9^9}}}") == 0.0


def test_outside_the_main_thread():
    scores = []
    thread = threading.Thread(target=lambda: scores.extend([_score(r"\boxed{72.0}"), _score(r"\boxed{71}")]))
    thread.start()
    thread.join()
    assert scores == [1.0, 0.0]
