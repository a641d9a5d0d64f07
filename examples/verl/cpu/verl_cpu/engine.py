"""verl's own FSDP engines, registered for the CPU."""

from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")(FSDPEngineWithLMHead)
EngineRegistry.register(model_type="value_model", backend="fsdp2", device="cpu")(FSDPEngineWithValueHead)
