import pytest

from troll_lab.tasks import TaskConfig, TaskError
from troll_lab.tasks.options import Options
from troll_lab.tasks.rows import Column


def options(**given):
    return Options(TaskConfig(task="mine", task_options=given))


def test_values_and_defaults():
    given = options(a="x", b="two", c=True, d=0.5, e=["f"], g={"h": 1, "i": 2}, columns={"prompt": "text"})
    found = [given.text("a"), given.choice("b", ["one", "two"]), given.flag("c"), given.number("d"), given.texts("e")]
    assert found == ["x", "two", True, 0.5, ("f",)]
    assert given.numbers("g", ("i", "h")) == {"h": 1, "i": 2}
    defaults = {"prompt": Column(("question",)), "answer": Column(("answer",))}
    assert given.columns(defaults) == {"prompt": Column(("text",)), "answer": Column(("answer",))}
    given.finish()
    given = options()
    found = [given.text("a"), given.choice("b", ["one", "two"]), given.flag("c"), given.number("d"), given.texts("e")]
    assert found == [None, "one", False, None, ()]
    assert given.numbers("g", ("h",)) is None
    assert given.columns(defaults) == defaults
    given.finish()


@pytest.mark.parametrize(
    ("take", "value", "message"),
    [
        (lambda each: each.text("a"), 3, "a must be a text, got 3"),
        (lambda each: each.choice("a", ["b", "c"]), "d", "a must be one of b, c, got 'd'"),
        (lambda each: each.choice("a", ["b", "c"]), ["b"], r"a must be one of b, c, got \['b'\]"),
        (lambda each: each.flag("a"), "yes", "a must be true or false, got 'yes'"),
        (lambda each: each.number("a"), 0, "a must be a number above 0, got 0"),
        (lambda each: each.number("a"), True, "a must be a number above 0, got True"),
        (lambda each: each.number("a"), float("nan"), "a must be a number above 0, got nan"),
        (lambda each: each.whole("a", 1), 0, "a must be a whole number of at least 1, got 0"),
        (lambda each: each.whole("a", 1), 1.0, "a must be a whole number of at least 1, got 1.0"),
        (lambda each: each.whole("a", 1, least=0), True, "a must be a whole number of at least 0, got True"),
        (lambda each: each.texts("a"), "b", "a must be a list of texts, got 'b'"),
        (lambda each: each.numbers("a", ("b", "c")), {"b": 1}, "a must be a mapping with b and c, got {'b': 1}"),
        (lambda each: each.numbers("a", ("b",)), {"b": -1}, "a.b must be a number above 0, got -1"),
    ],
)
def test_mistakes_name_the_option(take, value, message):
    with pytest.raises(TaskError, match=f"^task option {message}$"):
        take(options(a=value))


def test_columns_and_unknown_options_are_named():
    with pytest.raises(TaskError, match="columns must be a mapping of names"):
        options(columns=["a"]).columns({})
    with pytest.raises(TaskError, match="task 'mine' reads no column 'reply'; it reads prompt"):
        options(columns={"reply": "a"}).columns({"prompt": Column(("question",))})
    given = options(levle=3)
    given.text("level")
    given.flag("strict")
    with pytest.raises(TaskError, match="task 'mine' has no option 'levle'; it has level, strict"):
        given.finish()
    with pytest.raises(TaskError, match="it takes none"):
        options(level=3).finish()
