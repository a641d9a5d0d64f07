"""A rollout of verl's, `rollout.name=transformers`: one server process for every worker.

Requests that wait are generated as one batch. Weights are sent whole after every update (verl's naive checkpoint
engine), and log-probabilities are those of the distribution that was sampled from, as verl's `processed_logprobs`. With
`policy_loss.anchor=rollout` a completion comes with its old policies.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from transformers import AutoModelForCausalLM, GenerationConfig
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from troll import PackedPolicy, capture
from verl_cpu import ROLLOUT

# How long a batch waits for more: requests come one by one, and many in one forward pass cost little more than one.
_GATHERING_SECONDS = 0.02


@dataclass(eq=False)
class _Request:
    prompt_ids: list[int]
    sampling_params: dict[str, Any]
    answer: asyncio.Future[TokenOutput]


class TransformersServer:
    """The process that generates, an asynchronous Ray actor.

    Args:
        config: verl's settings of the rollout, of which `dtype`, `seed`, `response_length`, `max_num_seqs` and `custom`
            are read.
        model_config: verl's settings of the model. Its weights come with the first `update_weights`.
        replica_rank: Number of this server.
    """

    def __init__(self, config: RolloutConfig, model_config: Any, replica_rank: int):
        self._config = config
        hf_config = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig).hf_config
        self._model = AutoModelForCausalLM.from_config(hf_config, dtype=getattr(torch, config.dtype)).eval()
        self._waiting: list[_Request] = []
        self._serving: asyncio.Task[None] | None = None
        self._global_steps: int | None = None
        self._trust_region = (config.custom or {}).get("trust_region", {})
        torch.manual_seed(config.seed + replica_rank)

    async def update_weights(self, weights: dict[str, torch.Tensor], global_steps: int | None) -> None:
        """Replaces all weights; `global_steps` is the update that they are of."""
        self._model.load_state_dict(weights)
        self._global_steps = global_steps

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **inputs: Any
    ) -> TokenOutput:
        """Samples one completion.

        Args:
            prompt_ids: Token ids of the prompt.
            sampling_params: `temperature` (0 is greedy), `top_k` (-1 is all), `top_p` and `repetition_penalty`.
            request_id: Unused; part of the signature.
            **inputs: Images, audio and video, which this rollout does not take.

        Raises:
            ValueError: If there is an input that is not text.
        """
        if any(value is not None for value in inputs.values()):
            raise ValueError(f"the transformers rollout takes only text, got {', '.join(inputs)}")
        answer: asyncio.Future[TokenOutput] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(list(prompt_ids), sampling_params, answer))
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        return await answer

    def _sampling(self, params: dict[str, Any]) -> GenerationConfig:
        settings = self._model.config
        sampled = params["temperature"] > 0
        distribution = {
            "temperature": params["temperature"],
            "top_k": max(params["top_k"], 0),
            "top_p": params["top_p"],
        }
        return GenerationConfig(
            do_sample=sampled,
            **(distribution if sampled else {}),
            repetition_penalty=params["repetition_penalty"],
            max_new_tokens=self._config.response_length,
            eos_token_id=settings.eos_token_id,
            pad_token_id=settings.pad_token_id,
            return_dict_in_generate=True,
            output_scores=True,
        )

    async def _serve(self) -> None:
        while self._waiting:
            await asyncio.sleep(_GATHERING_SECONDS)
            params = self._waiting[0].sampling_params
            batch = [each for each in self._waiting if each.sampling_params == params][: self._config.max_num_seqs]
            self._waiting = [each for each in self._waiting if each not in batch]
            try:
                outputs = await asyncio.to_thread(self._generate, [each.prompt_ids for each in batch], params)
            except Exception as error:
                for request in batch:
                    request.answer.set_exception(error)
            else:
                for request, output in zip(batch, outputs, strict=True):
                    request.answer.set_result(output)

    @torch.no_grad()
    def _generate(self, prompts: list[list[int]], sampling_params: dict[str, Any]) -> list[TokenOutput]:
        sampling = self._sampling(sampling_params)
        length = max(map(len, prompts))
        padded = [[sampling.pad_token_id] * (length - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        output = self._model.generate(
            torch.tensor(padded), attention_mask=torch.tensor(mask), generation_config=sampling
        )
        completions = output.sequences[:, length:]
        scores = torch.stack(output.scores, dim=1).float().log_softmax(-1)
        log_probs = scores.gather(-1, completions[..., None]).squeeze(-1)
        ends = (completions == sampling.eos_token_id).long()
        lengths = (ends.cumsum(1) == ends).sum(1).tolist()  # up to the first end, and with it
        return [
            TokenOutput(
                token_ids=ids[:count],
                log_probs=values[:count],
                stop_reason="completed",
                extra_fields={"global_steps": self._global_steps} | self._old_policies(ids[:count], rows[:count]),
            )
            for ids, values, rows, count in zip(completions.tolist(), log_probs.tolist(), scores, lengths, strict=True)
        ]

    def _old_policies(self, token_ids: list[int], log_probs: torch.Tensor) -> dict[str, torch.Tensor]:
        """The record of a completion's old policies, of (T, V) log-probabilities; empty unless they are the anchor."""
        if self._trust_region.get("anchor") != "rollout":
            return {}
        # Not at the top: verl is still being imported there.
        from troll.verl.old_policies import OLD_POLICIES
        from troll.verl.records import to_record

        settings = {name: self._trust_region[name] for name in ("top_k", "mass_threshold")}
        policy = capture(log_probs, torch.tensor(token_ids), **settings)
        return {OLD_POLICIES: to_record(PackedPolicy.of(policy))}


class TransformersReplica(RolloutReplica):
    """Launches the server of one worker."""

    async def launch_servers(self) -> None:
        """Starts the server on its worker's machine."""
        if self.world_size != 1:
            raise ValueError("the transformers rollout takes actor_rollout_ref.rollout.tensor_model_parallel_size=1")
        node = await self.workers[0].__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        server = (
            ray.remote(TransformersServer)
            .options(
                name=_server_name(self.replica_rank),
                max_concurrency=self.max_concurrency,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            )
            .remote(self.config, self.model_config, self.replica_rank)
        )
        self.servers = [server]
        self._server_handle = server
        self._server_address = _server_name(self.replica_rank)

    async def sleep(self) -> None:
        """Does nothing: on a CPU, memory is not handed over."""

    async def wake_up(self) -> None:
        """Does nothing, see `sleep`."""


class TransformersRollout(BaseRollout):
    """A worker's side: hands its weights to its server."""

    async def resume(self, tags: list[str]) -> None:
        """Does nothing: the server has not released anything."""

    async def release(self) -> None:
        """Does nothing, see `resume`."""

    async def update_weights(
        self,
        weights: Iterator[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Sends all weights to the server.

        Raises:
            ValueError: If they are only a LoRA adapter's.
        """
        if peft_config is not None or wire_format != "named_tensors":
            raise ValueError(
                "the transformers rollout takes whole weights: set +actor_rollout_ref.model.lora.merge=true"
            )
        server = ray.get_actor(_server_name(int(os.environ["RANK"])))
        await server.update_weights.remote({name: weight.detach() for name, weight in weights}, global_steps)


def _server_name(replica_rank: int) -> str:
    return f"{ROLLOUT}_server_{replica_rank}"
