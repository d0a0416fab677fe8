"""One table says what stands in for ms-swift, by the names of releases 3 and 4; other names are refused with these."""

from __future__ import annotations

from collections.abc import Mapping

VERSION = "4.5"
_PROTOCOL = {
    name: f"trainer.swift.protocol:{name}"
    for name in (
        "ChatCompletionMessageToolCall",
        "ChatCompletionResponse",
        "ChatCompletionResponseChoice",
        "ChatMessage",
        "Function",
        "InferRequest",
        "RequestConfig",
        "RolloutInferRequest",
        "RolloutOutput",
        "RolloutResponseChoice",
        "UsageInfo",
    )
}
_MESSAGES = {"Messages": "trainer.swift.protocol:Messages"}
_REMOVE = {"remove_response": "trainer.swift.protocol:remove_response"}
_ENGINES = {
    name: f"trainer.swift.absent:{name}"
    for name in ("GRPOVllmEngine", "InferEngine", "PtEngine", "TransformersEngine", "VllmEngine")
}
_TEMPLATE = {"Template": "trainer.swift.absent:Template"}
_DEVICE = {"to_device": "trainer.swift.absent:to_device"}
_TURNS = {
    "MultiTurnScheduler": "trainer.swift.scheduler:MultiTurnScheduler",
    "RolloutScheduler": "trainer.swift.scheduler:RolloutScheduler",
    "multi_turns": "trainer.swift.gym:multi_turns",
}
_SCHEDULERS = {
    "GYMScheduler": "trainer.swift.gym:GYMScheduler",
    "MathTipsScheduler": "trainer.swift.tips:MathTipsScheduler",
    "ThinkingModelTipsScheduler": "trainer.swift.tips:ThinkingModelTipsScheduler",
}
_ENV = {"Env": "trainer.swift.gym:Env", "envs": "trainer.swift.gym:envs"}
_CONTEXT = {
    "ContextManager": "trainer.swift.gym:ContextManager",
    "context_managers": "trainer.swift.gym:context_managers",
}
_REWARDS = {name: f"trainer.swift.orm:{name}" for name in ("ORM", "AsyncORM", "orms")}
_SHIPPED = {
    name: f"trainer.swift.orm:{name}"
    for name in ("Format", "MathAccuracy", "ReActFormat", "RepetitionPenalty", "SoftOverlong")
}
_MODELS = {name: f"trainer.swift.absent:{name}" for name in ("rm_plugins", "prms", "PRM")}
_PLUGIN = {"rm_plugins": "trainer.swift.absent:rm_plugins", "DefaultRMPlugin": "trainer.swift.absent:DefaultRMPlugin"}
_PRM = {"prms": "trainer.swift.absent:prms", "PRM": "trainer.swift.absent:PRM"}
_LOGGER = {"get_logger": "trainer.swift.absent:get_logger"}

OFFERED: Mapping[str, Mapping[str, str]] = {
    "swift": {},
    "swift.utils": {**_LOGGER, **_REMOVE, **_DEVICE},
    "swift.utils.logger": _LOGGER,
    # Release 3.
    "swift.plugin": {**_REWARDS, **_MODELS, **_ENV, **_CONTEXT, "multi_turns": _TURNS["multi_turns"]},
    "swift.plugin.multi_turn": {**_TURNS, **_SCHEDULERS},
    "swift.plugin.orm": {**_REWARDS, **_SHIPPED},
    "swift.plugin.prm": _PRM,
    "swift.plugin.rm_plugin": _PLUGIN,
    "swift.plugin.env": _ENV,
    "swift.plugin.context_manager": _CONTEXT,
    "swift.llm": {**_PROTOCOL, **_ENGINES, **_TEMPLATE, **_DEVICE, **_MESSAGES},
    "swift.llm.infer": {**_PROTOCOL, **_ENGINES},
    "swift.llm.infer.protocol": _PROTOCOL,
    "swift.llm.infer.infer_engine": _ENGINES,
    "swift.llm.template": {**_TEMPLATE, "RolloutInferRequest": _PROTOCOL["RolloutInferRequest"]},
    "swift.llm.utils": {**_MESSAGES, **_DEVICE},
    # Release 4.
    "swift.rollout": {**_TURNS, **_ENV},
    "swift.rollout.multi_turn": {**_TURNS, **_SCHEDULERS},
    "swift.rollout.gym_env": {**_ENV, **_CONTEXT},
    "swift.rewards": {**_REWARDS, **_MODELS},
    "swift.rewards.orm": {**_REWARDS, **_SHIPPED},
    "swift.rewards.prm": _PRM,
    "swift.rewards.rm_plugin": _PLUGIN,
    "swift.infer_engine": {**_PROTOCOL, **_ENGINES},
    "swift.infer_engine.protocol": _PROTOCOL,
    "swift.template": {**_TEMPLATE, **_MESSAGES},
}
"""Module -> name -> the object of ours behind it."""

INSTEAD: Mapping[str, str] = {
    "swift.plugin.loss_scale": "which tokens are learned from is the setting `algorithm.credit.rounds`",
    "swift.loss_scale": "which tokens are learned from is the setting `algorithm.credit.rounds`",
    "swift.plugin.loss": "a loss is an algorithm here: the setting `algorithm.name`",
    "swift.loss": "a loss is an algorithm here: the setting `algorithm.name`",
    "swift.plugin.agent_template": "how a model writes calls is the setting `template.parser`",
    "swift.trainers": "mtrl trains; what a scheduler needs is its `infer_engine`",
    "swift.tuners": "adapters are the setting `update.lora`",
    "swift.llm.dataset": "rows come from a file: the setting `data`",
    "swift.dataset": "rows come from a file: the setting `data`",
}
"""What ms-swift has and mtrl does otherwise; the longest name that fits speaks."""


def refusal(name: str) -> str:
    """What whoever asked for the name is told."""
    module = name if name in OFFERED else name.rpartition(".")[0]
    here = ", ".join(OFFERED.get(module, {})) or ", ".join(one for one, names in OFFERED.items() if names)
    fits = [known for known in INSTEAD if f"{name}.".startswith(f"{known}.")]
    instead = f"; instead: {INSTEAD[max(fits, key=len)]}" if fits else ""
    return f"ms-swift is not installed, and {name} is not among what mtrl offers in its place{instead}; offered: {here}"
