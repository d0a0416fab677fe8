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
from trainer.steps import Stepper, ToolsAndFeedback
from trainer.swift.plugins import plugged_in
from trainer.swift.scheduler import RolloutScheduler
from trainer.swift.stepper import scheduled

if TYPE_CHECKING:
    from trainer.template import Template

SERVERS = "mcp_servers.json"


class Down(NamedTuple):
    """A server that does not answer."""

    problem: str
    remedy: str
    optional: bool
    """Whoever wrote the configuration can do without it."""


def gateway_of(settings: PlaySettings) -> AnyGateway:
    """The gateway of a folder or of files, opened here; or one that runs elsewhere."""
    tools, limit = settings.tools, settings.result_limit
    if isinstance(tools, str) and tools.startswith(("http://", "https://")):
        if limit is not None:
            remedy = "write it into the files of that gateway"
            raise ConfigError("a gateway elsewhere cuts results itself", field="result_limit", remedy=remedy)
        from gateway.client import RemoteGateway

        return cast(AnyGateway, RemoteGateway(tools))
    from gateway.gateway import Gateway

    beside = Path(tools).resolve().parent / SERVERS if isinstance(tools, str) else None
    servers = beside if beside is not None and beside.exists() else None
    return Gateway.load(tools, settings.mcp or servers, limit)


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
    from trainer.template import SHIPPED, Settings, Template

    own = settings.chat_template
    try:
        text = own if own is None or "{%" in own or "{{" in own else SHIPPED.get(own, Path(own)).read_text("utf-8")
    except (OSError, UnicodeError) as error:
        field = "template.chat_template"
        remedy = f"name a Jinja file in UTF-8, or one that comes with the package: {', '.join(SHIPPED)}"
        raise ConfigError(f"cannot be read: {error}", file=own, field=field, remedy=remedy) from error
    told = settings.model_dump(include={"history", "sanity", "chat_template_kwargs", "images", "blind"})
    used = Settings(chat_template=text, **told)
    return Template.load(model, settings.parser, used, specs)


def stepper_of(settings: PlaySettings) -> Stepper:
    """The plug-in between two turns: an object, or what a class, or a function, makes of `stepper_args`."""
    if settings.stepper is None:
        if settings.stepper_args:
            raise ConfigError("are for no plug-in", field="stepper_args", remedy="name it: `stepper: plugins.py:Class`")
        return ToolsAndFeedback()
    found, args = plugged_in(settings.stepper, "stepper"), settings.stepper_args
    if isinstance(found, RolloutScheduler) or (isinstance(found, type) and issubclass(found, RolloutScheduler)):
        return cast(Stepper, scheduled(found, **args))
    try:
        made = found(**args) if args or isinstance(found, type) else found
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
