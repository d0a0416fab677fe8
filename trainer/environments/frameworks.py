"""The frameworks whose environments can be trained on, and what `environment: FRAMEWORK:NAME` means in a run file."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from pydantic import ValidationError

from trainer.environments.settings import (
    EpisodeSettings,
    GymnasiumSettings,
    OpenEnvSettings,
    RunnerSettings,
    TextArenaSettings,
)
from trainer.verifiers.settings import VerifiersSettings

FrameworkSettings = EpisodeSettings | RunnerSettings
FRAMEWORKS: Mapping[str, type[FrameworkSettings]] = {
    kind.framework: kind for kind in (GymnasiumSettings, TextArenaSettings, OpenEnvSettings, VerifiersSettings)
}
"""Each by its name in a run file."""
FORMS = "gymnasium:NAME, textarena:NAME, openenv:URL or verifiers:PACKAGE"


def use_environment(values: dict[str, Any], fields: Container[str]) -> dict[str, Any]:
    """A run file's values with the environment's settings, tasks, reward and limits, where it says nothing else."""
    values, framework = _read_name(values)
    if framework is None:
        return values
    given = values[framework]
    try:
        settings = given if isinstance(given, FRAMEWORKS[framework]) else FRAMEWORKS[framework].model_validate(given)
    except ValidationError:  # Reported with its place by the field of this framework.
        return {"data": framework, **values}
    result = {**values, framework: settings}
    for name, default in settings.defaults().items():
        own = result.get(name)
        if name in ("limits", "evaluation") and isinstance(own, Mapping):
            default = {**default, **own}
            result[name] = default
        elif name in fields:
            result.setdefault(name, default)
    return result


def _read_name(values: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The values with `environment: FRAMEWORK:NAME` under the framework's name, and that name, if there is one."""
    named = [name for name in FRAMEWORKS if values.get(name) is not None]
    text = values.get("environment")
    if text is not None:
        framework, _, name = text.partition(":") if isinstance(text, str) else ("", "", "")
        if framework not in FRAMEWORKS or not name:
            raise ValueError(f"`environment` should be {FORMS}")
        given = values.get(framework)
        if given is None or isinstance(given, Mapping):
            values = {**values, framework: {**(given or {}), "environment": name}}
        named = list(dict.fromkeys([*named, framework]))
    if len(named) > 1:
        names = " and ".join(f"`{name}`" for name in named)
        raise ValueError(f"{names} exclude each other: a run has one environment")
    return values, named[0] if named else None
