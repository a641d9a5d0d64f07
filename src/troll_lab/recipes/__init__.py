"""Recipes: YAML files with every setting of a run, found by name or by path.

A recipe has fields of `troll_lab.tasks.TaskConfig`, `troll_lab.trl.LabConfig` and `trl.ModelConfig`; other fields have
their defaults. It may have three more keys: `extends: RECIPE` (a name, or a path relative to the file) adds the fields
of another recipe that the file does not set; `grid: {field: [values]}` makes it an ablation for `troll compare`; and
`plugins: [FILE.py, module]` (files relative to the recipe) are imported before settings are read, and register
surrogates of the user, for example. To add a recipe, add a file to this folder.

A recipe or a command that sets `learning_rate` and no `kl_target` has this rate, also where the recipe below it follows
a target. (A grid over `kl_target` stays.)

A setting in a field with a dictionary is `field.name` on the command line and in a grid, such as
`--surrogate_kwargs.weight 0.3`; the other settings of the dictionary do not change.

Values are read as YAML 1.2 reads them, in recipes and on the command line: `1e-5`, `.5` and `+1e-3` are numbers, `no`
is a text, and a field's dictionary may be written `{top_p: .9}` or as JSON. On the command line, a list or a dictionary
inside another one is JSON. A key that occurs twice is an error.

`use_vllm: true` in a recipe applies where vLLM is installed and there is a GPU. Elsewhere transformers generates,
`generation_chunk_size` completions at a time; the command says so, and the run's settings have `use_vllm: false`. With
`--use_vllm true` on the command line vLLM generates on a CPU too, and it is an error if it is not installed.
"""

from troll_lab.recipes.fields import FIELDS, LISTS, PLUGINS, RecipeError, as_argument, differences
from troll_lab.recipes.layers import CONFIG_FILE, FOLDER, find, left_by, load_plugins, name_of, names, read
from troll_lab.recipes.recipe import Recipe, load, plain, save

__all__ = [
    "CONFIG_FILE",
    "FIELDS",
    "FOLDER",
    "LISTS",
    "PLUGINS",
    "Recipe",
    "RecipeError",
    "as_argument",
    "differences",
    "find",
    "left_by",
    "load",
    "load_plugins",
    "name_of",
    "names",
    "plain",
    "read",
    "save",
]
