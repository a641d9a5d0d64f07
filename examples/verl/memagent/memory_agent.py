"""An agent loop of verl's that reads a document in chunks and overwrites a memory, as MemAgent (arXiv 2507.02259).

    python examples/verl/memagent/documents.py DATA
    python -m verl.trainer.main_ppo --config-dir examples/verl/cpu --config-name toy +troll=fsdp \
        data.train_files=DATA/train.parquet data.val_files=DATA/test.parquet actor_rollout_ref.model.path=DATA/model \
        actor_rollout_ref.rollout.agent.agent_loop_config_path=examples/verl/memagent/agent.yaml \
        actor_rollout_ref.rollout.agent.default_agent_loop=memory_agent

with this folder in `PYTHONPATH` and the environment that `examples/verl/cpu/verl_cpu/__init__.py` names. `agent.yaml`
has the agent's settings.

Here a document is a sum that is longer than those the toy model has seen, and the memory is the sum so far: of
"7 - 6 + 8 - 2 + 5 =" the model reads "7 - 6 + 8 =", writes 9 if it is right, then reads "9 - 2 + 5 =" and answers.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput


class MemoryAgent(AgentLoopBase):
    """Has one conversation for each chunk, in which the model sees nothing but its memory and the chunk.

    Each conversation is a row of the batch. verl has the last answer judged, gives its reward to all conversations of
    the sample, and their groups are compared by it; with `anchor=rollout` each row has the policies of its own tokens.

    Args:
        *args: Arguments of `AgentLoopBase`.
        chunk: Words of the document that are read at once.
        prompt: What the model is told, with `{memory}` and `{chunk}`.
        **kwargs: Arguments of `AgentLoopBase`.
    """

    def __init__(self, *args: Any, chunk: int, prompt: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._chunk, self._prompt = chunk, prompt

    async def run(self, sampling_params: dict[str, Any], **sample: Any) -> list[AgentLoopOutput]:
        """Reads the document of a sample, and returns its conversations, the one with the answer last.

        Args:
            sampling_params: verl's, for the engine.
            **sample: A row of the data. `raw_prompt` ends with the document, whose first word is the first memory.
        """
        memory, *words = sample["raw_prompt"][-1]["content"].removesuffix("=").split()
        conversations = []
        for start in range(0, len(words), self._chunk):
            chunk = " ".join(words[start : start + self._chunk])
            conversation = await self._ask(self._prompt.format(memory=memory, chunk=chunk), sampling_params)
            memory = self.tokenizer.decode(conversation.response_ids, skip_special_tokens=True).strip()
            conversations.append(conversation)
        return conversations

    async def _ask(self, text: str, sampling_params: dict[str, Any]) -> AgentLoopOutput:
        messages = [{"role": "user", "content": text}]
        prompt_ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        answer = await self.server_manager.generate(
            request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=answer.token_ids,
            response_mask=[1] * len(answer.token_ids),
            response_logprobs=answer.log_probs,
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={**answer.extra_fields, "turn_scores": [], "tool_rewards": []},
        )
