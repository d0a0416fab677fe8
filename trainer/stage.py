"""What a run stands on, opened from what its settings name: the tools, the template, the plug-in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from gateway.errors import ConfigError
from gateway.session import AnyGateway
from gateway.types import ToolSpec
from trainer.config import PlaySettings, TemplateSettings
from trainer.engine.base import Sampling
from trainer.plug import plug_in
from trainer.steps import Stepper, ToolsAndFeedback

if TYPE_CHECKING:
    from trainer.template import Template

SERVERS = "mcp_servers.json"


class Down(NamedTuple):
    """A server that does not answer."""

    problem: str
    remedy: str
    optional: bool
    """Whoever wrote the configuration can do without it."""


def gateway_of(tools: str, mcp: Path | None) -> AnyGateway:
    """The gateway of a folder, opened here; or one that runs elsewhere."""
    if tools.startswith(("http://", "https://")):
        from gateway.client import RemoteGateway

        return cast(AnyGateway, RemoteGateway(tools))
    from gateway.gateway import Gateway

    folder = Path(tools)
    beside = folder.resolve().parent / SERVERS
    return Gateway.load(folder, mcp or (beside if beside.exists() else None))


def down(gateway: AnyGateway) -> Iterator[Down]:
    """The servers whose tools are not there."""
    for source in getattr(gateway, "sources", ()):
        status: Any = getattr(source.leaf, "status", None)
        if status is not None and status.state != "up":
            server: Any = source.leaf.config
            remedy = f"start it: {server.start}" if server.start else status.remedy
            yield Down(f"server {status.name} is {status.state}: {status.reason}", remedy, server.optional)


def template_of(model: Path, settings: TemplateSettings, specs: Sequence[ToolSpec] = ()) -> Template:
    """The model's own chat template, with the parser that belongs to it."""
    from trainer.template import Settings, Template

    own = settings.chat_template
    try:
        text = own.read_text(encoding="utf-8") if own else None
    except (OSError, UnicodeError) as error:
        field, remedy = "template.chat_template", "name a Jinja file in UTF-8"
        raise ConfigError(f"cannot be read: {error}", file=own, field=field, remedy=remedy) from error
    used = Settings(settings.history, settings.sanity, text, settings.chat_template_kwargs)
    return Template.load(model, settings.parser, used, specs)


def stepper_of(settings: PlaySettings) -> Stepper:
    """The plug-in between two turns: an object, or a class that is made without arguments."""
    if settings.stepper is None:
        return ToolsAndFeedback()
    found = plug_in(settings.stepper, "stepper")
    try:
        made = found() if isinstance(found, type) else found
    except TypeError as error:
        remedy = "name an object that is made already, as `plugins.py:again` with `again = ThinkAgain(is_right)`"
        raise ConfigError(f"{settings.stepper!r} cannot be made: {error}", field="stepper", remedy=remedy) from error
    missing = [verb for verb in ("check_finished", "step") if not callable(getattr(made, verb, None))]
    if missing:
        remedy = "define check_finished(turn) and step(turn), or derive from trainer.steps:ToolsAndFeedback"
        raise ConfigError(f"{settings.stepper!r} lacks {' and '.join(missing)}", field="stepper", remedy=remedy)
    return cast(Stepper, made)


def sampling_of(settings: PlaySettings) -> Sampling:
    return Sampling(**settings.sampling.model_dump())
