"""The seam: what is said of a TRL that does not fit, and how much of it we touch."""

import inspect
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from trl import GRPOTrainer
from trl.trainer import utils

from tests.troll.trl import tiny
from tests.troll.trl.tiny import loss_and_gradients, move, rollout
from troll.trl import TrollTrainer
from troll.trl.seam import load_whole_weights, needed


def test_differences_are_refused_by_name_with_the_remedy(monkeypatch):
    """What is a difference: test_needed."""
    assert list(needed.differences()) == []
    monkeypatch.delattr(utils, "add_fused_lm_head")
    monkeypatch.delattr(GRPOTrainer, "_calculate_rewards")
    says = r"TRL 1\.1\d\.\d is another: .*_calculate_rewards \(the rewards .* is missing, and 1 more\. Install"
    with pytest.raises(ImportError, match=says):
        needed.refuse(needed.differences())


def test_a_model_input_that_the_seam_does_not_know_is_named(monkeypatch):
    """The new policy would be read without it."""
    original = GRPOTrainer._get_per_token_logps_and_entropies
    parameters = [*inspect.signature(original).parameters.values()]
    video = inspect.Parameter("pixel_values_videos", inspect.Parameter.KEYWORD_ONLY, default=None)
    monkeypatch.setattr(original, "__signature__", inspect.Signature([*parameters, video]), raising=False)
    (phrase,) = needed.differences()
    assert phrase.endswith("has a new parameter pixel_values_videos")


def test_a_fused_head_without_triton_is_named(monkeypatch):
    """As in TRL 1.15."""
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", None)
    (phrase,) = needed.differences()
    assert "pip install triton" in phrase


def test_the_trainer_overrides_four_methods_which_are_checked():
    own = {name for name, value in vars(TrollTrainer).items() if inspect.isfunction(value)}
    overridden = {name for name in own if hasattr(GRPOTrainer, name)} - {"__init__"}
    assert overridden == {method.name for method in needed.OVERRIDDEN}
    assert len(overridden) == 4


def test_a_trl_that_reads_the_old_log_probs_first_trains_right(make, monkeypatch):
    """Before it scores."""
    compute_loss = GRPOTrainer._compute_loss

    def reading_first(self: Any, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        taken = dict(inputs)
        inputs.clear()  # what is written from here on is not seen
        return compute_loss(self, model, taken)

    trainer = make(kl_bound=0.01)
    inputs = rollout(trainer)[0]
    move(trainer.model, 0.05)
    expected, expected_gradients = loss_and_gradients(trainer, dict(inputs))
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", reading_first)
    loss, gradients = loss_and_gradients(trainer, dict(inputs))
    assert loss == expected
    tiny.assert_same_gradients(gradients, expected_gradients, 0)


def test_a_trl_that_does_not_use_the_step_makes_no_update(make, monkeypatch):
    """Which takes the ratio from old log-probabilities without gradient."""
    compute_loss = GRPOTrainer._compute_loss

    def of_detached(self: Any, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return compute_loss(self, model, inputs | {"old_per_token_logps": inputs["old_per_token_logps"].detach()})

    trainer = make(kl_bound=0.01, max_steps=4)
    before = tiny.parameters(trainer.model)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", of_detached)
    with pytest.raises(RuntimeError, match="loss did not use the ratio of the trust region"):
        trainer.train()
    assert not tiny.changed(before, trainer.model)


def test_kl_in_the_reward_is_not_in_the_loss(make):
    """What it makes of the rewards: test_conversations."""
    trainer = make(advantage_estimator="rloo", beta=0.3, kl_in_reward=True)
    inputs = dict(rollout(trainer)[0])
    loss, _ = loss_and_gradients(trainer, inputs)
    assert trainer.args.beta == 0.3 and trainer.beta == 0.0
    inputs["ref_per_token_logps"] = inputs["ref_per_token_logps"] - 1
    assert loss_and_gradients(trainer, inputs)[0] == loss


class Packing:
    """The method of a layer of vLLM that computes with a packed copy of its weights."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.cpu_linear = layer.weight.clone()


class Worker:
    """A worker of vLLM on a CPU: a linear layer that keeps no parameter, and a head that shares the embedding's."""

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.model: Any = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in ("inner", "head")})
        layers: Any = self.model.values()
        for layer in layers:
            layer.quant_method = Packing()
            layer.quant_method.process_weights_after_loading(layer)
        self.model["inner"].weight = torch.nn.Parameter(torch.empty(0))

    def reload_weights(self, weights_iterator: Any) -> None:
        self.loaded = dict(weights_iterator)
        self.model["head"].weight.data.copy_(self.loaded["head.weight"])

    def get_model(self) -> Any:
        return self.model


@pytest.mark.parametrize(("mode", "device"), [("colocate", "cpu"), ("colocate", "cuda"), ("server", "cpu")])
def test_an_engine_on_a_cpu_loads_and_packs_whole_weights(mode, device):
    worker, weight = Worker(), torch.ones(2, 2)

    def merged():  # as PEFT's adapters are, while TRL reads the weights
        yield "head.weight", weight
        weight.zero_()

    config = SimpleNamespace(device_config=SimpleNamespace(device_type=device))
    llm = mock.Mock(llm_engine=SimpleNamespace(vllm_config=config))
    llm.collective_rpc = lambda method, args: method(worker, *args)
    generation = mock.Mock(mode=mode, llm=llm, _iter_named_params=merged)
    trls_own = generation.sync_weights
    load_whole_weights(generation)
    if (mode, device) != ("colocate", "cpu"):
        assert generation.sync_weights is trls_own
        return
    generation.sync_weights()
    assert torch.equal(worker.loaded["head.weight"], torch.ones(2, 2)), "a copy, from before it was changed"
    assert torch.equal(worker.model["head"].cpu_linear, torch.ones(2, 2))
    llm.reset_prefix_cache.assert_called_once()
