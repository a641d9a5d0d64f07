"""What is released holds everything, and works away from the checkout, with each extra in an empty environment.

`make test-release` runs it: it takes a quarter of an hour and a package index. Every environment is made anew, with a
torch of its own.
"""

import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import checkout
from tests.checkout import ROOT

pytestmark = pytest.mark.slow

EVERYTHING = "trl,tasks,report"


@dataclass(frozen=True)
class Installed:
    """The wheel in an environment of its own, and an empty folder outside of the checkout, where everything runs."""

    environment: Path
    folder: Path

    def run(self, program: str, *arguments: str, code: int = 0, **variables: str) -> str:
        """Runs a program of the environment and returns all that it says.

        Nothing of this process's environment reaches it, and its home is empty.
        """
        known = {"PATH": f"{self.environment / 'bin'}:/usr/bin:/bin", "HOME": str(self.folder / "home")}
        known |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | variables
        command = [str(self.environment / "bin" / program), *arguments]
        return run(command, self.folder, code=code, environment=known)

    def python(self, program: str, code: int = 0, **variables: str) -> str:
        """Runs a program in Python."""
        return self.run("python", "-c", program, code=code, **variables)


def run(command: list[str], folder: Path, *, code: int = 0, environment: dict[str, str] | None = None) -> str:
    """Runs a command to its end, which has to have this exit code, and returns all that it says."""
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1200
    )
    assert done.returncode == code, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, which is built from the source distribution, and the latter: as `make dist` makes them."""
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--outdir", str(folder)], ROOT)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_wheel_holds_the_packages_and_is_that_of_the_checkout(release: tuple[Path, Path], tmp_path: Path) -> None:
    files = {name for name in contents(release[0]) if ".dist-info/" not in name}
    assert files == {name.removeprefix("src/") for name in checkout.files("src")}
    assert any(name.endswith("/licenses/LICENSE") for name in contents(release[0]))
    run([sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path)], ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == release[0].name
    assert contents(wheel) == contents(release[0])


def test_source_distribution_holds_the_checkout(release: tuple[Path, Path]) -> None:
    with tarfile.open(release[1]) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    assert found - {"PKG-INFO"} <= checkout.files()
    for kind in ("examples/own_loop.py", "tests/conftest.py", "docs/method.md", "LICENSE", "Makefile"):
        assert kind in found, kind


def the_core(installed: Installed) -> None:
    """Needs torch, and nothing else. The other two packages are there, and `troll` imports neither."""
    program = """
import sys, torch, troll
assert not {"troll_lab", "troll_sandbox"} & sys.modules.keys()
import troll_lab, troll_sandbox
for package in (troll, troll_lab, troll_sandbox):
    assert package.__file__.startswith(sys.prefix), package.__file__
new, old = (torch.tensor(p, dtype=torch.float64).log() for p in ([0.1, 0.2, 0.7], [0.6, 0.3, 0.1]))
projection = troll.project(new, old, kl_bound=0.05)
print("after", projection.kl_after.item(), "projected", projection.projected.item())
"""
    found = re.search(r"after (\S+) projected True", installed.python(program))
    assert found is not None
    assert float(found[1]) == pytest.approx(0.05, abs=1e-9)
    assert "quickstart" in installed.run("troll", "train", "--help")


def own_loops(installed: Installed) -> None:
    for name in ("own_loop.py", "distil.py"):
        (installed.folder / name).write_text((ROOT / "examples" / name).read_text())
    lines = installed.run("python", "own_loop.py").splitlines()
    assert [line.split()[1] for line in lines if line.startswith("update")] == [*"01234567"]
    installed.run("python", "distil.py")


def the_command_line(installed: Installed) -> None:
    """A model is trained, evaluated and reported on."""
    installed.run("troll", "train", "quickstart", "--max_steps", "16", "--eval_steps", "16", "--output_dir", "run")
    run_folder = installed.folder / "run"
    assert (run_folder / "model" / "model.safetensors").is_file()
    report = (run_folder / "report.html").read_text()
    assert "<svg" in report
    said = installed.run("troll", "eval", "run", "--eval_size", "64", "--output_dir", "evaluation")
    assert "chain_sum" in said
    (run_folder / "report.html").unlink()
    installed.run("troll", "report", "run")
    assert (run_folder / "report.html").read_text() == report


def a_trainer(installed: Installed) -> None:
    installed.python("from troll.trl import TrollConfig, TrollTrainer; import troll.huggingface")
    path = installed.run("python", "-m", "troll_lab.recipes.accelerate", "fsdp2").strip()
    assert Path(path).is_file()
    assert installed.environment in Path(path).parents


JUDGED = """
import json
from troll_lab.rewards import CodeGrader
programs = ["print(sum(map(int, input().split())))", "print(4)"]
tests = [json.dumps({"inputs": ["1 2"], "outputs": ["3"]})] * 2
print("judged", [verdict.score for verdict in CodeGrader().grade(programs, tests=tests)])
"""


def tasks_and_rewards(installed: Installed) -> None:
    rows = [f'{{"question": "{n} + 1?", "answer": "It is {n + 1}.\\n#### {n + 1}"}}' for n in range(4)]
    (installed.folder / "data.jsonl").write_text("\n".join(rows) + "\n")
    program = """
from troll_lab.tasks import TaskConfig, load_task
print("problems", len(load_task(TaskConfig("reasoning_gym:chain_sum", eval_size=2)).eval_dataset))
"""
    assert "problems 2" in installed.python(program)
    assert "reasoning_gym" in installed.run("troll", "tasks")
    if sys.platform == "linux":  # in the bubblewrap that the extra brings
        assert "judged [1.0, 0.0]" in installed.python(JUDGED, PATH="/nowhere")
    # It exits with 1 if the reward refuses a gold answer.
    installed.run("troll", "tasks", "check", "gsm8k", "--dataset_path", "data.jsonl", "--eval_size", "1")


def a_report(installed: Installed) -> None:
    folder = installed.folder / "run"
    folder.mkdir()
    rows = [f'{{"step": {step}, "loss": 0.{step}, "reward": 0.{step}}}' for step in range(1, 9)]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    installed.run("troll", "report", "run")
    assert "<svg" in (folder / "report.html").read_text()


def kernels(installed: Installed) -> None:
    """Triton's, which compile where there is a GPU; its interpreter also wants NumPy."""
    run([str(installed.environment / "bin" / "pip"), "install", "--quiet", "numpy"], installed.folder)
    program = """
import torch, troll
logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
policy = troll.capture(logits, torch.arange(3), top_k=8)
print("policy", policy.token_ids.tolist(), [round(x, 4) for x in policy.tail_log_prob.tolist()])
"""
    found = [
        re.findall(r"policy .*", installed.python(program, TROLL_KERNELS=kind, TRITON_INTERPRET="1"))
        for kind in ("torch", "triton")
    ]
    assert found[0]
    assert found[0] == found[1]


def verl(installed: Installed) -> None:
    """verl finds the plug-in, its settings and its policy loss by what a user writes."""
    program = """
import sys
from importlib.metadata import entry_points
print("entry point", [point.value for point in entry_points(group="verl.plugins")])
import verl
print("loaded", "troll.verl.plugin" in sys.modules)
from hydra import compose, initialize_config_module
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose(
        "ppo_trainer", overrides=["+troll=fsdp", "actor_rollout_ref.actor.policy_loss.kl_bound=0.03"]
    )
actor = config.actor_rollout_ref.actor
print("settings", actor._target_, actor.policy_loss.loss_mode, actor.policy_loss.kl_bound)
from troll.verl import TrollFSDPActorConfig, TrollPolicyLossConfig
from verl.trainer.ppo.core_algos import get_policy_loss_fn
print("loss", get_policy_loss_fn("troll").__module__)
"""
    said = installed.python(program)
    assert "entry point ['troll.verl.plugin']" in said
    assert "loaded True" in said
    assert "settings troll.verl.TrollFSDPActorConfig troll 0.03" in said
    assert "loss troll.verl.loss" in said


def movements(installed: Installed) -> None:
    """An arm learns for one iteration, and its page is written anew."""
    few = ["--iterations", "1", "--episodes", "4", "--eval_episodes", "4", "--num_envs", "4"]
    installed.run("troll", "train", "tce-reach", *few, "--output_dir", "reach")
    assert "report.html" in installed.run("troll", "report", "reach")


def importing(name: str) -> tuple[str, ...]:
    return "python", "-c", f"import {name}"


#: The extras without which something does not work, by what asks for it.
REFUSALS = {
    ("troll", "train", "quickstart", "--max_steps", "16"): EVERYTHING,
    ("troll", "eval", "model", "--task", "gsm8k"): EVERYTHING,
    ("troll", "report", "run"): "report",
    importing("troll.trl"): "trl",
    importing("troll.huggingface"): "trl",
    importing("troll_lab.tasks"): "tasks",
    ("python", "-c", "from troll.verl import TrollPolicyLossConfig"): "verl",
    ("python", "-c", "import torch, troll; troll.capture(torch.zeros(1, 9), torch.zeros(1).long())"): "triton",
}
TRAINING, EVALUATION, REPORT, TRL, MODELS, TASKS, VERL, TRITON = REFUSALS

#: By extra: what works with it, and what has to say that another one is missing.
MATRIX: dict[str, tuple[list[Callable[[Installed], None]], list[tuple[str, ...]]]] = {
    "": ([the_core], [*REFUSALS]),
    "trl": ([the_core, a_trainer, own_loops], [TRAINING, VERL]),
    "tasks": ([the_core, tasks_and_rewards], [TRAINING, EVALUATION, TRL, MODELS]),
    "report": ([the_core, a_report], [TRAINING, EVALUATION, TRL, TASKS]),
    "episodic": ([the_core, movements], [TRAINING, EVALUATION, TRL, TASKS]),
    "triton": ([the_core, kernels], [TRL]),
    EVERYTHING: ([the_core, a_trainer, own_loops, tasks_and_rewards, the_command_line], [VERL, TRITON]),
    "verl": ([the_core, verl], [TRL]),
}


def install(wheel: Path, extra: str, environment: Path) -> None:
    """Makes an environment with torch, of which the CPU's build is enough, and the wheel with an extra."""
    run([sys.executable, "-m", "venv", str(environment)], environment.parent)
    pip = [str(environment / "bin" / "pip"), "install", "--quiet"]
    version = re.search(r"^TORCH := (\S+)", (ROOT / "Makefile").read_text(), re.M)
    assert version is not None
    build = f"torch=={version[1]}+cpu"
    if subprocess.run([*pip, build], capture_output=True, check=False).returncode:  # an index without such builds
        run([*pip, build.removesuffix("+cpu")], environment.parent)
    run([*pip, f"{wheel}[{extra}]" if extra else str(wheel)], environment.parent)
    run([*pip[:1], "check"], environment.parent)


@pytest.mark.parametrize("extra", MATRIX, ids=lambda extra: extra or "no extra")
def test_installed_wheel_works_with_each_extra(extra: str, release: tuple[Path, Path], tmp_path: Path) -> None:
    if extra == "verl" and sys.version_info >= (3, 13):
        pytest.skip("verl's dependencies do not support this Python yet")
    if extra == "triton" and sys.platform != "linux":
        pytest.skip("Triton is for Linux")
    assert not tmp_path.is_relative_to(ROOT)
    installed = Installed(tmp_path / "environment", tmp_path / "elsewhere")
    (installed.folder / "home").mkdir(parents=True)
    start = time.monotonic()

    def done(what: str) -> None:
        print(f"{extra or 'no extra'} | {what} | {time.monotonic() - start:.0f} s", flush=True)

    try:
        install(release[0], extra, installed.environment)
        done("installed")
        works, refused = MATRIX[extra]
        for check in works:
            check(installed)
            done(check.__name__)
        for command in refused:
            code = 2 if command[0] == "troll" else 1
            said = installed.run(*command, code=code, **({"TROLL_KERNELS": "triton"} if command == TRITON else {}))
            named = re.search(r"troll-rl\[([a-z,]+)\]", said)
            assert named is not None, said
            names = set(named[1].split(","))
            assert names <= set(REFUSALS[command].split(",")), said
            assert names - set(extra.split(",")), said
            done(f"{named[1]} is missing, says {' '.join(command)}")
    finally:
        shutil.rmtree(installed.environment, ignore_errors=True)  # a gigabyte
