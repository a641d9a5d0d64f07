"""The plug-in's settings, of verl's own Hydra files and on verl's own path to its workers."""

import functools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import verl.utils.config
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from tests.troll.verl.actor import (
    ACTOR,
    PLUG_IN,
    REPORTED,
    as_batch,
    composed,
    configuration,
    model_folder,
    policy_loss,
    rollout,
    single,
)
from tests.troll.verl.fresh import Fresh
from troll import Truncation
from troll.verl import TrollFSDPActorConfig
from troll.verl.fsdp import TrollFSDPEngine

ROLLOUT = "actor_rollout_ref.rollout"

BYPASS = "algorithm.rollout_correction.bypass_mode=true"

KL_TARGET = tuple(policy_loss("kl_target=0.03"))

#: Engines of verl's that have no TROLL.
OTHERS = ("veomni", "torchtitan")


#: verl's program, with overrides of its command line.
MAIN = """
import sys
sys.argv = ["main_ppo", "hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=disabled", *{overrides}]
from verl.trainer.main_ppo import main
main()
"""


def actor(*overrides: str, plug_in: tuple[str, ...] = PLUG_IN) -> Any:
    """What verl's workers make of the actor's configuration."""
    config = configuration(model_folder(), *overrides, plug_in=plug_in)
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


@functools.cache
def base(plug_in: tuple[str, ...] = PLUG_IN) -> DictConfig:
    return configuration(model_folder(), plug_in=plug_in)


def on_the_driver(*overrides: str) -> None:
    """verl's checks before it starts a worker; Hydra is slow, and need not compose all anew for one setting."""
    config = base().copy()
    OmegaConf.set_struct(config, False)  # verl's experimental trainers have more
    config = OmegaConf.merge(config, OmegaConf.from_dotlist(list(overrides)))
    validate_config(config, use_reference_policy=False, use_critic=False)


def test_the_group_selects_the_loss_the_engine_and_the_defaults() -> None:
    config = actor()
    assert isinstance(config, TrollFSDPActorConfig)
    settings = config.policy_loss
    assert (settings.loss_mode, settings.kl_bound, settings.regression_weight) == ("troll", 0.05, 1.0)
    assert (settings.top_k, settings.mass_threshold) == (64, 1e-5)
    assert (settings.constraint, settings.ratio_level, settings.anchor) == ("token", "token", "old")
    assert config.engine.strategy == "troll_fsdp2"
    assert config.engine.trust_region is settings
    assert EngineRegistry.get_engine_cls("language_model", config.engine.strategy) is TrollFSDPEngine


def test_the_command_line_sets_everything() -> None:
    values: dict[str, Any] = {"kl_bound": math.inf, "pull": "proximal", "regression_weight": 0.5}
    values |= {"top_k": 7, "mass_threshold": 1e-3}
    values |= {"constraint": "sequence", "ratio_level": "sequence"}
    settings = actor(*policy_loss(*(f"{name}={value}" for name, value in values.items()))).policy_loss
    assert {name: getattr(settings, name) for name in values} == values


@pytest.mark.parametrize(
    ("setting", "kept"),
    [("top_p=0.9", Truncation(top_p=0.9, ties="exact")), ("top_k=20", Truncation(top_k=20, ties="exact"))],
)
def test_a_truncated_rollout_can_be_the_anchor(setting: str, kept: Truncation) -> None:
    assert actor(*REPORTED, f"{ROLLOUT}.{setting}").policy_loss.truncation == kept


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_vllm_is_an_anchor_where_its_server_reports(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = (*REPORTED, f"{ROLLOUT}.name=vllm", f"trainer.v1.trainer_mode={mode}")
    assert actor(*settings).policy_loss.rollout_name == "vllm"
    monkeypatch.delitem(sys.modules, "troll.verl.plugin")
    with pytest.raises(Exception, match=r"needs troll\.verl\.plugin, .*VERL_USE_EXTERNAL_PLUGINS at auto"):
        actor(*settings)


def test_no_rollout_correction_at_all_is_verls_to_allow() -> None:
    assert actor("algorithm.rollout_correction=null").policy_loss.bypass_mode is False


#: Settings of the trust region, and what is said of them.
REFUSED = {
    "loss_mode=vanilla": r"loss_mode must be troll .*leave the group out",
    "kl_bound=0": r"policy_loss\.kl_bound must be above 0 and, .*, got 0",
    "kl_bound=-1": r"kl_bound must be above 0 and, .*, got -1",
    "kl_bound=.nan": r"kl_bound must be above 0 and, .*, got nan",
    "kl_bound=.inf": r"kl_bound must be above 0 and, .*, got inf",
    "kl_bound=5%": r"policy_loss\.kl_bound must be a number, got '5%'",
    "regression_weight=-0.1": r"policy_loss\.regression_weight must be at least 0",
    "regression_weight=.nan": r"policy_loss\.regression_weight must be at least 0",
    "regression_weight=.inf": r"policy_loss\.regression_weight must be at least 0 and finite, got inf",
    "regression_weight=small": r"policy_loss\.regression_weight must be a number, got 'small'",
    "top_k=0": r"top_k must be an integer of at least 1, got 0",
    "mass_threshold=1": r"mass_threshold must be .*\[0, 1\)",
    "pull=old": r"policy_loss\.pull must be one of projection, proximal, got 'old'",
    "constraint=group": r"policy_loss\.constraint must be one of token, sequence, got 'group'",
    "ratio_level=turn": r"policy_loss\.ratio_level must be one of token, sequence, got 'turn'",
    "anchor=new": r"policy_loss\.anchor must be one of old, rollout, got 'new'",
    "kl_target=0": r"policy_loss\.kl_target must be a number, finite and above 0, got 0",
    "kl_target=-1": r"kl_target must be a number, finite and above 0, got -1",
    "kl_target=.inf": r"kl_target must be a number, finite and above 0, got inf",
    "kl_target=.nan": r"kl_target must be a number, finite and above 0, got nan",
    "kl_target=3%": r"kl_target must be a number, finite and above 0, got '3%'",
    "anchor=rollout": r"bypass_mode=True and actor_rollout_ref\.rollout\.calculate_log_probs=True",
}

#: Settings of verl, alone or together, and what is said of them beside TROLL.
REFUSED_OF_VERL: dict[tuple[str, ...], str] = {
    ("trainer.use_v1=false",): r"set trainer\.use_v1=True",
    ("rollout.nnodes=1",): r"fully_async_policy and .*trainer_mode=separate_async",
    (BYPASS,): r"bypass_mode=True .* set it to False, or .*anchor=rollout",
    ("distillation.enabled=true",): r"set distillation\.enabled=False",
    (f"{ACTOR}.use_prefix_grouper=true",): r"use_prefix_grouper=False",
    **{(f"{ACTOR}.strategy={other}",): rf"actor\.strategy must be fsdp or fsdp2 .*got '{other}'" for other in OTHERS},
    (*REPORTED, f"{ROLLOUT}.logprobs_mode=raw_logprobs"): "logprobs_mode=processed_logprobs",
    (*REPORTED, f"{ROLLOUT}.name=sglang"): r"rollout\.name=vllm",
    (*REPORTED, f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.engine_kwargs.vllm.logprobs_mode=raw_logprobs"): "not raw_logprobs",
    (f"{ROLLOUT}.engine_kwargs.vllm.logits_processors=[mine.Bias]",): r"logits_processors.*leave them out",
    (f"{ROLLOUT}.repetition_penalty=1.05",): r"repetition_penalty .* set it to 1, got 1\.05",
    (f"{ROLLOUT}.temperature=0",): r"temperature must be at least 0\.01, .*got 0",
    (f"{ROLLOUT}.temperature=0.001",): r"temperature must be at least 0\.01, .*got 0\.001",
    (f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_k=20"): r"SGLang.*rollout\.name=vllm",
    (*REPORTED, f"{ROLLOUT}.disaggregation.enabled=true"): "without disaggregation",
    (*KL_TARGET, "data.train_batch_size=4"): r"kl_target needs .*got one: .*ppo_mini_batch_size \(4\).*ppo_epochs",
    (*KL_TARGET, f"{ACTOR}.optim.lr=0"): r"kl_target begins its search at .*optim\.lr, which must be above 0, got 0",
    (*KL_TARGET, *REPORTED, f"{ROLLOUT}.name=vllm", "trainer.v1.trainer_mode=colocate_async"): (
        r"kl_target with anchor=rollout .*trainer_mode=colocate_async: set anchor=old"
    ),
    (f"{ROLLOUT}.top_p=0.9", "algorithm.use_kl_in_reward=true"): r"actor\.use_kl_loss=True instead",
}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [*((policy_loss(setting), message) for setting, message in REFUSED.items()), *REFUSED_OF_VERL.items()],
    ids=[*REFUSED, *map(" ".join, REFUSED_OF_VERL)],
)
def test_what_cannot_be_trained_is_refused_on_the_driver(overrides: Sequence[str], message: str) -> None:
    with pytest.raises(Exception, match=message):
        on_the_driver(*overrides)


#: Settings of a rollout that change nothing of what is sampled, or that belong to an engine that is not used.
ALLOWED = (
    (f"{ROLLOUT}.repetition_penalty=1.0", f"{ROLLOUT}.temperature=0.6", f"{ROLLOUT}.top_p=0.95", f"{ROLLOUT}.top_k=20"),
    (f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.top_p=0.9"),
    (f"{ROLLOUT}.engine_kwargs.vllm.attention_backend=TRITON_ATTN",),
    (f"{ROLLOUT}.engine_kwargs.vllm.logits_processors=[]",),
    (f"{ROLLOUT}.engine_kwargs.vllm.logprobs_mode=raw_logprobs",),
    (f"{ROLLOUT}.engine_kwargs.sglang.logits_processors=[mine.Bias]",),
    (f"{ROLLOUT}.engine_kwargs=null",),
    (*KL_TARGET, "data.train_batch_size=4", f"{ACTOR}.ppo_epochs=2"),
    (*KL_TARGET, "trainer.v1.trainer_mode=separate_async", f"{ACTOR}.optim.lr=1"),
    (*KL_TARGET, *REPORTED),
)


@pytest.mark.parametrize("overrides", ALLOWED)
def test_settings_that_leave_the_old_policy_as_it_is_are_allowed(overrides: Sequence[str]) -> None:
    on_the_driver(*overrides)


#: A configuration that names TROLL where nothing reads it, as Hydra composes it without the group, or with it.
UNREAD = {
    "+troll=fsdp": {"troll": "fsdp"},
    "++troll=megatron": {"troll": "megatron"},
    "+troll=nonsense": {"troll": "nonsense"},
    "+troll=[fsdp]": {"troll": ["fsdp"]},
    "+troll=null": {"troll": None},
    "+troll.kl_bound=0.1": {"troll": {"kl_bound": 0.1}},
}


@pytest.mark.parametrize("plug_in", [(), PLUG_IN], ids=["without the group", "with it"])
@pytest.mark.parametrize("values", UNREAD.values(), ids=UNREAD)
def test_a_configuration_that_names_troll_where_nothing_reads_it_is_refused(
    values: dict[str, Any], plug_in: tuple[str, ...]
) -> None:
    config = base(plug_in).copy()
    OmegaConf.set_struct(config, False)
    config = OmegaConf.merge(config, values)
    with pytest.raises(ValueError, match=r"selects nothing, .*by \+troll=fsdp or \+troll=megatron.*by pip"):
        verl.utils.config.validate_config(config=config, use_reference_policy=False, use_critic=False)


def test_the_group_put_elsewhere_is_refused(fresh: Fresh) -> None:
    """By verl's own program, before Ray starts."""
    done = fresh(MAIN.format(overrides=["+troll@elsewhere=fsdp"]))
    assert done.code == 1
    assert any("troll@elsewhere selects nothing" in line for line in done.said), "\n".join(done.said)


def test_a_users_own_search_path_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.yaml").write_text("# @package _global_\ntrainer:\n  project_name: mine\n")
    config = composed(model_folder(), f"hydra.searchpath=[file://{tmp_path}]", "+mine=a", "+troll=fsdp")
    assert config.trainer.project_name == "mine"
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "troll"


@pytest.mark.parametrize("override", ["troll=fsdp", "++troll=fsdp", "+troll=nonsense"])
def test_another_way_of_writing_the_group_is_hydras_error(override: str) -> None:
    with pytest.raises(HydraException, match=r"\+troll=fsdp|Available options in 'troll':\s+fsdp\s+megatron"):
        composed(model_folder(), override)


@pytest.mark.parametrize("engine", [*OTHERS, "megatron"])
def test_another_engine_is_refused_with_what_to_set(engine: str) -> None:
    config = composed(model_folder(), f"model_engine={engine}", *PLUG_IN)
    with pytest.raises(Exception, match=rf"actor\.strategy must be fsdp or fsdp2 .*got '{engine}'.*model_engine=dp"):
        omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def test_a_kl_target_is_refused_with_megatron() -> None:
    config = composed(model_folder(), "model_engine=megatron", "+troll=megatron", *KL_TARGET)
    with pytest.raises(Exception, match=r"policy_loss\.kl_target works with verl's FSDP engine only: .*\+troll=fsdp"):
        omega_conf_to_dataclass(config.actor_rollout_ref.actor)


@pytest.mark.parametrize(
    ("overrides", "updates", "batches"),
    [
        ((), 3, 1),
        (("data.train_batch_size=13",), 4, 1),  # verl fills the last mini-batch up
        ((f"{ACTOR}.ppo_epochs=2",), 6, 1),
        ((f"{ACTOR}.ppo_epochs=2", "trainer.v1.trainer_mode=colocate_async"), 6, 1),
        ((f"{ACTOR}.ppo_epochs=2", "trainer.v1.trainer_mode=separate_async"), 6, 3),
    ],
)
def test_the_updates_and_batches_of_a_rollout_are_verls(overrides: Sequence[str], updates: int, batches: int) -> None:
    settings = actor(*overrides).policy_loss
    assert settings.kl_target is None
    assert (settings.updates_per_rollout, settings.batches_per_rollout) == (updates, batches)


def test_only_a_run_that_is_never_off_policy_is_told_so(recwarn: pytest.WarningsRecorder) -> None:
    one_update = "data.train_batch_size=4"
    for overrides in ((), (one_update, f"{ACTOR}.ppo_epochs=2")):
        on_the_driver(*overrides)
    assert not [warning for warning in recwarn if warning.category is UserWarning]
    with pytest.warns(UserWarning, match=r"one update per rollout.*ppo_mini_batch_size \(4\).*ppo_epochs"):
        on_the_driver(one_update)


def test_the_plug_ins_actor_needs_its_settings() -> None:
    with pytest.raises(Exception, match=r"policy_loss\._target_ must be troll\.verl\.TrollPolicyLossConfig.*\+troll="):
        actor(f"{ACTOR}._target_=troll.verl.TrollFSDPActorConfig", plug_in=())


def test_verls_own_loss_and_engine_stay_what_they_are() -> None:
    config = actor(plug_in=())
    assert type(config).__module__.startswith("verl.") and config.policy_loss.loss_mode == "vanilla"
    assert POLICY_LOSS_REGISTRY["vanilla"].__module__ == "verl.trainer.ppo.core_algos"
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is FSDPEngineWithLMHead
    installed = Path(verl.__file__).parent
    for name in ("forward_backward_batch", "prepare_model_outputs", "forward_step", "train_batch"):
        code = getattr(FSDPEngineWithLMHead, name).__code__
        assert Path(code.co_filename).is_relative_to(installed)
    stock = single(plug_in=()).reset()
    metrics = stock.update(stock.score(as_batch(rollout())))
    assert not any("trust_region" in name for name in metrics)
    assert metrics["actor/pg_clipfrac"][-1] > 0


def test_the_loss_is_refused_on_verls_own_engine() -> None:
    stock = single(plug_in=()).reset()
    scored, before = stock.score(as_batch(rollout())), stock.parameters()
    stock.reset(loss_mode="troll")
    with pytest.raises(RuntimeError, match=r"loss_mode=troll without an engine that projects.*\+troll=fsdp"):
        stock.update(scored)
    assert all((value == before[name]).all() for name, value in stock.parameters().items())


def test_the_engine_is_refused_without_the_group() -> None:
    config = configuration(model_folder(), plug_in=())
    built = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    object.__setattr__(built.engine, "strategy", "troll_fsdp2")
    with pytest.raises(ValueError, match=r"troll_fsdp2 gets its settings from the actor's configuration.*\+troll=fsdp"):
        EngineRegistry.get_engine_cls("language_model", "troll_fsdp2")(None, built.engine, built.optim, None)
