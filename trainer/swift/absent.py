"""What plug-in files import beside what they need: it is there to be named and derived from, and says why it cannot be
used."""

from __future__ import annotations

import logging
from typing import Any, NoReturn


class _Absent:
    remedy = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} is not here: {self.remedy}")


class Template(_Absent):
    remedy = "the model's own chat template speaks; see the setting `template`"


class TransformersEngine(_Absent):
    remedy = "ask another model over HTTP, in a reward function of yours"


PtEngine = VllmEngine = InferEngine = GRPOVllmEngine = TransformersEngine


class DefaultRMPlugin(_Absent):
    remedy = "ask a reward model over HTTP, in a reward function of yours"


class PRM(_Absent):
    remedy = "score turns with tools or an interaction, and set `algorithm.credit`"


rm_plugins: dict[str, Any] = {}
prms: dict[str, Any] = {}


def to_device(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(f"to_device is not here: {DefaultRMPlugin.remedy}")


def get_logger(name: str = "swift", *args: Any, **kwargs: Any) -> logging.Logger:
    return logging.getLogger(name or "swift")
