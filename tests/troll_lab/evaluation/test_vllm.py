"""A stand-in takes the place of vLLM, and keeps what it is asked."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from tests.troll.trl.tiny import adapted
from troll_lab.evaluation import vllm
from troll_lab.evaluation.config import EvaluationError
from troll_lab.evaluation.generate import Generation, Sampling
from troll_lab.evaluation.model import ModelSource


class Tokenizer:
    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return " ".join(map(str, ids))


#: The end-of-text token, with which vLLM's token ids end.
END = 0


class LLM:
    made: dict[str, Any]

    def __init__(self, **settings: Any) -> None:
        LLM.made = settings

    def generate(self, prompts: Any, sampling_params: Any, *, use_tqdm: bool, lora_request: Any) -> list[Any]:
        assert not use_tqdm
        LLM.made |= {"sampling_params": sampling_params, "lora_request": lora_request}
        return [
            SimpleNamespace(outputs=[self.completion(prompt["prompt_token_ids"], parameters)])
            for prompt, parameters in zip(prompts, sampling_params, strict=True)
        ]

    def completion(self, ids: list[int], parameters: Any) -> Any:
        reason = "length" if parameters.seed == parameters.max_tokens else "stop"
        return SimpleNamespace(token_ids=ids * parameters.seed + [END], finish_reason=reason)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.lora", "vllm.lora.request")}
    vars(modules["vllm"]).update(LLM=LLM, SamplingParams=SimpleNamespace)
    vars(modules["vllm.lora.request"]).update(LoRARequest=lambda *arguments: arguments)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def engine_of(source: ModelSource, sampling: Sampling, **settings: Any) -> vllm.VllmGenerator:
    return vllm.VllmGenerator(source, Tokenizer(), sampling, **{"dtype": "auto", "context": 300, **settings})


@pytest.mark.usefixtures("installed")
def test_each_completion_is_a_request_with_its_own_seed() -> None:
    sampling = Sampling(temperature=0.6, top_p=0.95, top_k=20, max_new_tokens=4)
    name = "some/model"
    source = ModelSource(name, name, name, None, None, "", revision="v2", trust_remote_code=True)
    assert engine_of(source, sampling, dtype="bfloat16").generate([[1, 2], [1, 2], [3]], [2, 3, 4]) == [
        Generation("1 2 1 2", 5, True),
        Generation("1 2 1 2 1 2", 7, True),
        Generation("3 3 3 3 0", 5, False),
    ]
    asked = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 4, "detokenize": False}
    assert LLM.made.pop("sampling_params") == [SimpleNamespace(**asked, seed=seed) for seed in (2, 3, 4)]
    settings = {"model": name, "dtype": "bfloat16", "max_model_len": 300, "revision": "v2", "trust_remote_code": True}
    assert LLM.made == settings | {"lora_request": None}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("rank", "supported"), [(32, 32), (4, 8), (129, 256), (512, 512)])
def test_adapter_is_applied_by_the_engine(rank: int, supported: int) -> None:
    engine_of(ModelSource("folder", "folder", "base", rank, None, ""), Sampling(0.0, 1.0, 0, 4)).generate([[1]], [1])
    assert (LLM.made["model"], LLM.made["enable_lora"], LLM.made["max_lora_rank"]) == ("base", True, supported)
    assert LLM.made["lora_request"] == ("adapter", 1, "folder")


@pytest.mark.usefixtures("installed")
def test_adapter_of_a_larger_rank_is_refused() -> None:
    with pytest.raises(EvaluationError, match="up to rank 512, got 513: use --backend transformers"):
        engine_of(ModelSource("folder", "folder", "base", 513, None, ""), Sampling(0.0, 1.0, 0, 4))


@pytest.mark.parametrize(("package", "gpu"), [(True, True), (True, False), (False, True)])
def test_vllm_is_usable_with_its_package_and_a_gpu(monkeypatch: pytest.MonkeyPatch, package: bool, gpu: bool) -> None:
    monkeypatch.setattr(vllm, "find_spec", lambda name: object() if package else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert vllm.vllm_is_usable() == (package and gpu)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, None),
        ({"use_rslora": True, "target_modules": "all-linear"}, None),
        ({"use_dora": True}, "it was trained with use_dora"),
        ({"alpha_pattern": {"q_proj": 2}}, "it was trained with alpha_pattern"),
        ({"rank_pattern": {"q_proj": 2}}, "it was trained with rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "it was trained with modules_to_save"),
        ({"trainable_token_indices": [4]}, "it was trained with trainable_token_indices"),
        ({"layer_replication": [(0, 1), (0, 1)]}, "it was trained with layer_replication"),
        ({"target_modules": ["lm_head"]}, "it changes more than linear layers: lm_head"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "it changes more than linear layers: model.embed_tokens"),
        ({"lora_bias": True}, "it changes more than linear layers: model.layers.0.self_attn.q_proj.lora_B.bias"),
    ],
    ids=str,
)
def test_adapter_problem_names_what_vllm_does_not_read(tiny_model, tmp_path, settings, problem):
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    config = LoraConfig(r=4, task_type="CAUSAL_LM", **{"target_modules": ["q_proj"], **settings})
    adapted(base, config).save_pretrained(str(tmp_path))
    found = vllm.adapter_problem(str(tmp_path))
    assert (found is None) == (problem is None)
    assert problem is None or str(found).startswith(problem)
