import pytest

from troll_lab.tasks import TaskConfig, TaskError
from troll_lab.tasks.dataset_task import FLAG, NUMBER, OVERLONG, PAIRS, TEXT, TEXTS, Options, one_of, whole_number
from troll_lab.tasks.rows import Column


def options(**given):
    return Options(TaskConfig(task="mine", task_options=given))


def test_take_returns_values_and_defaults():
    given = options(a="x", b="two", c=True, d=0.5, e=["f"], g={"length": 2, "cache": 1}, columns={"prompt": "text"})
    kinds = {"a": TEXT, "b": one_of(["one", "two"]), "c": FLAG, "d": NUMBER, "e": TEXTS, "g": OVERLONG}
    found = [given.take(name, kind) for name, kind in kinds.items()]
    assert found == ["x", "two", True, 0.5, ["f"], {"length": 2, "cache": 1}]
    defaults = {"prompt": Column(("question",)), "answer": Column(("answer",))}
    assert given.columns(defaults) == {"prompt": Column(("text",)), "answer": Column(("answer",))}
    given.finish()
    given = options()
    assert [given.take(name, kind, 3) for name, kind in kinds.items()] == [3] * 6
    assert given.take("h", TEXT) is None
    assert given.columns(defaults) == defaults
    given.finish()


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (TEXT, 3, "a must be a text, got 3"),
        (one_of(["b", "c"]), "d", "a must be one of b, c, got 'd'"),
        (one_of(["b", "c"]), ["b"], r"a must be one of b, c, got \['b'\]"),
        (FLAG, "yes", "a must be true or false, got 'yes'"),
        (FLAG, 1, "a must be true or false, got 1"),
        (FLAG, None, "a must be true or false, got None"),
        (NUMBER, 0, "a must be a number above 0, got 0"),
        (NUMBER, True, "a must be a number above 0, got True"),
        (NUMBER, float("nan"), "a must be a number above 0, got nan"),
        (whole_number(), 0, "a must be a whole number of at least 1, got 0"),
        (whole_number(), 1.0, "a must be a whole number of at least 1, got 1.0"),
        (whole_number(0), True, "a must be a whole number of at least 0, got True"),
        (TEXTS, "b", "a must be a list of texts, got 'b'"),
        (TEXTS, ["b", 3], r"a must be a list of texts, got \['b', 3\]"),
        (PAIRS, [["b", "c"], ["d"]], "a must be a list of pairs of texts, such as .*"),
        (PAIRS, [["b", 3]], "a must be a list of pairs of texts, such as .*"),
        (OVERLONG, {"length": 1}, "a must be a mapping with length and cache, .*, got {'length': 1}"),
        (OVERLONG, {"length": 2, "cache": -1}, "a must be a mapping with length and cache, two numbers above 0.*"),
        (OVERLONG, {"length": 2, "cache": 2}, "a must be a mapping .* of which cache is the smaller one, got .*"),
    ],
)
def test_take_names_the_option_that_is_wrong(kind, value, message):
    with pytest.raises(TaskError, match=f"^task option {message}$"):
        options(a=value).take("a", kind, "default")


def test_options_name_unknown_columns_and_options():
    with pytest.raises(TaskError, match="columns must be a mapping of names"):
        options(columns=["a"]).columns({})
    with pytest.raises(TaskError, match="task 'mine' reads no column 'reply'; it reads prompt"):
        options(columns={"reply": "a"}).columns({"prompt": Column(("question",))})
    given = options(levle=3)
    given.take("level", TEXT)
    given.take("strict", FLAG, False)
    with pytest.raises(TaskError, match="task 'mine' has no option 'levle'; it has level, strict"):
        given.finish()
    with pytest.raises(TaskError, match="it takes none"):
        options(level=3).finish()
