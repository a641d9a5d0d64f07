import pytest

from troll_lab.tasks import TaskConfig, TaskError
from troll_lab.tasks.dataset_task import DatasetOptions, Overlong
from troll_lab.tasks.rows import Column
from troll_lab.tasks.splits import Source

COLUMNS = {"prompt": Column(("question",)), "answer": Column(("answer",))}


def options(defaults=None, **given):
    return TaskConfig("mine", task_options=given).read_options(DatasetOptions, **defaults or {})


def test_options_have_defaults_that_a_task_and_its_user_change():
    assert options() == DatasetOptions()
    defaults = {"skip_unanswered": True}
    assert options(defaults) == DatasetOptions(skip_unanswered=True)
    assert options(defaults, skip_unanswered=False, system_prompt=None, overlong=None) == DatasetOptions()
    assert options(overlong={"length": 1e3, "cache": 10}).overlong == Overlong(1000, 10)


def test_columns_option_renames_what_a_task_reads():
    assert options().columns_of(Source("mine", COLUMNS)) == COLUMNS
    renamed = options(columns={"prompt": "text"}).columns_of(Source("mine", COLUMNS))
    assert renamed == {**COLUMNS, "prompt": Column(("text",))}
    with pytest.raises(TaskError, match="columns: no column 'reply' is read, only prompt, answer"):
        options(columns={"reply": "a"}).columns_of(Source("mine", COLUMNS))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"system_promt": "x"},
            r"task_options: task 'mine' has no setting 'system_promt', did you mean system_prompt\?",
        ),
        ({"level": 3}, "task 'mine' has no setting 'level'; it has columns, prompt, system_prompt, examples, skip_"),
        ({"system_prompt": 3}, "task_options: system_prompt of task 'mine' must be a text, got 3"),
        ({"skip_unanswered": None}, "skip_unanswered of task 'mine' must be true or false, got None"),
        ({"prompt": "Solve."}, r"prompt must have the placeholder \{question\}, got 'Solve.'"),
        ({"overlong": 3}, "task_options.overlong must be a JSON object, got 3"),
        ({"overlong": {"length": 1}}, "overlong must have a length and a smaller cache, got {'length': 1, 'cache': 0}"),
        ({"overlong": {"length": 2, "cache": 2}}, "overlong must have a length and a smaller cache, got"),
        ({"overlong": {"length": 2, "cache": -1}}, "overlong: cache of task 'mine' must be an integer, at least 1"),
        ({"overlong": {"length": float("inf"), "cache": 2}}, "length of task 'mine' must be an integer, .* got inf"),
    ],
)
def test_options_that_are_unknown_or_unusable_are_named(given, message):
    with pytest.raises(TaskError, match=message):
        options(**given)
