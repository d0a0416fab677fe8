"""Describes the environment of a run, for `check` and `--dry-run`: an episode or a rollout is begun and ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.errors import GatewayError
from gateway.session import AnyGateway
from gateway.types import Outcome, Task
from mtrl_plugins.environments.episode_stepper import LOOP
from mtrl_plugins.environments.episode_toolset import reset_call
from mtrl_plugins.environments.host_process import find_host, host_key
from mtrl_plugins.environments.settings import EnvironmentSettings, EpisodeSettings

SHOWN = 300
"""Characters of the first observation that are shown."""


async def describe_environment(settings: EnvironmentSettings, gateway: AnyGateway) -> str:
    """What the environment is, and what it says first. Raises GatewayError if no episode can be begun."""
    tools = ", ".join(spec.name for spec in gateway.specs if spec.audience == "policy")
    host = find_host(host_key(settings))
    about: Mapping[str, Any] = host.about if host is not None else {}
    release = f" ({about['framework']})" if "framework" in about else ""
    if not isinstance(settings, EpisodeSettings):
        return f"{settings.name}{release} offers {tools or 'no tools'}"
    async with gateway.open(Task(settings.environment)) as session:
        result = await session.call(reset_call(settings.first_seed, {}), LOOP)
    if result.outcome is not Outcome.OK:
        raise GatewayError(result.reason or result.text)
    acts = f"actions by the tools {tools}" if settings.actions == "tool" else "each turn is an action"
    media = len(result.parts) - sum(hasattr(part, "text") for part in result.parts)
    seen = result.text if len(result.text) <= SHOWN else f"{result.text[:SHOWN]}..."
    images = f" and {media} image{'s' * (media > 1)}" if media else ""
    return f"{settings.name}{release}: {acts}; seed {settings.first_seed} begins with{images}\n{seen}"
