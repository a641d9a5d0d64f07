"""The server that reports its own distributions, on an engine with vLLM's calls, and on what a real vLLM reported."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from verl.workers.rollout.replica import TokenOutput

from tests.troll.verl.vllm_engine import AsyncLLM, EngineCoreOutput, LogprobsLists, OutputProcessor, SamplingParams
from tests.vllm.recorded import MASS_THRESHOLD, PROMPTS, TOP_K, VOCAB_SIZE, Record, check_policy, records
from troll import PackedPolicy, capture
from troll.verl import old_policy_record
from troll.verl.old_policies import OLD_POLICIES
from troll.verl.records import from_records
from troll.verl.seam.vllm import TopLogProbs
from troll.verl.vllm_rollout import reporting

V, K = 50, 8
TOKENS = [3, 49, 7]


def distributions() -> torch.Tensor:
    return torch.log_softmax(3 * torch.randn(len(TOKENS), V, generator=torch.Generator().manual_seed(0)), -1)


def engine(step: int = 1) -> AsyncLLM:
    return AsyncLLM(TOKENS, distributions().numpy(), step)


class Server:
    """What of verl's vLLMHttpServer the reporting one stands on: `generate`, and where it sets its engine."""

    def __init__(self, engine: Any, custom: dict[str, Any], **truncation: Any) -> None:
        self.config = SimpleNamespace(custom=custom, **{"top_p": 1.0, "top_k": -1, "temperature": 1.0} | truncation)
        text = SimpleNamespace(vocab_size=V)
        self.model_config = SimpleNamespace(hf_config=SimpleNamespace(get_text_config=lambda: text))
        self.engine = engine

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        engine_kwargs["seed"] = 0

    async def generate(
        self, prompt_ids: Any, sampling_params: dict[str, Any], request_id: str, **inputs: Any
    ) -> TokenOutput:
        params = SamplingParams(
            logprobs=0 if sampling_params.pop("logprobs", False) else None, stop=sampling_params.pop("stop", [])
        )
        final: Any = None
        async for output in self.engine.generate(prompt=prompt_ids, sampling_params=params, request_id=request_id):
            final = output
            if request_id == "fails":
                raise ConnectionError("the engine died")
        if request_id == "aborted":
            return TokenOutput(token_ids=[], stop_reason="aborted")
        ids = final.outputs[0].token_ids
        log_probs = None
        if params.logprobs is not None:
            log_probs = [logprobs[ids[i]].logprob for i, logprobs in enumerate(final.outputs[0].logprobs)]
        ids = [0, *ids[1:]] if request_id == "changed" else ids
        return TokenOutput(token_ids=ids, log_probs=log_probs, extra_fields={"global_steps": 4})


def outputs(engine: Any, **sampling: Any) -> list[Any]:
    async def run() -> list[Any]:
        params = SamplingParams(**sampling)
        return [x async for x in engine.generate(prompt=[1], sampling_params=params, request_id="a")]

    return asyncio.run(run())


def server(step: int = 1, number: int = K, **truncation: Any) -> Any:
    settings = {"anchor": "rollout", "top_k": number, "mass_threshold": 1e-3}
    return reporting(Server)(engine(step), {"trust_region": settings}, **truncation)


def generate(server: Any, request_id: str = "a", **sampling: Any) -> TokenOutput:
    configured = {name: getattr(server.config, name) for name in ("top_p", "top_k", "temperature")}
    sampling = {"logprobs": True, **configured, **sampling}
    return asyncio.run(server.generate(prompt_ids=[1, 2], sampling_params=sampling, request_id=request_id))


def policy_of(output: TokenOutput) -> PackedPolicy:
    return from_records([output.extra_fields[OLD_POLICIES]])


@pytest.mark.parametrize("step", [1, 2], ids=["one token a step", "two, as with speculative decoding"])
def test_completion_has_the_policies_it_was_sampled_from(step: int) -> None:
    plain, output = generate(Server(engine(), {})), generate(server(step))
    policy = policy_of(output).unpack()
    expected = capture(distributions(), torch.tensor(TOKENS), top_k=K, mass_threshold=1e-3)
    assert torch.equal(policy.token_ids, expected.token_ids) and torch.equal(policy.slot, expected.slot)
    torch.testing.assert_close(policy.outcomes.exp(), expected.outcomes.exp(), rtol=1e-5, atol=1e-6)
    assert (policy.vocab_size, policy.mass_threshold, policy.temperature) == (V, 1e-3, 1.0)
    # The rest is verl's own.
    assert (output.token_ids, output.log_probs) == (plain.token_ids, plain.log_probs)
    assert output.extra_fields["global_steps"] == 4


def test_no_more_than_the_vocabulary_is_asked_for() -> None:
    assert policy_of(generate(server(number=V + 1))).unpack().token_ids.shape == (len(TOKENS), V)


def test_fewer_log_probs_than_asked_for_are_refused() -> None:
    capped = server()
    process = capped.engine.output_processor.process_outputs

    def cut(messages: Any) -> None:
        for message in messages:
            message.new_logprobs = LogprobsLists(
                *(part[:, :5] for part in message.new_logprobs[:2]), *message.new_logprobs[2:]
            )
        process(messages)

    capped.engine.output_processor.process_outputs = cut
    with pytest.raises(RuntimeError, match=f"asked for {K} log-probabilities a token, and it reported 4"):
        generate(capped)


@pytest.mark.parametrize("sampling", [{"top_k": -1}, {"top_p": 0.5}, {"temperature": 0.0}])
def test_validation_may_sample_in_another_way(sampling: dict[str, Any]) -> None:
    policy = policy_of(generate(server(top_k=5), **sampling))
    assert not policy.truncated and policy.temperature == sampling.get("temperature", 1.0)
    with pytest.raises(ValueError, match="all tokens that a truncated rollout could sample"):
        generate(server(top_k=5))  # the engine keeps more


def test_frontend_makes_one_object_a_token_and_no_text() -> None:
    reporting_server = server()
    rows = outputs(reporting_server.engine, logprobs=0)[-1].outputs[0].logprobs
    assert [list(row) for row in rows] == [[token] for token in TOKENS]
    assert all(row[token].decoded_token is None for row, token in zip(rows, TOKENS, strict=True))
    ids, log_probs = reporting_server.engine.taken("a")
    assert ids.shape == log_probs.shape == (len(TOKENS), 1 + K) and log_probs.dtype == torch.float32


def test_engine_is_asked_for_top_k_and_forgets_requests() -> None:
    reporting_server = server()
    generate(reporting_server)
    assert OLD_POLICIES not in generate(reporting_server, "aborted").extra_fields
    with pytest.raises(ConnectionError):
        generate(reporting_server, "fails")
    generate(reporting_server, "b", stop=["</answer>"])
    asked = reporting_server.engine.asked  # an attribute of the engine's
    assert [params.logprobs for params in asked] == [K] * 4
    assert [params.detokenize for params in asked] == [False, False, False, True]
    assert not reporting_server.engine._arrays


def test_arrays_of_the_engines_messages_are_not_kept() -> None:
    """vLLM's are views of a message that may be used again."""
    taking = TopLogProbs(engine(), K)
    processor = taking.output_processor
    seen: list[np.ndarray] = []
    process = processor.process_outputs

    def remember(messages: Any) -> None:
        seen.extend(message.new_logprobs.logprobs for message in messages)
        process(messages)

    processor.process_outputs = remember
    outputs(taking, logprobs=0)
    before = distributions()[torch.arange(len(TOKENS)), TOKENS]
    assert len(seen) == len(TOKENS)
    for array in seen:
        array.fill(0)
    reported = taking.taken("a")
    assert reported is not None
    torch.testing.assert_close(reported[1][:, 0], before)


@pytest.mark.parametrize(("given", "expected"), [({}, K), ({"max_logprobs": 100}, 100)])
def test_engine_is_allowed_as_many_as_it_is_asked_for(given: dict[str, Any], expected: int) -> None:
    arguments = dict(given)
    server()._preprocess_engine_kwargs(arguments)
    assert arguments == {"max_logprobs": expected, "seed": 0}


@pytest.mark.parametrize(
    ("request_id", "sampling", "message"),
    [
        ("a", {"logprobs": False}, "calculate_log_probs=True"),
        ("changed", {}, "not the 3 of its completion"),
    ],
)
def test_log_probs_of_another_completion_are_refused(request_id: str, sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        generate(server(), request_id, **sampling)


def test_engine_that_was_not_asked_is_left_alone() -> None:
    taking = TopLogProbs(engine(), K)
    assert all(output.outputs[0].logprobs is None for output in outputs(taking))
    assert taking.name == "vllm" and taking.taken("a") is None


def test_engine_that_is_not_vllms_is_refused_at_the_start() -> None:
    with pytest.raises(RuntimeError, match=r"SimpleNamespace has no output_processor"):
        TopLogProbs(SimpleNamespace(), K)


class Recorded:
    """An engine that sends the recorded arrays of a completion again, a message a token, as it was recorded."""

    def __init__(self, record: Record, number: int) -> None:
        self.output_processor = OutputProcessor()
        self._ids, self._log_probs = record.arrays[number]

    async def generate(self, *, sampling_params: SamplingParams, request_id: str, **_: Any) -> Any:
        state = self.output_processor.add_request(f"{request_id}-1f", request_id, sampling_params)
        for ids, log_probs in zip(self._ids, self._log_probs, strict=True):
            ranks = (log_probs[1:] > log_probs[:1]).sum(keepdims=True) + 1
            lists = LogprobsLists(ids[None], log_probs[None], ranks)
            self.output_processor.process_outputs([EngineCoreOutput(state.request_id, [int(ids[0])], lists)])
            yield state.output


@pytest.mark.parametrize("record", records(), ids=lambda record: record.sampling)
@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_recorded_arrays_make_the_policies_of_the_model(record: Record, number: int) -> None:
    engine = TopLogProbs(Recorded(record, number), TOP_K)
    ids = record.colocated[number].ids
    assert outputs(engine, logprobs=0)[-1].outputs[0].token_ids == ids
    reported = engine.taken("a")
    assert reported is not None and reported[0][:, 0].tolist() == ids
    settings: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "top_k": TOP_K, "mass_threshold": MASS_THRESHOLD}
    made = old_policy_record(*reported, **settings, truncated=record.sampling != "whole")
    check_policy(from_records([made]).unpack(), record, PROMPTS[number], ids)
