"""The frameworks whose environments can be trained on, and what `environment: FRAMEWORK:NAME` means in a run file."""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from gateway.plugins import find_all, find_missing, load_name
from mtrl_plugins.environments.settings import EnvironmentSettings

if TYPE_CHECKING:
    from trainer.rollout.settings import BaseRolloutSettings

EnvironmentName = str
"""An environment of another framework, as `gymnasium:NAME`, `textarena:NAME`, `openenv:URL` or `verifiers:PACKAGE`; it
brings its own tasks, tools and reward. More about it goes under the framework's name."""
FORMS = "gymnasium:NAME, textarena:NAME, openenv:URL or verifiers:PACKAGE"


@cache
def framework_settings() -> Mapping[str, type[EnvironmentSettings]]:
    """The settings of each framework, by its name in a run file."""
    return {name: load_name(target) for name, target in find_all(lambda plugin: plugin.environments).items()}


def find_environment(settings: BaseRolloutSettings) -> EnvironmentSettings | None:
    """The environment that a run is on, if it is on one."""
    return next((part for part in settings.parts if isinstance(part, EnvironmentSettings)), None)


def use_environment(values: dict[str, Any], fields: Container[str]) -> dict[str, Any]:
    """A run file's values with the environment's settings, tasks, reward and limits, where it says nothing else."""
    values, framework = _read_name(values)
    if framework is None:
        return values
    given = values[framework]
    try:
        kind = framework_settings()[framework]
        settings = given if isinstance(given, kind) else kind.model_validate(given)
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
    known = framework_settings()
    named = [name for name in known if values.get(name) is not None]
    text = values.get("environment")
    if text is not None:
        framework, _, name = text.partition(":") if isinstance(text, str) else ("", "", "")
        if plugin := find_missing(framework):
            raise ValueError(f"`environment: {framework}:...` needs the plug-in `{plugin}`, which is not installed")
        if framework not in known or not name:
            raise ValueError(f"`environment` should be {FORMS}")
        given = values.get(framework)
        if given is None or isinstance(given, Mapping):
            values = {**values, framework: {**(given or {}), "environment": name}}
        named = list(dict.fromkeys([*named, framework]))
    if len(named) > 1:
        names = " and ".join(f"`{name}`" for name in named)
        raise ValueError(f"{names} exclude each other: a run has one environment")
    return values, named[0] if named else None
