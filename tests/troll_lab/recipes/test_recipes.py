import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from experiments import RECIPES
from troll.files import json_text
from troll_lab import recipes
from troll_lab.recipes import Recipe, RecipeError
from troll_lab.recipes.fields import TEXTS
from troll_lab.runs.grid import expand


@pytest.fixture
def mine(tmp_path: Path) -> Callable[..., str]:
    """Writes a recipe of one's own, and returns its path: `mine("extends: quickstart")`."""

    def write(text: str, name: str = "mine") -> str:
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        return str(path)

    return write


def loaded_again(recipe: Recipe, path: Path) -> Recipe:
    """The recipe that a saved one is, which has the same settings."""
    recipes.save(recipe, path)
    again = recipes.load(str(path))
    assert again.settings == recipe.settings
    assert again.training.to_dict() == recipe.training.to_dict()
    assert (again.model, again.task) == (recipe.model, recipe.task)
    return again


ON_CPU = ["--use_cpu", "--bf16", "false"]


def on_cpu(name: str) -> list[str]:
    # bf16 is refused on a machine without a device that has it.
    return ON_CPU if recipes.read(name)[0].get("bf16") else []


def one_point(name: str) -> list[str]:
    _, grid = recipes.read(name)
    return [part for field, values in grid.items() for part in (f"--{field}", recipes.as_argument(values[0]))]


@pytest.mark.parametrize(
    ("rollout", "save_steps", "logging_steps"),
    [
        (["--updates_per_rollout", "6"], 228, 12),
        (["--updates_per_rollout", "1", "--learning_rate", "6e-5"], 224, 8),
        (["--steps_per_generation", "4", "--gradient_accumulation_steps", "3", "--learning_rate", "1"], 224, 8),
        (["--updates_per_rollout", "6", "--save_steps", "224"], 224, 12),
        (["--updates_per_rollout", "6", "--save_steps", "0.1"], 0.1, 12),
    ],
)
def test_a_longer_rollout_moves_only_what_nobody_set(tmp_path, rollout, save_steps, logging_steps):
    recipe = recipes.load("quickstart", rollout)
    assert (recipe.training.save_steps, recipe.training.logging_steps) == (save_steps, logging_steps)
    assert recipe.note is None
    assert recipes.plain(loaded_again(recipe, tmp_path / "config.yaml")) == recipes.plain(recipe)


def test_checkpoints_that_may_be_the_best_stay_at_evaluations() -> None:
    best = ["--load_best_model_at_end", "true", "--metric_for_best_model", "pass@1", "--updates_per_rollout", "5"]
    training = recipes.load("quickstart", best).training
    assert (training.eval_steps, training.save_steps) == (224, 224)


def test_defaults_end_with_a_rollout_and_a_users_values_stay(mine) -> None:
    bare = recipes.load(mine("{model_name_or_path: toy, use_cpu: true, bf16: false, updates_per_rollout: 8}"))
    assert (bare.training.save_steps, bare.training.logging_steps) == (504, 16)
    recipe = recipes.load(mine("{extends: quickstart, save_steps: 100, logging_steps: 12}"))
    assert (recipe.training.save_steps, recipe.training.logging_steps) == (100, 12)
    assert recipe.note is None, "a rollout is sampled between any two of these logs"
    inherited = recipes.load(mine("{extends: quickstart, updates_per_rollout: 5, save_steps: 100}")).training
    assert (inherited.save_steps, inherited.logging_steps) == (100, 10)


def test_a_null_of_the_command_only_is_kept(mine, tmp_path) -> None:
    bare = mine("{model_name_or_path: toy, use_cpu: true, bf16: false}")
    assert loaded_again(recipes.load(bare, ["--eval_size", "none"]), tmp_path / "again.yaml").task.eval_size is None


def test_logs_without_a_reward_are_explained() -> None:
    note = recipes.load("quickstart", ["--logging_steps", "7"]).note
    assert note is not None and note.startswith("logging_steps 7: TRL logs the reward of a rollout once")
    assert note.endswith("with logging_steps 8, each log has one")
    assert recipes.load("quickstart", ["--logging_steps", "7", "--logging_strategy", "epoch"]).note is None


def test_a_recipe_for_a_gpu_says_so_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(RecipeError, match=r"^math-qwen3 is for a GPU .* none here; .* --use_cpu --bf16 false"):
        recipes.load("math-qwen3")
    recipes.load("math-qwen3", ON_CPU)


def test_a_slow_recipe_for_a_gpu_says_so_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    note = recipes.load("smollm2-gsm8k").note
    assert note is not None and note.startswith("smollm2-gsm8k is for a GPU, and torch finds none here")
    assert recipes.load("smollm2-gsm8k", ["--use_cpu"]).note is None
    assert recipes.load("smollm2-sums").note is None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert recipes.load("smollm2-gsm8k").note is None


@pytest.mark.parametrize(
    "name", [*recipes.names(), *sorted(map(str, RECIPES.glob("*.yaml")))], ids=lambda name: Path(name).stem
)
def test_shipped_recipes_are_off_policy_and_survive_saving(tmp_path: Path, name: str) -> None:
    point = [*on_cpu(name), *one_point(name)]
    more = [] if "--kl_bound" in point else ["--kl_bound", "0.2"]
    recipe = recipes.load(name, [*point, *more, "--max_steps=7"])
    training, written = recipe.training, recipes.read(name)[0]
    assert (training.kl_bound, training.max_steps) == (0.2 if more else 0.01, 7)
    assert more or name == "ablation-kl-bound"
    updates = 32 if name.endswith("sparse-signal-32-updates.yaml") else 8
    assert training.updates_per_rollout == updates and not training.always_on_policy
    assert (training.save_steps, training.logging_steps) == (written["save_steps"], written["logging_steps"])
    assert (training.save_steps % updates, training.logging_steps % updates) == (0, 0), "with a rollout"
    folder = tmp_path / "my-run"
    folder.mkdir()
    assert loaded_again(recipe, folder / "config.yaml").name == "my-run"


def test_a_saved_recipe_holds_the_loss_that_its_surrogate_set(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="loss_type='dr_grpo' is now"):
        recipe = recipes.load("dr-grpo", ["--surrogate", "gmpo"])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="loss_type")
        loaded_again(recipe, tmp_path / "again.yaml")


@pytest.mark.parametrize(
    ("overrides", "recorded"),
    [
        ([], {"updates_per_rollout": 8}),
        (["--updates_per_rollout", "4"], {"updates_per_rollout": 4}),
        (["--steps_per_generation", "4"], {"steps_per_generation": 4}),
        (["--generation_batch_size=256"], {"generation_batch_size": 256}),
        (["--num_iterations", "2"], {"updates_per_rollout": 8, "num_iterations": 2}),
    ],
)
def test_the_length_of_a_rollout_is_what_was_said_last(tmp_path, overrides, recorded):
    recipe = recipes.load("quickstart", overrides)
    words = ("updates_per_rollout", "steps_per_generation", "generation_batch_size", "num_iterations")
    assert {name: recipe.settings[name] for name in words if name in recipe.settings} == recorded
    expected = recorded.get("updates_per_rollout", 4)
    assert recipe.training.updates_per_rollout == expected
    recipes.save(recipe, tmp_path / "again.yaml")
    later = recipes.load(str(tmp_path / "again.yaml"), ["--gradient_accumulation_steps", "1"])
    assert later.training.updates_per_rollout == expected
    (tmp_path / "top.yaml").write_text("extends: again.yaml\nsteps_per_generation: 3\nnum_iterations: 1\n")
    assert recipes.load(str(tmp_path / "top.yaml")).training.updates_per_rollout == 3


@pytest.mark.parametrize("usable", [False, True])
def test_vllm_generates_where_it_can_run(monkeypatch, usable):
    name, cpu = "gsm8k-qwen3-24gb", ON_CPU
    monkeypatch.setattr(recipes.recipe, "vllm_is_usable", lambda: usable)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: usable)
    on_gpu = recipes.load(name, ["--bf16", "false"])
    assert on_gpu.training.use_vllm is on_gpu.settings["use_vllm"] is usable
    assert (on_gpu.note is None) is usable
    without = recipes.load(name, cpu)
    assert without.training.use_vllm is without.settings["use_vllm"] is False
    assert without.note is not None and "at most 32 completions at a time" in without.note
    assert "\n" not in without.note
    for installed in (False, True):  # for CPUs
        monkeypatch.setattr(recipes.recipe, "find_spec", lambda _, found=installed: found or None)
        for flag in (["--use_vllm", "true"], ["--use_vllm=true"], ["--use-vllm", "true"], ["--use_vllm"]):
            if installed:
                assert recipes.load(name, [*cpu, *flag]).training.use_vllm
            elif not usable:
                with pytest.raises(RecipeError, match=r"^--use_vllm: vLLM is not installed here: install it, or leave"):
                    recipes.load(name, [*cpu, *flag])
        assert not recipes.load(name, [*cpu, "--use_vllm", "false"]).training.use_vllm
    elsewhere = recipes.load(name, cpu, vllm=True)  # planned here for another machine
    assert (elsewhere.settings["use_vllm"], elsewhere.note) == (True, None)
    assert recipes.load("quickstart").note is None


def test_differences_know_what_a_left_out_field_means() -> None:
    settings = recipes.plain(recipes.load("quickstart", ["--kl_bound", "0.1", "--use_cpu"]))
    recorded = recipes.plain(recipes.load("quickstart"))
    said = ["kl_bound is 0.05 there and 0.1 here", "use_cpu is false there and true here"]
    assert recipes.differences(recorded, settings) == said
    assert recipes.differences(recorded, settings, lambda name: name == "kl_bound") == said[1:]
    of_an_older_version = {name: value for name, value in recorded.items() if name != "diagnostics_steps"}
    assert recipes.differences(of_an_older_version, recorded) == []


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("quikstart", [], "did you mean quickstart"),
        ("nowhere.yaml", [], "recipes: ablation-kl-bound, .*quickstart"),
        ("ablation-kl-bound", [], "a grid over kl_bound: run it with troll compare .*, or give each one value"),
        ("quickstart", ["--learing_rate", "1"], "did you mean --learning_rate"),
        ("quickstart", ["--kl_bound", "-1"], "kl_bound must be above 0"),
        ("quickstart", ["--loss_type", "cispo"], "set surrogate='cispo' and leave loss_type out"),
        ("quickstart", ["--task_options", "{"], "task_options is not valid JSON"),
        ("quickstart", ["stray"], "unknown argument 'stray'"),
        # Inside a dictionary.
        ("quickstart", ["--surrogate_kwargs.weight", "0.3"], "surrogate 'troll' has no setting 'weight', and none of"),
        ("quickstart", ["--surrogate=kl_penalty", "--surrogate_kwargs.weight"], "kwargs.weight needs a value"),
        ("quickstart", ["--surogate_kwargs.weight", "1"], "'--surogate_kwargs.weight', did you mean --surrogate_k"),
        ("quickstart", ["--learning_rate.weight", "1"], "unknown argument '--learning_rate.weight'"),
        (
            "quickstart",
            ["--surrogate=kl_penalty", '--surrogate_kwargs={"weight": 2}', "--surrogate_kwargs.weight=1"],
            "--surrogate_kwargs and --surrogate_kwargs.weight set the same dictionary",
        ),
    ],
)
def test_mistakes_are_named_in_one_line(name: str, overrides: list[str], message: str) -> None:
    with pytest.raises((RecipeError, ValueError), match=message) as error:
        recipes.load(name, overrides)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kl_bond: 1", "unknown field 'kl_bond', did you mean kl_bound"),
        ("a: [", "not YAML"),
        ("- a", "expected 'field: value' lines"),
        ("extends: quikstart", "extends: no recipe .* did you mean quickstart"),
        ("extends: mine.yaml", "extends itself"),
        ("grid: {kl_bound: 0.1}", r"grid must hold 'field: \[value, value, ...\]' lines"),
        ("grid: {kl_bond: [0.1]}", "unknown field 'kl_bond', did you mean kl_bound"),
        ("grid: {reward_weights: [[1.0, 0.5], [1.0, 1.0]]}", "grid cannot hold lists, and reward_weights has one"),
        ("kl_bound: 0.1\ngrid: {kl_bound: [0.1, 0.2]}", "kl_bound has a value and a grid"),
        (
            "surrogate_kwargs: {weight: 0.3}\ngrid: {surrogate: [kl_penalty, clip]}",
            "write surrogate_kwargs.NAME: .value. into grid",
        ),
        ("kl_bound: 0.1\nkl_bound: 0.2", "found duplicate key in line 2, column 1: kl_bound: 0.2"),
        ("kl_bound: [0.1, 0.2]", r"kl_bound takes one value, got a list: .* write grid: \{kl_bound: \[0\.1, 0\.2\]\}"),
    ],
)
def test_broken_files_are_named(mine, text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as error:
        recipes.load(mine(text))
    assert "mine.yaml" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("max_steps: 1.5", "max_steps must be a whole number, got 1.5"),
        ("max_steps: 1_000", "argument --max_steps.*: must be a whole number, got '1_000'"),
        ("learning_rate: true", "learning_rate must be a number, got True"),
        ("learning_rate: 1:30", "argument --learning_rate.*: must be a number, got '1:30'"),
        ("reward_weights: [yes]", r"reward_weights must be a number, got 'yes'"),
        ("reward_weights: .5", r"reward_weights takes a list, got 0\.5: write \[0\.5\]"),
        ("run_name: 1e5", "run_name takes a text, and YAML reads 100000.0 as a number: put it in quotes"),
        ("dataset_path: true", "dataset_path takes a text, and YAML reads True as true or false: put it in quotes"),
        ("task: {name: gsm8k}", "task takes a text, got {'name': 'gsm8k'}"),
        ("disable_dropout: 2", "disable_dropout must be true or false, got 2"),
        ("gradient_checkpointing: on", "argument --gradient_checkpointing.*: Truthy value expected: got on"),
        ("learning_rate: null", "learning_rate must be finite and at least 0, got None"),
        ("seed: null", r"seed must be an integer in \[0, 2\^32\), got None"),
        ("ddp_timeout: 1e30", "too large"),
        ("surrogate_kwargs: '{weight: 1, weight: 2}'", "is not valid JSON or YAML .found duplicate key"),
        ("updates_per_rollout: 8\nsteps_per_generation: 4", "disagrees with steps_per_generation=4"),
    ],
)
def test_values_that_do_not_fit_their_field_are_named(mine, line: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as error:
        recipes.load(mine(f"extends: quickstart\n{line}\n"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "line",
    [
        *("temperature: 0", "max_grad_norm: -1", "max_grad_norm: .nan", "adam_beta1: 1", "max_completion_length: 0"),
        *("gradient_accumulation_steps: -1", "per_device_train_batch_size: 0", "num_iterations: -2"),
        *("gradient_accumulation_steps: 0", "num_generations: 0", "num_iterations: 0", "num_generations_eval: 0"),
        *("per_device_eval_batch_size: 0", "ref_model_sync_steps: 0", "num_train_epochs: 0", "num_train_epochs: .nan"),
        *("max_steps: 0", "max_steps: -2", "seed: -1", "seed: 1e30", "data_seed: 4294967296", "warmup_steps: .inf"),
        *("weight_decay: -1", "weight_decay: .inf", "adam_epsilon: .inf", "adam_epsilon: -1e-8", "beta: 1e400"),
        *("reward_weights: [.nan]", "reward_weights: [.inf]", "entropy_coef: .nan", "neftune_noise_alpha: .nan"),
        *("logging_steps: .nan", "logging_steps: .inf", "eval_steps: -1", "save_steps: .inf", "save_steps: -.5"),
        *("vllm_importance_sampling_clip_max: -1", "vllm_importance_sampling_clip_min: .nan"),
        *("off_policy_mask_threshold: .nan", "off_policy_mask_threshold: -1"),
        *("temperature: -1e-3", "learning_rate: -.5", "learning_rate: .nan", "beta: -.inf", "top_entropy_quantile: -1"),
    ],
)
def test_numbers_out_of_their_range_are_refused(mine, line: str) -> None:
    with pytest.raises(RecipeError, match=line.partition(":")[0]):
        recipes.load(mine(f"extends: quickstart\n{line}\n"))


@pytest.mark.parametrize("value", ["-1e-3", "-.5", "-.inf", "1e400"])
def test_words_out_of_their_range_are_refused(value: str) -> None:
    """Some of which look like flags."""
    with pytest.raises(RecipeError, match=r"^learning_rate must be "):
        recipes.load("quickstart", ["--learning_rate", value])


def test_a_setting_inside_a_dictionary_keeps_the_others() -> None:
    recipe = recipes.load("ppo", ["--task_options.min_terms", "2", "--critic_kwargs.gamma=0.9"])
    options = recipe.task.task_options
    assert isinstance(options, dict) and (options["min_terms"], options["max_terms"]) == (2, 3)
    assert recipe.settings["critic_kwargs"] == {"learning_rate": 3e-4, "gamma": 0.9}
    weighted = recipes.load("quickstart", ["--surrogate", "kl_penalty", "--surrogate_kwargs.direction", "new_old"])
    assert weighted.training.own_settings.direction == "new_old"
    assert recipes.load("quickstart", ["--task_options", '{"max_terms": 4}']).task.options == {"max_terms": 4}


def test_another_surrogate_drops_the_settings_of_the_one_below(mine) -> None:
    penalty = mine(
        "extends: quickstart\nsurrogate: bounded_kl_penalty\nsurrogate_kwargs: {weight: 0.3, cap: 5}\n", "penalty"
    )
    clip = mine("extends: penalty.yaml\nsurrogate: clip\n", "clip")
    grid = mine("extends: quickstart\ngrid: {surrogate: [troll, kl_penalty], surrogate_kwargs.weight: [.1, 3e-1]}\n")
    weighted = recipes.load(penalty, ["--surrogate_kwargs.weight", "1"])
    assert weighted.training.surrogate_kwargs == {"weight": 1, "cap": 5}
    assert recipes.load(penalty, ["--surrogate", "clip"]).training.surrogate_kwargs is None
    assert recipes.load(clip).training.surrogate_kwargs is None
    runs = expand([grid], {"seed": ["0"]})
    assert [run.recipe.training.surrogate_kwargs for run in runs] == [None, {"weight": 0.1}, {"weight": 0.3}]
    with pytest.raises(recipes.RecipeError, match=r"is a grid over surrogate_kwargs\.weight"):
        recipes.load(grid, ["--surrogate=kl_penalty"])


def test_another_task_drops_the_options_of_the_one_below(mine) -> None:
    task, prompt = ["--task", "reasoning_gym:spell_backward"], ["--task_options.prompt", "{word} ="]
    assert recipes.load("quickstart", task).task.options == {}
    assert recipes.load("quickstart", [*task, *prompt]).task.options == {"prompt": "{word} ="}
    same = recipes.load("quickstart", ["--task", "reasoning_gym:chain_sum", "--task_options.min_terms", "2"])
    assert same.task.options["max_terms"] == 3
    assert recipes.load(mine("extends: quickstart\ntask: reasoning_gym:spell_backward\n")).task.options == {}


def test_resume_without_a_value_means_the_last_checkpoint() -> None:
    flag = "--resume_from_checkpoint"
    for overrides in ([flag], ["--resume-from-checkpoint"], [flag, "--max_steps", "3"]):
        assert recipes.load("quickstart", overrides).training.resume_from_checkpoint == "last"
    given = recipes.load("quickstart", ["--resume_from_checkpoint", "runs/x/checkpoint-8"])
    assert given.training.resume_from_checkpoint == "runs/x/checkpoint-8"


@pytest.mark.parametrize(
    ("overrides", "name", "recorded"),
    [
        (["--no_shuffle_dataset"], "shuffle_dataset", False),
        (["--generation_kwargs.top_p", "0.9"], "top_p", 0.9),
        (["--debug", "underflow_overflow"], "debug", ["underflow_overflow"]),
        (["--accelerator_config", '{"even_batches": false}'], "accelerator_config", {"even_batches": False}),
    ],
)
def test_a_saved_recipe_holds_what_the_parser_makes(tmp_path, overrides, name, recorded):
    recipe = recipes.load("quickstart", overrides)
    again = loaded_again(recipe, tmp_path / "again.yaml").training
    saved = yaml.safe_load((tmp_path / "again.yaml").read_text())[name]
    assert saved == (saved | recorded if isinstance(recorded, dict) else recorded)
    assert getattr(again, name) == getattr(recipe.training, name)


NUMBERS = """
extends: quickstart
learning_rate: 1e-5
kl_bound: .5
max_steps: 1e2
eval_size: 1e1
reward_weights: [1e-1, +5e-1, 1]
generation_kwargs: {top_p: 9e-1}
surrogate: bounded_kl_penalty
surrogate_kwargs: {weight: 1e-3, cap: .5e+1}
eval_strategy: no
"""


def test_numbers_are_those_of_yaml_1_2_wherever_they_are(mine, tmp_path: Path) -> None:
    path = mine(NUMBERS)
    by_line = ["--learning_rate", "+1e-5", "--kl_bound=.5", "--max_steps", "1e2", "--reward_weights", "1e-1", ".5", "1"]
    by_line += ["--generation_kwargs", "{top_p: 9e-1}", "--surrogate", "bounded_kl_penalty", "--eval_strategy", "no"]
    by_line += ["--surrogate_kwargs.weight", "+1e-3", "--surrogate_kwargs.cap", ".5e+1", "--eval_size", "1e1"]
    for name, line in ((path, []), ("quickstart", by_line)):
        training = recipes.load(name, line).training
        assert (training.learning_rate, training.kl_bound, training.max_steps) == (1e-5, 0.5, 100)
        assert type(training.max_steps) is int
        assert recipes.load(name, line).task.eval_size == 10
        assert training.reward_weights == [0.1, 0.5, 1.0]
        assert training.top_p == 0.9  # which generation_kwargs has set
        assert (training.own_settings.weight, training.own_settings.cap) == (1e-3, 5.0)
        assert training.eval_strategy == "no"
    loaded_again(recipes.load(path), tmp_path / "again.yaml")
    recipe = recipes.load("quickstart", ["--eval_size", "null", "--delta", "None"])
    assert (recipe.task.eval_size, recipe.training.delta) == (None, None)


@pytest.mark.parametrize("text", ["'{\"weight\": 1e-3}'", "'{weight: 1e-3}'", '{"weight": 1e-3}'])
def test_a_dictionary_may_be_written_in_one_word(mine, text: str) -> None:
    word = mine(f"extends: quickstart\nsurrogate: kl_penalty\nsurrogate_kwargs: {text}\n")
    by_line = ["--surrogate", "kl_penalty", "--surrogate_kwargs", text.strip("'")]
    more = ["--surrogate_kwargs.direction", "new_old"]
    for name, line, direction in ((word, [], "old_new"), ("quickstart", by_line, "old_new"), (word, more, "new_old")):
        own = recipes.load(name, line).training.own_settings
        assert (own.weight, own.direction) == (1e-3, direction)


def test_an_infinite_bound_is_the_same_in_every_spelling(mine) -> None:
    free = recipes.load(mine("extends: quickstart\nkl_bound: .inf\n"))
    for word in ("inf", ".inf", "Infinity"):
        assert recipes.load("quickstart", ["--kl_bound", word]).settings["kl_bound"] == free.settings["kl_bound"]
    for recorded in (recipes.plain(free), json.loads(json_text(recipes.plain(free)))):
        assert recipes.differences(recorded, recipes.plain(free)) == []
    (run,) = expand(["quickstart"], {"kl_bound": [recipes.as_argument(free.settings["kl_bound"])]})
    assert run.recipe.training.kl_bound == float("inf")


def test_a_recipe_extends_another_by_name_or_by_path(mine) -> None:
    mine("extends: quickstart\nkl_bound: 0.1\nmax_steps: 16\n", "base")
    base, top = recipes.load("quickstart"), recipes.load(mine("extends: base.yaml\nmax_steps: 24\n"))
    assert (top.training.kl_bound, top.training.max_steps) == (0.1, 24)
    assert top.settings == base.settings | {"kl_bound": 0.1, "max_steps": 24}


def test_a_learning_rate_is_one_and_not_the_start_of_a_search_unless_its_layer_says_so(mine) -> None:
    rate = ["--learning_rate", "1e-4"]
    assert recipes.load("quickstart", ["--beta", "0"]).training.kl_target is not None
    for constant in (
        recipes.load("quickstart", rate),
        recipes.load(mine("extends: quickstart\nlearning_rate: 1e-4\n", "own")),
        recipes.load(mine("extends: own.yaml\nmax_steps: 16\n")),
        expand(["quickstart"], {"learning_rate": ["1e-4"]})[0].recipe,
        expand([mine("extends: quickstart\ngrid: {learning_rate: [1e-4, 3e-4]}\n")], {})[0].recipe,
    ):
        assert (constant.training.kl_target, constant.training.learning_rate) == (None, 1e-4)
        assert "kl_target" not in recipes.plain(constant)
    target = ["--kl_target", "0.01"]
    for start in (
        recipes.load("quickstart", [*rate, *target]),
        recipes.load(mine("extends: quickstart\nlearning_rate: 1e-4\nkl_target: 0.01\n")),
        recipes.load(mine("extends: quickstart\nlearning_rate: 1e-4\n", "own"), target),
    ):
        assert (start.training.kl_target, start.training.learning_rate) == (0.01, 1e-4)


def test_a_target_that_is_taken_away_leaves_no_start_of_a_search(mine) -> None:
    message = "kl_target: null would leave the rate of 0.01 .* set a learning_rate"
    target, rate = ["--kl_target", "null"], ["--learning_rate", "1e-4"]
    for recipe, words in (("quickstart", target), (mine("extends: quickstart\nkl_target: null\n"), [])):
        with pytest.raises(RecipeError, match=message):
            recipes.load(recipe, words)
        if words:
            with pytest.raises(RecipeError, match=message):
                expand([recipe], {"kl_target": ["0.1", "null"]})
    own = mine("extends: quickstart\nkl_target: null\nlearning_rate: 1e-4\n")
    for recipe, words in (("quickstart", target + rate), (own, []), (own, target), ("grpo", target + rate)):
        assert recipes.load(recipe, words).training.learning_rate == 1e-4
        assert recipes.load(recipe, words).training.kl_target is None


def test_a_field_takes_the_place_of_the_grid_it_extends(mine) -> None:
    assert recipes.load(mine("extends: ablation-kl-bound\nkl_bound: 0.1\n")).training.kl_bound == 0.1
    two = mine("extends: ablation-kl-bound\ngrid: {support_top_k: [8, 16]}\n")
    assert recipes.read(two)[1] == {"kl_bound": [0.01, 0.05, 0.25], "support_top_k": [8, 16]}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", {"loss_type": "grpo", "scale_rewards": "group", "advantage_estimator": "group"}),
        ("dr-grpo", {"loss_type": "dr_grpo", "scale_rewards": "none", "advantage_estimator": "group"}),
        ("gspo", {"importance_sampling_level": "sequence", "loss_type": "grpo"}),
        ("reinforce-plus-plus", {"advantage_estimator": "reinforce_plus_plus"}),
        ("reinforce-plus-plus-baseline", {"advantage_estimator": "reinforce_plus_plus_baseline"}),
        ("rloo", {"advantage_estimator": "rloo"}),
        ("ppo", {"advantage_estimator": "gae"}),
    ],
)
def test_recipes_of_methods_are_variants_of_the_quickstart(name: str, expected: dict[str, str]) -> None:
    recipe, quickstart = recipes.load(name), recipes.load("quickstart")
    assert {field: getattr(recipe.training, field) for field in expected} == expected
    assert (recipe.task, recipe.training.max_steps) == (quickstart.task, quickstart.training.max_steps)
    assert recipe.training.output_dir == f"runs/{name}"


def test_fields_that_take_lists_are_found_by_their_types(mine) -> None:
    assert {"reward_weights", "eval_tasks", "lora_target_modules", "report_to", "optim_target_modules"} <= recipes.LISTS
    assert not recipes.LISTS & {"kl_bound", "surrogate_kwargs", "generation_kwargs", "surrogate", "task", *TEXTS}
    losses = recipes.load(mine("extends: quickstart\ninclude_for_metrics: [loss]\n")).training.include_for_metrics
    assert losses == ["loss"]
