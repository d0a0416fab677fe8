"""ms-swift's import names (releases 3 and 4) and the objects behind them, for plug-in files without ms-swift installed.

Other names are refused with an explanation. Some classes exist only to be imported and derived from.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NoReturn

from gateway.import_hook import StandInFinder


class _Unavailable:
    remedy = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} is not available: {self.remedy}")


class Template(_Unavailable):
    """Stands for ms-swift's templates."""

    remedy = "the model's own chat template is used; see the setting `template`"


class TransformersEngine(_Unavailable):
    """Stands for ms-swift's inference engines."""

    remedy = "call another model over HTTP in your own reward function"


PtEngine = VllmEngine = InferEngine = GRPOVllmEngine = TransformersEngine


class DefaultRMPlugin(_Unavailable):
    """Stands for ms-swift's reward model plug-ins."""

    remedy = "call a reward model over HTTP in your own reward function"


class PRM(_Unavailable):
    """Stands for ms-swift's process reward models."""

    remedy = "score turns with tools or an interaction, and set `algorithm.credit`"


rm_plugins: dict[str, Any] = {}
prms: dict[str, Any] = {}


def to_device(*args: Any, **kwargs: Any) -> NoReturn:
    """Stands for ms-swift's function of this name."""
    raise NotImplementedError(f"to_device is not available: {DefaultRMPlugin.remedy}")


def get_logger(name: str = "swift", *args: Any, **kwargs: Any) -> logging.Logger:
    """A logger by name."""
    return logging.getLogger(name or "swift")


VERSION = "4.5"


def _names(module: str, *names: str) -> dict[str, str]:
    return {name: f"mtrl_plugins.swift.{module}:{name}" for name in names}


_PROTOCOL = _names(
    "protocol", "ChatCompletionMessageToolCall", "ChatCompletionResponse", "ChatCompletionResponseChoice",
    "ChatMessage", "Function", "InferRequest", "RequestConfig", "RolloutInferRequest", "RolloutOutput",
    "RolloutResponseChoice", "UsageInfo",
)  # fmt: skip
_MESSAGES, _REMOVE = _names("protocol", "Messages"), _names("protocol", "remove_response")
_ENGINES = _names("compat_names", "GRPOVllmEngine", "InferEngine", "PtEngine", "TransformersEngine", "VllmEngine")
_TEMPLATE, _DEVICE = _names("compat_names", "Template"), _names("compat_names", "to_device")
_LOGGER, _PRM = _names("compat_names", "get_logger"), _names("compat_names", "prms", "PRM")
_PLUGIN = _names("compat_names", "rm_plugins", "DefaultRMPlugin")
_MODELS = _names("compat_names", "rm_plugins", "prms", "PRM")
_TURNS = _names("schedulers", "MultiTurnScheduler", "RolloutScheduler", "multi_turns")
_SCHEDULERS = _names("schedulers", "GYMScheduler")
_ENV, _CONTEXT = _names("schedulers", "Env", "envs"), _names("schedulers", "ContextManager", "context_managers")
_REWARDS = _names("orm", "ORM", "AsyncORM", "orms")
_SHIPPED = _names("orm", "Format", "MathAccuracy", "ReActFormat", "RepetitionPenalty", "SoftOverlong")

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
    "swift.rollout.multi_turn": {**_TURNS, **_SCHEDULERS, **_MESSAGES},
    "swift.rollout.gym_env": {**_ENV, **_CONTEXT},
    "swift.rewards": {**_REWARDS, **_MODELS},
    "swift.rewards.orm": {**_REWARDS, **_SHIPPED},
    "swift.rewards.prm": _PRM,
    "swift.rewards.rm_plugin": _PLUGIN,
    "swift.infer_engine": {**_PROTOCOL, **_ENGINES},
    "swift.infer_engine.protocol": _PROTOCOL,
    "swift.template": {**_TEMPLATE, **_MESSAGES},
}
"""Module of ms-swift -> name -> mtrl's object as `module:name`."""

ALTERNATIVES: Mapping[str, str] = {
    "swift.rollout.openenv_wrapper": "the setting `environment: openenv:URL`",
    "swift.rollout.multi_turn.OpenEnvScheduler": "the setting `environment: openenv:URL`",
    "swift.plugin.loss_scale": "the setting `algorithm.credit.trained_turns` chooses the tokens to train",
    "swift.loss_scale": "the setting `algorithm.credit.trained_turns` chooses the tokens to train",
    "swift.plugin.loss": "the setting `algorithm.name` chooses the loss",
    "swift.loss": "the setting `algorithm.name` chooses the loss",
    "swift.plugin.agent_template": "the setting `template.parser` chooses the format of calls",
    "swift.trainers": "mtrl is the trainer; a scheduler needs only its `infer_engine`",
    "swift.tuners": "the setting `update.lora` configures adapters",
    "swift.llm.dataset": "the setting `data` names a file with the rows",
    "swift.dataset": "the setting `data` names a file with the rows",
}
"""Modules of ms-swift that mtrl does not offer, with the alternative; the longest matching name counts."""

FINDER = StandInFinder("ms-swift", OFFERED, ALTERNATIVES, VERSION)
