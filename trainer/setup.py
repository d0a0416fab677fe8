"""Opens what the settings name: gateway, chat template, stepper, sampling."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gateway.errors import ConfigError
from gateway.plugins import installed_plugins, load_name
from gateway.session import AnyGateway
from gateway.tool_table import Source
from gateway.types import ToolSpec
from trainer.data.tasks import RowTasks, example_names, load_example, load_rows
from trainer.engine.base import Sampling
from trainer.load_plugin import load_plugin
from trainer.parse.plain import PlainText
from trainer.pretrained import trust_code
from trainer.rollout.settings import BaseRolloutSettings, TemplateSettings
from trainer.rollout.steppers import Stepper, ToolsAndFeedback
from trainer.rollout.task import Task

if TYPE_CHECKING:
    from trainer.template import ProbeReport, Template

SERVERS_FILE = "mcp_servers.json"
GATEWAY_TOKEN = "MTRL_GATEWAY_TOKEN"  # noqa: S105 (a name)
"""The environment variable with the token of a gateway elsewhere."""
RECONNECT_S = 120.0
"""How long a rollout's session waits for a gateway elsewhere that is being restarted."""


def make_gateway(
    settings: BaseRolloutSettings, sources: Sequence[Source] = (), *, tells_start: bool = False
) -> AnyGateway:
    """The gateway of a folder or of files, opened in this process; or a client of one that runs elsewhere.

    `sources` are toolsets that are offered beside those of the files. `tells_start`: the caller tells of servers that
    did not start.
    """
    for part in settings.parts:
        if (toolset := part.make_toolset()) is not None:
            from gateway.gateway import Gateway

            return Gateway([Source(part.key, toolset, in_order=True)])
    tools, limit = settings.tools, settings.result_limit
    if isinstance(tools, str) and tools.startswith(("http://", "https://")):
        if limit is not None:
            remedy = "set it in the configuration of that gateway"
            raise ConfigError("a remote gateway truncates results itself", field="result_limit", remedy=remedy)
        if sources:
            remedy = "name a folder or files of tools"
            raise ConfigError("a remote gateway cannot offer Python objects", field="tools", remedy=remedy)
        from gateway.client import RemoteGateway

        return cast(AnyGateway, RemoteGateway(tools, os.environ.get(GATEWAY_TOKEN), reconnect_s=RECONNECT_S))
    from gateway.gateway import Gateway
    from gateway.terminal import show_start

    if isinstance(tools, str) and tools in example_names() and not Path(tools).exists():
        tools = str(load_example(tools).tools or tools)
    default_servers = Path(tools).resolve().parent / SERVERS_FILE if isinstance(tools, str) else None
    servers = default_servers if default_servers is not None and default_servers.exists() else None
    start = show_start(is_reported=tells_start)
    return Gateway.load(tools, settings.mcp or servers, limit, sources, start=start)


def find_empty_folder(tools: str | Sequence[str]) -> str:
    """What to do about a folder of tools without a YAML file; empty for others."""
    folder = Path(tools) if isinstance(tools, str) else None
    if folder is None or not folder.is_dir() or any(folder.glob("*.y*ml")):
        return ""
    return f"{folder} has no YAML file: write one that names each tool, as in `tools: [{{function: my_tools:look_up}}]`"


def find_down_servers(gateway: AnyGateway) -> list[ConfigError]:
    """The servers whose tools are missing, except those without which the run may go on."""
    found = []
    for source in getattr(gateway, "sources", ()):
        status: Any = getattr(source.backend, "status", None)
        if status is not None and status.state != "up" and not source.backend.config.optional:
            start = source.backend.config.start
            remedy = f"start it: {start}" if start else status.remedy
            found.append(ConfigError(f"server {status.name} is {status.state}: {status.reason}", remedy=remedy))
    return found


def is_native_tool(gateway: AnyGateway, name: str) -> bool:
    """Whether a tool is the operator's own code; the tools of a sandbox that come with the package are not."""
    from gateway.gateway import Gateway
    from gateway.sandbox.sandbox_toolset import SandboxToolset

    tool = gateway.table.tools.get(name) if isinstance(gateway, Gateway) else None
    return tool is not None and tool.source.trusted and not isinstance(tool.source.backend, SandboxToolset)


def find_unknown_tools(gateway: AnyGateway) -> list[ConfigError]:
    """Tools that an entry selects by name and that its server does not have."""
    from gateway.config.configured_server import find_unknown_tools  # YAML is only needed for files

    up = {
        status.name: [spec.name for spec in backend.specs]
        for source in getattr(gateway, "sources", ())
        if (backend := source.backend) is not None
        and (status := getattr(backend, "status", None)) is not None
        and status.state == "up"
    }
    return find_unknown_tools(getattr(gateway, "servers", ()), up)


def trust_model(settings: BaseRolloutSettings, *folders: Path) -> None:
    """Trusts the code of these folders, such as the model's and the run's, if the settings say so."""
    if settings.trust_remote_code:
        trust_code(*folders)


def load_template(model: Path, settings: TemplateSettings, specs: Sequence[ToolSpec] = ()) -> Template:
    """The model's own chat template, or the one that the settings name, with its parser."""
    from trainer.template import BUILTIN_TEMPLATES, Settings, Template

    chat_template = settings.chat_template
    try:
        text = (
            chat_template
            if chat_template is None or "{%" in chat_template or "{{" in chat_template
            else BUILTIN_TEMPLATES.get(chat_template, Path(chat_template)).read_text("utf-8")
        )
    except (OSError, UnicodeError) as error:
        field = "template.chat_template"
        remedy = f"name a Jinja file in UTF-8, or one that comes with the package: {', '.join(BUILTIN_TEMPLATES)}"
        raise ConfigError(f"cannot be read: {error}", file=chat_template, field=field, remedy=remedy) from error
    options = settings.model_dump(include={"history", "sanity", "chat_template_kwargs", "calls"})
    template_settings = Settings(chat_template=text, **options)
    return Template.load(model, settings.parser, template_settings, _policy_specs(specs))


def _policy_specs(specs: Sequence[ToolSpec]) -> list[ToolSpec]:
    """The tools that the policy may call; interactions are among the specs, too."""
    return [spec for spec in specs if spec.audience == "policy"]


def probe_for_job(
    template: Template, settings: BaseRolloutSettings, specs: Sequence[ToolSpec], sources: Sequence[Sequence[Task]]
) -> ProbeReport:
    """Probes a template for what the job uses; its tasks are only read if the template cannot do everything.

    Without `sources`, the tasks are unknown.
    """
    from trainer.template import probe
    from trainer.template.cure import find_cure

    policy_specs, max_calls = _policy_specs(specs), settings.limits.parallel_calls
    if policy_specs and isinstance(template.parser, PlainText):
        names = ", ".join(spec.name for spec in policy_specs)
        problem = f"`plain_text` reads no calls, but the gateway offers tools: {names}"
        raise ConfigError(problem, field="template.parser", remedy="leave it out, or remove the tools")
    tools = bool(policy_specs)
    report = probe(template, tools=tools, max_calls=max_calls)
    if report.is_ok:
        return report
    feedback = settings.stepper is not None or not sources
    system = not sources or any(spec.instructions for spec in policy_specs)
    for task in chain.from_iterable(sources):
        feedback = feedback or task.has_feedback
        system = system or any(message["role"] == "system" for message in task.messages)
        if feedback and system:
            break
    again = partial(probe, tools=tools, feedback=feedback, system=system, max_calls=max_calls)
    report = again(template)
    return report if report.is_ok else replace(report, cure=find_cure(template, lambda other: again(other).is_ok))


def make_stepper(settings: BaseRolloutSettings, given: Stepper | None = None) -> Stepper:
    """The `given` stepper, or the one that the settings name, within those of plug-ins that wrap it."""
    stepper = given or _load_stepper(settings)
    for part in settings.parts:
        stepper = part.wrap_stepper(stepper)
    return stepper


def _load_stepper(settings: BaseRolloutSettings) -> Stepper:
    """An object, or what a class or function makes of `stepper_args`."""
    if settings.stepper is None:
        return _default_stepper(settings)
    plugin, args = load_plugin(settings.stepper, "stepper"), settings.stepper_args
    if (adapted := _adapt_stepper(plugin, args)) is not None:
        return adapted
    try:
        stepper = plugin(**args) if args or isinstance(plugin, type) else plugin
    except TypeError as error:
        remedy = "name an existing object, such as `plugins.py:again` with `again = ThinkAgain(is_right)`"
        raise ConfigError(
            f"{settings.stepper!r} cannot be instantiated: {error}", field="stepper", remedy=remedy
        ) from error
    if stepper is not plugin and (adapted := _adapt_stepper(stepper, {})) is not None:
        return adapted
    missing = [name for name in ("check_finished", "step") if not callable(getattr(stepper, name, None))]
    if missing:
        remedy = "define check_finished(turn) and step(turn), or derive from trainer.rollout.steppers:ToolsAndFeedback"
        raise ConfigError(f"{settings.stepper!r} lacks {' and '.join(missing)}", field="stepper", remedy=remedy)
    for name in ("check_finished", "step"):
        try:
            inspect.signature(getattr(stepper, name)).bind(None)
        except TypeError as error:
            remedy = f"define {name}(self, turn), or a scheduler's step(self, infer_request, result, current_turn)"
            raise ConfigError(f"{settings.stepper!r}: {name} {error}", field="stepper", remedy=remedy) from error
        except ValueError:  # A function in C has no signature.
            continue
    return cast(Stepper, stepper)


def _adapt_stepper(plugin: Any, args: Mapping[str, Any]) -> Stepper | None:
    """The stepper that a plug-in makes of another framework's object, if one knows it."""
    adapters = (load_name(name) for known in installed_plugins() for name in known.steppers)
    return next((stepper for adapt in adapters if (stepper := adapt(plugin, args)) is not None), None)


def _default_stepper(settings: BaseRolloutSettings) -> Stepper:
    for part in settings.parts:
        if (stepper := part.make_stepper()) is not None:
            return stepper
    if settings.stepper_args:
        remedy = "name it: `stepper: plugins.py:Class`"
        raise ConfigError("are set without a stepper", field="stepper_args", remedy=remedy)
    return ToolsAndFeedback()


def load_data(settings: BaseRolloutSettings, name: str, split: str = "train") -> RowTasks:
    """The tasks that `name` means as `data`: those of a plug-in's section, or of a file or data set."""
    rows = next((rows for part in settings.parts if (rows := part.find_rows(name)) is not None), name)
    return load_rows(rows, system=settings.system, split=split, columns=settings.columns)


def make_sampling(settings: BaseRolloutSettings) -> Sampling:
    """The sampling parameters of the settings."""
    return Sampling(**settings.sampling.model_dump())
