"""The server that reports its own distributions, on an engine with vLLM's calls. vLLM itself is not run."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verl.workers.rollout.replica import RolloutReplicaRegistry, TokenOutput

from troll import capture
from troll.trust_region.policy.wire import from_records
from troll.verl.old_policies import OLD_POLICIES
from troll.verl.vllm_rollout import TopLogProbs, old_policy_record, reporting

V, K = 50, 8
TOKENS = [3, 49, 7]


def distributions(seed: int = 0) -> torch.Tensor:
    return torch.log_softmax(3 * torch.randn(len(TOKENS), V, generator=torch.Generator().manual_seed(seed)), -1)


def entries(log_probs: torch.Tensor, number: int) -> list[dict[int, float]]:
    """The `number` most likely tokens of each row and the sampled one, in vLLM's order: the sampled one first."""
    found = []
    for row, token in zip(log_probs, TOKENS, strict=True):
        ids = [token, *(int(i) for i in row.topk(number).indices if i != token)]
        found.append({i: row[i].item() for i in ids})
    return found


class Engine:
    """As AsyncLLM: yields the completion token by token, with as many log-probabilities as it is asked for."""

    name = "vllm"

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def generate(self, *, prompt: Any, sampling_params: Any, request_id: str, **_: Any) -> Any:
        self.asked.append(sampling_params.logprobs)
        number = sampling_params.logprobs
        reported = None
        if number is not None:
            reported = [
                {token: SimpleNamespace(logprob=value) for token, value in row.items()}
                for row in entries(distributions(), number)
            ]
        for end in range(1, len(TOKENS) + 1):
            part = None if reported is None else reported[:end]
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=TOKENS[:end], logprobs=part)])


class Server:
    """What of verl's vLLMHttpServer the reporting one stands on: `generate`, and where it sets its engine."""

    def __init__(self, engine: Any, custom: dict[str, Any]) -> None:
        self.config = SimpleNamespace(custom=custom)
        text = SimpleNamespace(vocab_size=V)
        self.model_config = SimpleNamespace(hf_config=SimpleNamespace(get_text_config=lambda: text))
        self.engine = engine

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        engine_kwargs["seed"] = 0

    async def generate(
        self, prompt_ids: Any, sampling_params: dict[str, Any], request_id: str, **inputs: Any
    ) -> TokenOutput:
        params = SimpleNamespace(logprobs=0 if sampling_params.pop("logprobs", False) else None)
        final: Any = None
        async for output in self.engine.generate(prompt=prompt_ids, sampling_params=params, request_id=request_id):
            final = output
        if request_id == "aborted":
            return TokenOutput(token_ids=[], stop_reason="aborted")
        ids = final.outputs[0].token_ids
        log_probs = None
        if params.logprobs is not None:
            log_probs = [row[token].logprob for row, token in zip(final.outputs[0].logprobs, ids, strict=True)]
        return TokenOutput(token_ids=ids, log_probs=log_probs, extra_fields={"global_steps": 4})


def server() -> Any:
    settings = {"anchor": "rollout", "top_k": K, "mass_threshold": 1e-3}
    return reporting(Server)(Engine(), {"trust_region": settings})


def generate(server: Any, request_id: str = "a", *, logprobs: bool = True) -> TokenOutput:
    return asyncio.run(
        server.generate(prompt_ids=[1, 2], sampling_params={"logprobs": logprobs}, request_id=request_id)
    )


def test_the_record_is_the_policy_that_was_sampled_from() -> None:
    output = generate(server())
    policy = from_records([output.extra_fields[OLD_POLICIES]]).unpack()
    expected = capture(distributions(), torch.tensor(TOKENS), top_k=K, mass_threshold=1e-3)
    assert torch.equal(policy.token_ids, expected.token_ids) and torch.equal(policy.slot, expected.slot)
    torch.testing.assert_close(policy.log_probs.exp(), expected.log_probs.exp(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(policy.tail_log_prob.exp(), expected.tail_log_prob.exp(), rtol=1e-5, atol=1e-6)
    assert (policy.vocab_size, policy.mass_threshold) == (V, 1e-3)


def test_what_verl_gets_is_unchanged() -> None:
    plain = asyncio.run(
        Server(Engine(), {}).generate(prompt_ids=[1, 2], sampling_params={"logprobs": True}, request_id="a")
    )
    output = generate(server())
    assert (output.token_ids, output.log_probs) == (plain.token_ids, plain.log_probs)
    assert output.extra_fields["global_steps"] == 4


def test_the_engine_is_asked_for_top_k_and_forgets_a_request() -> None:
    reporting_server = server()
    generate(reporting_server, "a")
    generate(reporting_server, "aborted")
    assert reporting_server.engine.asked == [K, K]  # an attribute of the engine itself
    assert reporting_server.engine.taken("a") is None
    assert reporting_server.engine.taken("aborted") is None


def test_the_engine_is_allowed_as_many_as_it_is_asked_for() -> None:
    for given, expected in (({}, K), ({"max_logprobs": 100}, 100)):
        arguments: dict[str, Any] = dict(given)
        server()._preprocess_engine_kwargs(arguments)
        assert arguments == {"max_logprobs": expected, "seed": 0}


def test_a_completion_without_log_probs_is_refused() -> None:
    with pytest.raises(RuntimeError, match="calculate_log_probs=True"):
        generate(server(), logprobs=False)


def test_an_aborted_completion_has_no_record() -> None:
    assert OLD_POLICIES not in generate(server(), "aborted").extra_fields


def test_an_engine_that_was_not_asked_is_left_alone() -> None:
    engine = TopLogProbs(Engine(), K)

    async def run() -> list[Any]:
        params = SimpleNamespace(logprobs=None)
        return [output async for output in engine.generate(prompt=[1], sampling_params=params, request_id="a")]

    assert all(output.outputs[0].logprobs is None for output in asyncio.run(run()))
    assert engine.name == "vllm"


def test_an_engine_need_not_report_the_sampled_token_among_the_most_likely() -> None:
    rows = entries(distributions(), K)
    own = [row[token] for row, token in zip(rows, TOKENS, strict=True)]
    settings: dict[str, Any] = {"vocab_size": V, "top_k": K, "mass_threshold": 1e-5}
    expected = old_policy_record(TOKENS, own, rows, **settings)
    without = [{i: value for i, value in row.items() if i != token} for row, token in zip(rows, TOKENS, strict=True)]
    assert torch.equal(old_policy_record(TOKENS, own, without, **settings), expected)


def test_a_token_without_a_report_is_refused() -> None:
    rows = entries(distributions(), K)
    with pytest.raises(ValueError, match="shorter"):
        old_policy_record(TOKENS, [-1.0] * 3, rows[:2], vocab_size=V, top_k=K, mass_threshold=1e-5)


def test_an_empty_completion_has_an_empty_record() -> None:
    record = old_policy_record([], [], [], vocab_size=V, top_k=K, mass_threshold=1e-5)
    assert from_records([record]).shape == (0,)


def test_the_replica_is_verls_own_by_name() -> None:
    with pytest.raises((ImportError, ValueError), match="vllm"):  # as verl, where vLLM is not installed
        RolloutReplicaRegistry.get("vllm")
