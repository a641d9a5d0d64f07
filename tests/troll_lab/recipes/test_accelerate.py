"""The configurations of accelerate that are shipped."""

import runpy

import pytest
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType

from troll_lab.recipes.accelerate import CONFIGURATIONS

BACK_ENDS = {"ddp": DistributedType.MULTI_GPU, "fsdp2": DistributedType.FSDP, "zero3": DistributedType.DEEPSPEED}


@pytest.mark.parametrize("name", BACK_ENDS)
def test_the_launcher_knows_every_setting(name: str) -> None:
    config = load_config_from_file(str(CONFIGURATIONS[name]))
    assert isinstance(config, ClusterConfig)
    assert (config.distributed_type, config.mixed_precision) == (BACK_ENDS[name], "bf16")
    parser = launch_command_parser()
    several = ["--num_processes", "16", "--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "10.0.0.1"]
    given = parser.parse_args(["--config_file", str(CONFIGURATIONS[name]), *several, "script.py"])
    known = set(vars(given))
    arguments, defaults, _ = _validate_launch_command(given)
    own = {f"fsdp_{key.removeprefix('fsdp_')}" for key in defaults.fsdp_config} | set(defaults.deepspeed_config)
    assert own <= known, "the launcher ignores a setting that it has no argument for"
    assert (arguments.num_processes, arguments.num_machines, arguments.machine_rank) == (16, 2, 1)
    assert (arguments.main_process_ip, arguments.mixed_precision) == ("10.0.0.1", "bf16")
    assert [arguments.multi_gpu, arguments.use_fsdp, arguments.use_deepspeed].count(True) == 1
    if name == "fsdp2":
        assert (arguments.fsdp_version, arguments.fsdp_state_dict_type) == (2, "FULL_STATE_DICT")
        assert arguments.fsdp_cpu_ram_efficient_loading in (False, "false")
    if name == "zero3":
        assert (arguments.zero_stage, arguments.zero3_save_16bit_model) == (3, True)
        assert arguments.deepspeed_multinode_launcher == "standard"


def test_the_path_of_a_configuration_is_printed(monkeypatch, capsys):
    assert list(CONFIGURATIONS) == sorted(BACK_ENDS)
    monkeypatch.setattr("sys.argv", ["accelerate", "zero3"])
    runpy.run_module("troll_lab.recipes.accelerate")
    assert capsys.readouterr().out.splitlines() == [str(CONFIGURATIONS["zero3"])]
