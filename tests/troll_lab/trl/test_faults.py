"""Runs that die, for real: what is resumed is the last complete checkpoint, bit for bit, and the run says which."""

import json
import logging
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from tests.dying import dying, in_new_process
from tests.troll.trl import tiny
from tests.troll.trl.processes import launch
from troll_lab.trl import LabTrainer, checkpoints
from troll_lab.trl.checkpoints import MARKER, check_complete, judge, last_checkpoint, newest_complete
from troll_lab.trl.rollout_weights import WEIGHTS_STATE

#: Three rollouts of two updates, and as many checkpoints; a critic that moves with every update.
SETTINGS: dict[str, Any] = {
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 2,
    "kl_bound": 0.01,
    "advantage_estimator": "gae",
    "critic_kwargs": {"learning_rate": 1e-2},
}


class KeepState(TrainerCallback):
    """Parameters, and the critic's, before the first update and after each, by step."""

    trainer: Any

    def __init__(self) -> None:
        self.states: dict[int, dict[str, Any]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        accelerator, models = self.trainer.accelerator, {"policy": self.trainer.model_wrapped}
        if self.trainer.critic is not None:
            models["critic"] = self.trainer.critic.model
        self.states[state.global_step] = {
            f"{kind} {name}": value.clone()
            for kind, model in models.items()
            for name, value in accelerator.unwrap_model(model).state_dict().items()
        }


def train(model_path: Path, output_dir: Path, place: str, resume: bool | str | None, **settings: Any) -> dict[str, Any]:
    """A run that dies at a place, or leaves its states by step and what was logged."""
    torch.set_num_threads(1)
    callbacks, context = dying(place)
    keep, handler = KeepState(), mock.Mock(level=logging.NOTSET)
    logger = logging.getLogger("troll_lab.trl.checkpoints")
    logger.addHandler(handler)
    make = tiny.Maker(lambda _: model_path, output_dir)
    keep.trainer = make(LabTrainer, callbacks=callbacks, **{**SETTINGS, **settings})
    keep.trainer.add_callback(keep)  # after the trainer's own, so that it sees what that restores and adapts
    with context:
        keep.trainer.train(resume_from_checkpoint=resume)
    logger.removeHandler(handler)
    return {"states": keep.states, "lines": [call.args[0].getMessage() for call in handler.handle.call_args_list]}


def leave(result: Path, *arguments: Any) -> None:
    """What `train` returns, in a file."""
    torch.save(train(*arguments), result)


def main() -> None:
    """A run without a break and one in which the second process dies; or, without a place, that one resumed."""
    model, folder, *place = sys.argv[1:]
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    settings = {"per_device_train_batch_size": 2, "ddp_backend": "gloo"}
    if place:
        whole = train(Path(model), Path(folder, "whole"), "", None, **settings)
        torch.save(whole, Path(folder, f"whole-{rank}.pt"))
        train(Path(model), Path(folder, "out"), place[0] if rank == 1 else "", None, **settings)
    resumed = train(Path(model), Path(folder, "out"), "", True, **settings)
    torch.save(resumed, Path(folder, f"{rank}.pt"))
    torch.distributed.destroy_process_group()


KILLED = -9


def run(model: Path, output_dir: Path, place: str = "", resume: bool | str | None = None) -> Any:
    """What a run in a process of its own left, or how it ended."""
    result = output_dir.parent / "result.pt"
    code = in_new_process(leave, result, model, output_dir, place, resume)
    return torch.load(result) if code == 0 else code


@pytest.fixture(scope="module")
def whole(model_path: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of a run without a break, and what it left."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    result = run(model_path("llama"), folder)
    assert isinstance(result, dict)
    return folder, result


def assert_went_on(resumed: Any, whole: dict[str, Any], step: int) -> None:
    """From the state at a step to the end, as without a break."""
    assert min(resumed["states"]) == step
    for later in range(step, 7):
        torch.testing.assert_close(resumed["states"][later], whole["states"][later], rtol=0, atol=0)


def test_whole_run_moves_policy_and_critic(whole):
    states = whole[1]["states"]
    for step in range(6):
        moved = {name.split()[0] for name in states[0] if not torch.equal(states[step][name], states[step + 1][name])}
        assert {"policy", "critic"} <= moved
    assert whole[1]["lines"] == []


@pytest.mark.parametrize(
    "place",
    ["update 4", f"checkpoint-4/{MARKER}"]
    + [
        pytest.param(f"checkpoint-4/{file}", marks=pytest.mark.slow)
        for file in ("optimizer.pt", "trainer_state.json", "model.safetensors", "critic.part", "rng_state.pth")
    ],
)
def test_killed_in_an_update_or_a_checkpoint(model_path, whole, tmp_path, place):
    folder, in_checkpoint = tmp_path / "out", place.startswith("checkpoint")
    assert run(model_path("llama"), folder, place) == KILLED
    if in_checkpoint:
        assert (folder / place).is_file()
        assert get_last_checkpoint(str(folder)) == str(folder / "checkpoint-4"), "which transformers would resume from"
    resumed = run(model_path("llama"), folder, resume=True)
    (line,) = resumed["lines"]
    ignored = "; checkpoint-4 is incomplete and is ignored: the run ended while it was written"
    assert line == "resuming from checkpoint-2 (step 2 of 6)" + ignored * in_checkpoint
    assert_went_on(resumed, whole[1], 2)
    assert not in_checkpoint or judge(folder / "checkpoint-4").defect is None, "it was written anew"


@pytest.mark.slow
@pytest.mark.parametrize("place", ["update 4", "checkpoint-4/rng_state_1.pth"])
def test_one_of_two_processes_is_killed(model_path, tmp_path, place):
    """The launcher ends all of them with an error, and the run goes on from what both had written."""
    arguments = [str(model_path("llama")), str(tmp_path)]
    with pytest.raises(AssertionError, match=r"exitcode +: -9"):
        launch("tests.troll_lab.trl.test_faults", "ddp", [*arguments, place], tmp_path)
    assert not (tmp_path / "0.pt").exists()
    resumed = launch("tests.troll_lab.trl.test_faults", "ddp", arguments, tmp_path)
    (line,) = resumed[0]["lines"]
    assert line.startswith("resuming from checkpoint-2 (step 2 of 6)")
    assert ("checkpoint-4 is incomplete" in line) == place.startswith("checkpoint")
    assert resumed[1]["lines"] == []
    for rank, result in enumerate(resumed):
        assert_went_on(result, torch.load(tmp_path / f"whole-{rank}.pt"), 2)


@pytest.fixture
def damaged(whole, tmp_path) -> Path:
    """A copy of the whole run's folder, to be damaged."""
    shutil.copytree(whole[0], tmp_path / "out")
    return tmp_path / "out"


def test_a_complete_checkpoint_lists_its_files(damaged):
    for step in (2, 4, 6):
        checkpoint = damaged / f"checkpoint-{step}"
        assert judge(checkpoint).defect is None
        marker = json.loads((checkpoint / MARKER).read_text())
        there = {path.name: path.stat().st_size for path in checkpoint.iterdir() if path.name != MARKER}
        assert marker == {"complete": True, "only_model": False, "files": there}
        names = "model.safetensors optimizer.pt scheduler.pt critic.pt rng_state.pth trainer_state.json"
        assert set(names.split()) <= there.keys()
    (damaged / "checkpoint-best").mkdir()
    (damaged / "checkpoint-9").write_text("a file")
    assert newest_complete(damaged) == (damaged / "checkpoint-6", {})


def test_every_truncated_or_missing_file_is_noticed(damaged):
    last, before = damaged / "checkpoint-6", damaged / "checkpoint-4"
    for path in sorted(last.iterdir()):
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        assert judge(last).defect is not None
        assert newest_complete(damaged) == (before, {last: judge(last).defect})
        if path.name != MARKER:
            assert judge(last).defect == f"{path.name} has {len(content) - 1} bytes and had {len(content)}"
            path.unlink()
            assert judge(last).defect == f"{path.name} is missing"
        path.write_bytes(content)
        assert judge(last).defect is None


def test_resuming_names_what_is_incomplete(make, damaged):
    (damaged / "checkpoint-6" / "scheduler.pt").unlink()
    trainer = make(output_dir=str(damaged), **SETTINGS)
    says = r"checkpoint-6 is an incomplete checkpoint: scheduler.pt is missing; resume from .+checkpoint-4; to "
    with pytest.raises(ValueError, match=says):
        trainer.train(resume_from_checkpoint=str(damaged / "checkpoint-6"))
    for step in (2, 4, 6):
        (damaged / f"checkpoint-{step}" / "trainer_state.json").unlink()
    says = r"no complete checkpoint in output_dir .+ to resume from; .*checkpoint-6 is incomplete and is ignored: "
    with pytest.raises(ValueError, match=says):
        trainer.train(resume_from_checkpoint=True)


def written(folder: Path, step: int, complete: bool = True) -> Path:
    """A checkpoint of one file, while which is saved there is one of transformers' (`enable_jit_checkpoint`)."""
    checkpoint = folder / f"checkpoint-{step}"
    checkpoints._begin(checkpoint)
    (checkpoint / "checkpoint-is-incomplete.txt").touch()
    (checkpoint / "trainer_state.json").write_text("{}")
    if complete:
        checkpoints._complete(checkpoint)
    (checkpoint / "checkpoint-is-incomplete.txt").unlink()
    return checkpoint


def test_a_checkpoint_that_is_written_anew_is_incomplete(tmp_path):
    """What it said about the files before must not count for those of now."""
    assert judge(written(tmp_path, 2)).defect is None
    assert judge(written(tmp_path, 2, complete=False)).defect == "the run ended while it was written"


def test_check_complete_needs_what_the_marker_lists(tmp_path):
    changed = written(tmp_path, 2)
    (changed / "trainer_state.json").write_text("{ }")
    says = "has 3 bytes and had 2; there is no complete one next to it; to resume from it as it is, delete its "
    with pytest.raises(ValueError, match=says):
        check_complete(changed)
    checkpoints._complete(changed, only_model=True)
    with pytest.raises(ValueError, match=r"holds only the model \(save_only_model\); .* to resume from it as it is"):
        check_complete(changed)
    (changed / MARKER).unlink()
    check_complete(changed)
    with pytest.raises(ValueError, match=r"the run ended while it was written; resume from .+checkpoint-2$"):
        check_complete(written(tmp_path, 4, complete=False))
    (tmp_path / "checkpoint-4" / MARKER).write_text('{"complete": tr')  # nothing says that it was complete once
    with pytest.raises(ValueError, match=r"resume from .+checkpoint-2$"):
        check_complete(tmp_path / "checkpoint-4")


@pytest.mark.parametrize("marker", [{}, {"complete": True}, {"complete": "yes", "files": {}}, {"step": 2}])
def test_the_marker_of_something_else_is_none(tmp_path, marker):
    checkpoint = written(tmp_path, 2)
    (checkpoint / MARKER).write_text(json.dumps(marker))
    assert judge(checkpoint).defect is None
    (checkpoint / "trainer_state.json").unlink()
    assert judge(checkpoint).defect == "it has no trainer_state.json"


def test_processes_that_see_other_checkpoints_do_not_resume(make, tmp_path, monkeypatch):
    trainer = make(output_dir=str(tmp_path), **SETTINGS)
    monkeypatch.setattr(checkpoints, "gather_object", lambda found: [*found, "checkpoint-4"])
    with pytest.raises(ValueError, match=r"different newest checkpoints \(checkpoint-4, none\): name one with resume"):
        trainer.train(resume_from_checkpoint=True)
    written(tmp_path, 2)
    with pytest.raises(ValueError, match=r"different newest checkpoints \(checkpoint-2, checkpoint-4\): name one"):
        trainer.train(resume_from_checkpoint=True)


def test_checkpoints_without_a_marker(damaged):
    """TRL's own: complete with the file that is written last."""
    last, before = damaged / "checkpoint-6", damaged / "checkpoint-4"
    (last / MARKER).unlink()
    assert last_checkpoint(damaged) == (last, {})
    state = (last / "trainer_state.json").read_text()
    (last / "trainer_state.json").write_text(state[:100])
    checkpoint, passed_over = last_checkpoint(damaged)
    assert checkpoint == before and "trainer_state.json: not JSON" in passed_over[last]
    (last / "trainer_state.json").unlink()
    assert last_checkpoint(damaged) == (before, {last: "it has no trainer_state.json"})
    with pytest.raises(ValueError, match=r"checkpoint-6 is not the folder of a checkpoint: it has no trainer_state"):
        check_complete(last)


def test_checkpoints_without_the_state_of_a_part(make, tmp_path):
    """Of runs without that part, or of an older version."""
    make(save_strategy="steps", save_steps=2, max_steps=2).train()
    (tmp_path / "checkpoint-2" / MARKER).unlink()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"advantage_estimator": "gae"}, "not a checkpoint of a run with a critic"),
        ({"rollout_delay": 2}, f"has no {WEIGHTS_STATE}: it is not a checkpoint of a run with rollout_delay"),
    ]
    for settings, message in cases:
        with pytest.raises(FileNotFoundError, match=message):
            make(max_steps=4, **settings).train(resume_from_checkpoint=True)


def test_a_program_in_a_checkpoint_does_not_run(tmp_path):
    torch.save({"rate": Path("/")}, path := tmp_path / "critic.pt")  # reading a Path calls it
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        checkpoints.load_state(path, "any run")


def test_older_checkpoints_go_once_the_new_one_is_complete(make, tmp_path, monkeypatch):
    seen = []
    rotate = checkpoints.rotate_checkpoints

    def observed(**keywords: Any) -> None:
        seen.append({path.name: judge(path).defect for path in Path(keywords["output_dir"]).glob("checkpoint-*")})
        rotate(**keywords)

    monkeypatch.setattr(checkpoints, "rotate_checkpoints", observed)
    settings = {"output_dir": str(tmp_path / "out"), "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    trainer = make(max_steps=3, **settings)
    trainer.train()
    assert seen == [dict.fromkeys(f"checkpoint-{step}" for step in steps) for steps in ([1], [1, 2], [2, 3])]
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-3"]
    saved = torch.load(tmp_path / "out" / "checkpoint-3" / "training_args.bin", weights_only=False)
    assert saved.save_total_limit == trainer.args.save_total_limit == 1


def test_incomplete_checkpoints_are_deleted_before_complete_ones(tmp_path):
    kept = [written(tmp_path, 40), written(tmp_path, 47, complete=False), written(tmp_path, 44)]
    checkpoints._delete_older(kept[-1], limit=None, best=None)
    assert all(path.is_dir() for path in kept)
    checkpoints._delete_older(kept[-1], limit=2, best=None)
    assert [path.is_dir() for path in kept] == [True, False, True]
    written(tmp_path, 47, complete=False)
    checkpoints._delete_older(kept[-1], limit=1, best=None)
    assert newest_complete(tmp_path) == (kept[-1], {})
    assert list(tmp_path.iterdir()) == [kept[-1]]
    changed = written(tmp_path, 40)
    next(path for path in changed.iterdir() if path.name != checkpoints.MARKER).unlink()
    checkpoints._delete_older(kept[-1], limit=2, best=None)
    assert changed.is_dir()


def test_checkpoint_is_complete_when_it_is_pushed_to_the_hub(make, tmp_path, monkeypatch):
    trainer = make(output_dir=str(tmp_path / "out"), save_strategy="steps", save_steps=2, max_steps=2)
    pushed = []
    monkeypatch.setattr(
        trainer, "_push_from_checkpoint", lambda folder: pushed.append((folder, judge(Path(folder)).defect))
    )
    monkeypatch.setattr(trainer, "init_hf_repo", lambda *_, **__: None)
    trainer.args.push_to_hub = True
    trainer.train()
    assert pushed == [(str(tmp_path / "out" / "checkpoint-2"), None)]


if __name__ == "__main__":
    main()
