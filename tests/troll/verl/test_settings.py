"""The plug-in's settings, of verl's own Hydra files and on verl's own path to its workers."""

import functools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import verl.utils.config
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
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
from troll import Truncation
from troll.verl import TrollFSDPActorConfig
from troll.verl.fsdp import TrollFSDPEngine

ROLLOUT = "actor_rollout_ref.rollout"

BYPASS = "algorithm.rollout_correction.bypass_mode=true"

KL_TARGET = tuple(policy_loss("kl_target=0.1"))


@functools.cache
def base(plug_in: tuple[str, ...]) -> DictConfig:
    return configuration(model_folder(), plug_in=plug_in)


def merged(*overrides: str, plug_in: tuple[str, ...] = PLUG_IN) -> Any:
    """verl's whole configuration; Hydra is slow, and need not compose all anew for one setting."""
    config = base(plug_in).copy()
    OmegaConf.set_struct(config, False)  # verl's experimental trainers have more
    return OmegaConf.merge(config, OmegaConf.from_dotlist(list(overrides)))


def actor(*overrides: str, plug_in: tuple[str, ...] = PLUG_IN) -> Any:
    """What verl's workers make of the actor's configuration."""
    return omega_conf_to_dataclass(merged(*overrides, plug_in=plug_in).actor_rollout_ref.actor)


def on_the_driver(*overrides: str) -> None:
    """verl's checks before it starts a worker."""
    validate_config(merged(*overrides), use_reference_policy=False, use_critic=False)


def test_group_selects_the_loss_the_engine_and_defaults() -> None:
    config = actor()
    assert isinstance(config, TrollFSDPActorConfig)
    settings = config.policy_loss
    assert (settings.loss_mode, settings.kl_bound, settings.regression_weight) == ("troll", 0.05, 1.0)
    assert (settings.top_k, settings.mass_threshold) == (64, 1e-5)
    assert (settings.constraint, settings.ratio_level, settings.anchor) == ("token", "token", "old")
    assert config.engine.strategy == "troll_fsdp2"
    assert config.engine.trust_region is settings
    assert EngineRegistry.get_engine_cls("language_model", config.engine.strategy) is TrollFSDPEngine


def test_command_line_sets_everything() -> None:
    values: dict[str, Any] = {"kl_bound": math.inf, "pull": "proximal", "regression_weight": 0.5}
    values |= {"top_k": 7, "mass_threshold": 1e-3}
    values |= {"constraint": "sequence", "ratio_level": "sequence"}
    config = configuration(model_folder(), *policy_loss(*(f"{name}={value}" for name, value in values.items())))
    settings = omega_conf_to_dataclass(config.actor_rollout_ref.actor).policy_loss
    assert {name: getattr(settings, name) for name in values} == values


def test_truncated_rollout_can_be_the_anchor() -> None:
    settings = actor(*REPORTED, f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_k=20").policy_loss
    assert settings.truncation == Truncation(20, 0.9, ties="exact")


def test_vllm_is_an_anchor_where_its_server_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = (*REPORTED, f"{ROLLOUT}.name=vllm", "trainer.v1.trainer_mode=separate_async")
    on_the_driver(*settings)
    monkeypatch.delitem(sys.modules, "troll.verl.plugin")
    with pytest.raises(Exception, match=r"needs troll\.verl\.plugin, .*VERL_USE_EXTERNAL_PLUGINS"):
        on_the_driver(*settings)


def test_no_rollout_correction_is_allowed() -> None:
    assert actor("algorithm.rollout_correction=null").policy_loss.bypass_mode is False


#: Settings of the trust region, and what is said of them.
REFUSED = {
    "loss_mode=vanilla": r"loss_mode must be troll .*leave the group out",
    "kl_bound=0": r"policy_loss\.kl_bound must be above 0",
    "kl_bound=.nan": r"kl_bound must be above 0",
    "kl_bound=.inf": r"kl_bound must be finite unless pull=proximal",
    "kl_bound=5%": r"policy_loss\.kl_bound must be above 0, got '5%'",
    "kl_bound=true": r"policy_loss\.kl_bound must be above 0, got True",
    "regression_weight=-0.1": r"policy_loss\.regression_weight must be finite and at least 0",
    "regression_weight=.inf": r"regression_weight must be finite and at least 0",
    "top_k=0": r"policy_loss\.top_k must be an integer, at least 1",
    "mass_threshold=1": r"policy_loss\.mass_threshold must be in \[0, 1\)",
    "pull=old": r"policy_loss\.pull must be one of projection, proximal",
    "constraint=group": r"policy_loss\.constraint must be one of",
    "ratio_level=turn": r"policy_loss\.ratio_level must be one of",
    "anchor=new": r"policy_loss\.anchor must be one of",
    "kl_target=0": r"policy_loss\.kl_target must be finite and above 0, got 0",
    "kl_target=.inf": r"kl_target must be finite and above 0",
    "kl_target=3%": r"kl_target must be finite and above 0, got '3%'",
    "anchor=rollout": r"bypass_mode=True and actor_rollout_ref\.rollout\.calculate_log_probs=True",
}

#: Settings of verl, alone or together, and what is said of them next to TROLL.
REFUSED_OF_VERL: dict[tuple[str, ...], str] = {
    ("trainer.use_v1=false",): r"set trainer\.use_v1=True",
    ("rollout.nnodes=1",): r"trainer_mode=separate_async",
    (BYPASS,): r"bypass_mode=True .* set it to False, or .*anchor=rollout",
    ("distillation.enabled=true",): r"set distillation\.enabled=False",
    (f"{ACTOR}.use_prefix_grouper=true",): r"use_prefix_grouper=False",
    (f"{ACTOR}.strategy=veomni",): r"actor\.strategy must be fsdp or fsdp2 .*got 'veomni'",
    (*REPORTED, f"{ROLLOUT}.calculate_log_probs=false"): r"rollout\.calculate_log_probs=True",
    (*REPORTED, f"{ROLLOUT}.logprobs_mode=raw_logprobs"): "logprobs_mode=processed_logprobs",
    (*REPORTED, f"{ROLLOUT}.name=sglang"): r"rollout\.name=vllm",
    (*REPORTED, f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.engine_kwargs.vllm.logprobs_mode=raw_logprobs"): "not raw_logprobs",
    (*REPORTED, f"{ROLLOUT}.disaggregation.enabled=true"): "without disaggregation",
    (*REPORTED, f"{ROLLOUT}.full_determinism=true"): r"full_determinism=True .* set it to False",
    (f"{ROLLOUT}.engine_kwargs.vllm.logits_processors=[mine.Bias]",): r"logits_processors.*leave them out",
    (f"{ROLLOUT}.repetition_penalty=1.05",): r"repetition_penalty .* set it to 1",
    (f"{ROLLOUT}.temperature=0.001",): r"temperature must be at least 0\.01, .*got 0\.001",
    (f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_k=20"): r"SGLang.*rollout\.name=vllm",
    (f"{ROLLOUT}.top_p=0.9", "algorithm.use_kl_in_reward=true"): r"actor\.use_kl_loss=True instead",
    (*KL_TARGET, "data.train_batch_size=4"): r"kl_target needs .*got one: .*ppo_mini_batch_size \(4\).*ppo_epochs",
    (*KL_TARGET, f"{ACTOR}.optim.lr=0"): r"optim\.lr, which must be above 0",
    (*KL_TARGET, *REPORTED, "trainer.v1.trainer_mode=colocate_async"): r"trainer_mode=colocate_async: set anchor=old",
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
def test_settings_that_leave_the_old_policy_are_allowed(overrides: Sequence[str]) -> None:
    on_the_driver(*overrides)


@pytest.mark.parametrize(
    ("value", "plug_in"),
    [("fsdp", ()), (None, ()), ({"kl_bound": 0.1}, PLUG_IN)],
    ids=["fsdp", "null", "with the group"],
)
def test_configuration_that_only_names_troll_is_refused(value: Any, plug_in: tuple[str, ...]) -> None:
    """As Hydra composes `+troll=fsdp` without the group, and `+troll.kl_bound=0.1` next to it."""
    config = OmegaConf.merge(merged(plug_in=plug_in), {"troll": value})
    with pytest.raises(ValueError, match=r"selects nothing, .*by \+troll=fsdp"):
        verl.utils.config.validate_config(config=config, use_reference_policy=False, use_critic=False)


def test_group_put_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=["+troll@elsewhere=fsdp"], return_hydra_config=True)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", config)  # as Hydra's main does
    with pytest.raises(ValueError, match="troll@elsewhere selects nothing"):
        validate_config(config, use_reference_policy=False, use_critic=False)


def test_users_own_search_path_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.yaml").write_text("# @package _global_\ntrainer:\n  project_name: mine\n")
    config = composed(model_folder(), f"hydra.searchpath=[file://{tmp_path}]", "+mine=a", "+troll=fsdp")
    assert config.trainer.project_name == "mine"
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "troll"


@pytest.mark.parametrize("override", ["troll=fsdp", "+troll=nonsense"])
def test_group_written_in_another_way_is_hydras_error(override: str) -> None:
    with pytest.raises(HydraException, match=r"\+troll=fsdp|Available options in 'troll':\s+fsdp\s+megatron"):
        composed(model_folder(), override)


def test_megatron_is_refused_with_what_is_fsdps() -> None:
    config = composed(model_folder(), "model_engine=megatron", *PLUG_IN)
    with pytest.raises(Exception, match=r"actor\.strategy must be fsdp or fsdp2 .*got 'megatron'.*model_engine=dp"):
        omega_conf_to_dataclass(config.actor_rollout_ref.actor)


@pytest.mark.parametrize(
    ("overrides", "updates", "batches"),
    [
        (("data.train_batch_size=13",), 4, 1),  # verl fills the last mini-batch up
        ((f"{ACTOR}.ppo_epochs=2", "trainer.v1.trainer_mode=colocate_async"), 6, 1),
        ((f"{ACTOR}.ppo_epochs=2", "trainer.v1.trainer_mode=separate_async"), 6, 3),
    ],
)
def test_updates_and_batches_of_a_rollout_are_verls(overrides: Sequence[str], updates: int, batches: int) -> None:
    settings = actor(*overrides).policy_loss
    assert (settings.updates_per_rollout, settings.batches_per_rollout) == (updates, batches)


def test_warning_if_there_is_one_update_per_rollout(recwarn: pytest.WarningsRecorder) -> None:
    one_update = "data.train_batch_size=4"
    for overrides in ((), (one_update, f"{ACTOR}.ppo_epochs=2"), (one_update, *REPORTED)):
        on_the_driver(*overrides)
    assert not [warning for warning in recwarn if warning.category is UserWarning]
    with pytest.warns(UserWarning, match=r"one update per rollout.*ppo_mini_batch_size \(4\).*ppo_epochs"):
        on_the_driver(one_update)


def test_warning_if_a_loss_depends_on_the_size_of_micro_batches(recwarn: pytest.WarningsRecorder) -> None:
    sums = f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"
    on_the_driver(sums, f"{ACTOR}.loss_scale_factor=16")
    assert not [warning for warning in recwarn if warning.category is UserWarning]
    with pytest.warns(UserWarning, match=r"set .*loss_scale_factor to data\.max_response_length"):
        on_the_driver(sums)


def test_actor_needs_its_settings() -> None:
    with pytest.raises(Exception, match=r"policy_loss\._target_ must be .*\+troll="):
        actor(f"{ACTOR}._target_=troll.verl.TrollFSDPActorConfig", plug_in=())


def test_verls_own_loss_and_engine_stay_what_they_are() -> None:
    config = actor(plug_in=())
    assert type(config).__module__.startswith("verl.") and config.policy_loss.loss_mode == "vanilla"
    assert POLICY_LOSS_REGISTRY["vanilla"].__module__ == "verl.trainer.ppo.core_algos"
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is FSDPEngineWithLMHead
    installed = Path(verl.__file__).parent
    for name in ("forward_backward_batch", "prepare_model_outputs", "forward_step", "train_batch"):
        assert Path(getattr(FSDPEngineWithLMHead, name).__code__.co_filename).is_relative_to(installed)
    stock = single(plug_in=()).reset()
    metrics = stock.update(stock.score(as_batch(rollout())))
    assert not any("trust_region" in name for name in metrics)
    assert metrics["actor/pg_clipfrac"][-1] > 0


def test_loss_is_refused_on_verls_own_engine() -> None:
    stock = single(plug_in=()).reset()
    scored = stock.score(as_batch(rollout()))
    stock.reset(loss_mode="troll")
    with pytest.raises(RuntimeError, match=r"without an engine that projects.*\+troll=fsdp"):
        stock.update(scored)
    assert not stock.steps


def test_engine_is_refused_without_the_group() -> None:
    built = actor(plug_in=())
    object.__setattr__(built.engine, "strategy", "troll_fsdp2")
    with pytest.raises(ValueError, match=r"troll_fsdp2 gets its settings from the actor.*\+troll=fsdp"):
        EngineRegistry.get_engine_cls("language_model", "troll_fsdp2")(None, built.engine, built.optim, None)
