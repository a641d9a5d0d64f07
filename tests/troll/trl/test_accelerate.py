"""Back ends of accelerate: what is refused or warned about, and, slowly, whole runs from the command line."""

import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate import ParallelismConfig
from packaging.version import Version
from safetensors.torch import load_file
from torch.distributed.elastic.utils.distributed import get_free_port
from transformers import AutoModelForCausalLM

from tests.troll.trl.distributed_worker import OTHERS, train
from tests.troll.trl.processes import ROOT, command, environment
from tests.troll.trl.test_distributed import assert_exact_resume, assert_same_metrics, assert_same_updates
from tests.troll.trl.tiny import assert_same_gradients
from troll.trl.checks import refuse_an_empty_reference, refuse_model_parallelism, warn_about_saving


@pytest.mark.parametrize("setting", ["tp_size", "cp_size", "sp_size"])
def test_model_parallelism_is_refused(setting):
    sizes = {f"get_{name}": lambda: 1 for name in ("tp_size", "cp_size", "sp_size")}
    refuse_model_parallelism(SimpleNamespace(**sizes))
    with pytest.raises(ValueError, match=f"cannot be used with {setting}=2: .* Set {setting} to 1, and share .* FSDP2"):
        refuse_model_parallelism(SimpleNamespace(**{**sizes, f"get_{setting}": lambda: 2}))


def test_the_trainer_asks_before_it_prepares_anything(make, monkeypatch):
    """accelerate itself wants as many processes, so that the accelerator is told of them afterwards."""
    from transformers import Trainer

    original = Trainer.create_accelerator_and_postprocess

    def create(self: Any) -> None:
        original(self)
        self.accelerator.state.parallelism_config = ParallelismConfig(cp_size=2)

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", create)
    with pytest.raises(ValueError, match="cannot be used with cp_size=2"):
        make()


@pytest.mark.parametrize("another_has_zeros", [False, True])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_a_reference_that_some_process_did_not_get_is_refused_in_all(model_path, has_zeros, another_has_zeros):
    model = AutoModelForCausalLM.from_pretrained(model_path("llama"))
    if has_zeros:
        torch.nn.init.zeros_(model.get_output_embeddings().weight)
    others = torch.tensor([another_has_zeros])
    accelerator: Any = SimpleNamespace(is_fsdp2=True, device="cpu", gather=lambda own: torch.cat([own, others]))
    refuses = pytest.raises(ValueError, match="set fsdp_cpu_ram_efficient_loading to false")
    with refuses if has_zeros or another_has_zeros else nullcontext():
        refuse_an_empty_reference(accelerator, model)
    refuse_an_empty_reference(accelerator, None)
    accelerator.is_fsdp2 = False
    refuse_an_empty_reference(accelerator, model)


def fsdp(kind: str) -> dict[str, Any]:
    return {"fsdp_plugin": SimpleNamespace(state_dict_type=f"StateDictType.{kind}")}


def zero(**settings: Any) -> dict[str, Any]:
    return {"deepspeed_plugin": SimpleNamespace(deepspeed_config={"zero_optimization": settings})}


ADAPTED = SimpleNamespace(peft_config={"default": "an adapter"})


@pytest.mark.parametrize(
    ("plugins", "model", "message"),
    [
        (fsdp("SHARDED_STATE_DICT"), None, "FULL_STATE_DICT"),
        (fsdp("SHARDED_STATE_DICT"), ADAPTED, "FULL_STATE_DICT"),
        (fsdp("FULL_STATE_DICT"), None, None),
        (zero(stage=3), None, "zero3_save_16bit_model"),
        (zero(stage=3, stage3_gather_16bit_weights_on_model_save=False), None, "zero3_save_16bit_model"),
        (zero(stage=3, stage3_gather_16bit_weights_on_model_save=False), ADAPTED, None),
        (zero(stage=3, stage3_gather_16bit_weights_on_model_save=True), None, None),
        (zero(stage=2), None, None),
        ({}, None, None),
    ],
)
def test_a_back_end_that_saves_shards_alone_is_warned_about(recwarn, plugins, model, message):
    accelerator: Any = SimpleNamespace(state=SimpleNamespace(**plugins))
    warn_about_saving(accelerator, model)
    assert [message in str(warning.message) for warning in recwarn] == ([] if message is None else [True])


@pytest.fixture(scope="module", params=["ddp", "fsdp", "zero3"])
def the_rest(request: pytest.FixtureRequest, left_by_two: Any) -> list[dict[str, Any]]:
    """What either process returned."""
    return left_by_two(request.param, "distributed", "the rest")


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_two_processes_make_the_update_of_one(make, the_rest, name):
    case, model = OTHERS[name]
    results, one = [result[name] for result in the_rest], train(make, case, 1, model)
    assert_same_updates(results, one)
    assert_same_metrics(results, one)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["LoRA", "shards"])
def test_two_processes_resume_exactly(the_rest, what):
    for result in the_rest:
        if what in result["interrupted"]:  # whole copies have no shards
            assert_exact_resume(result["interrupted"][what])


@pytest.mark.slow
def test_a_run_that_saves_shards_alone_is_told_so(the_rest):
    main, _ = (result["interrupted"] for result in the_rest)
    for what in main:
        assert any("save_model" in warning for warning in main[what]["warnings"]) == (what == "shards")


@pytest.mark.slow
def test_adapters_are_saved_whole(the_rest):
    expected = the_rest[0]["interrupted"]["LoRA"]["resumed"]["weights"]
    saved = load_file(the_rest[0]["folder"] / "LoRA" / "model" / "adapter_model.safetensors")
    assert_same_gradients(saved, {name.replace(".default", ""): weight for name, weight in expected.items()}, 0)


# Whole runs

RUN = ["--max_steps", "6", "--save_steps", "2", "--eval_steps", "4", "--logging_steps", "2", "--eval_size", "8"]
RUN += ["--per_device_train_batch_size", "8", "--steps_per_generation", "2", "--per_device_eval_batch_size", "8"]
RUN += ["--save_total_limit", "9", "--learning_rate", "1e-3", "--warmup_steps", "0", "--ddp_backend", "gloo"]

DEVICE = {"ddp": ["--use_cpu", "true"], "zero3": ["--use_cpu", "false"]}


def start(mode: str, folder: Path, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """`troll train quickstart` in two processes, as docs/trl.md has it."""
    training = [
        "-m",
        "troll_lab.cli",
        "train",
        "quickstart",
        *RUN,
        *DEVICE[mode],
        "--output_dir",
        str(folder),
        *arguments,
    ]
    return subprocess.Popen(
        [*command(mode, *options), *training],
        cwd=ROOT,
        env=environment(mode),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*processes: subprocess.Popen[str]) -> None:
    """Waits for their end, and fails with what they said."""
    said = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(said)


def model_of(folder: Path) -> dict[str, torch.Tensor]:
    """The weights that a run left."""
    return load_file(folder / "model" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("mode", DEVICE)
def test_troll_train_resumes_exactly_in_new_processes(mode, tmp_path):
    if mode == "zero3":
        pytest.importorskip("deepspeed")
    elif Version(transformers.__version__) < Version("5.18"):
        pytest.skip("before transformers 5.18, Trainer loads to cpu:0 where several processes resume on a CPU")
    ports = [("--main_process_port", str(get_free_port())) for _ in range(2)]
    finish(start(mode, tmp_path / "whole", options=ports[0]))
    checkpoint = str(tmp_path / "whole" / "checkpoint-2")
    finish(start(mode, tmp_path / "resumed", "--resume_from_checkpoint", checkpoint, options=ports[1]))
    assert_same_gradients(model_of(tmp_path / "resumed"), model_of(tmp_path / "whole"), 0)


@pytest.mark.slow
def test_two_machines_make_the_run_of_one(tmp_path):
    """Two launchers of one process each, which meet at an address, as on two machines."""
    port = str(get_free_port())
    machines = ("--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", port)
    finish(*(start("ddp", tmp_path / "two", options=(*machines, "--machine_rank", str(rank))) for rank in range(2)))
    finish(start("ddp", tmp_path / "one", options=("--main_process_port", str(get_free_port()))))
    assert_same_gradients(model_of(tmp_path / "two"), model_of(tmp_path / "one"), 0)
