"""`mtrl-train serve-policy`: serves a model to agents without training it, and saves the rollouts of their sessions."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import anyio
from anyio import to_thread
from rich.console import Console

from gateway.disk_errors import write_atomically
from gateway.errors import ConfigError
from gateway.version import installed_version
from mtrl_plugins.agents.policy_server import PolicyServer, Sink
from mtrl_plugins.agents.settings import AgentSettings
from trainer.collect_rollouts import create_run_folder
from trainer.engines import engine_notes, make_engine
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout
from trainer.rollout.settings import BaseRolloutSettings, RolloutLimits
from trainer.setup import load_template, make_gateway, make_sampling, make_stepper, probe_for_job
from trainer.storage.rollout_file import RolloutWriter
from trainer.storage.run_files import RUN_INFO_FILE

WIDE = RolloutLimits(assistant_turns=100_000, turn_tokens=1 << 20, rollout_tokens=1 << 20, wall_s=86_400.0)
"""The limits where a run file sets none: what the model takes."""


class ServeSettings(BaseRolloutSettings):
    """Settings of `mtrl-train serve-policy`; other settings of a run file do not matter here."""

    model: Path
    """A model's folder."""
    out: Path | None = None
    """Where rollouts of sessions are saved."""
    tools: str | tuple[str, ...] = ()
    """Tools of the gateway for sessions; by default none, as agents bring their own."""
    limits: RolloutLimits = WIDE


async def serve_policy(settings: ServeSettings, agent: AgentSettings, token: str, console: Console) -> None:
    """Serves until SIGTERM or SIGINT. Everything is checked before the weights are loaded."""
    say = partial(console.print, markup=False, soft_wrap=True, highlight=False)
    if not settings.model.is_dir():
        remedy = "name a folder as `save_pretrained` writes it, a run's folder, or a demo's name"
        raise ConfigError("there is no such folder", file=settings.model, field="--model", remedy=remedy)
    if settings.out is not None:
        create_run_folder(settings.out)
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(make_gateway(settings))
        template = load_template(settings.model, settings.template, gateway.specs)
        probe_for_job(template, settings, gateway.specs, []).raise_if_failed()
        engine = make_engine(settings, settings.model, template, settings.out or Path(), log=say)
        sampling, stepper = make_sampling(settings), make_stepper(settings)
        runner = RolloutRunner(engine, template, gateway, settings.limits, sampling, stepper, seed=settings.seed)
        sink = _save_nothing if settings.out is None else _save(stack.enter_context(RolloutWriter(settings.out)))
        server = PolicyServer(agent, runner, token, sink)
        stack.enter_context(server.bind())
        await stack.enter_async_context(engine)
        if settings.out is not None:
            _write_run_info(settings, settings.out, engine.capabilities.name)
        for note in engine_notes(engine.capabilities):
            say(note)
        await _serve_until_signal(server, settings, say)


async def _serve_until_signal(server: PolicyServer, settings: ServeSettings, say: Callable[[str], None]) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with server:
            for line in describe_server(server, settings):
                say(line)
            await anext(signals)
    if server.abandoned:
        say(f"{server.abandoned} sessions were ended after {server.settings.idle_s:g} s without a request")
    if settings.out is not None:
        say(f"{server.rollouts} rollouts are saved in {settings.out}; read them with: mtrl-train show {settings.out}")


def describe_server(server: PolicyServer, settings: ServeSettings) -> list[str]:
    """The lines at the start: where the policy is, and how clients reach it."""
    url = server.endpoint.url
    key = "the token" if server.run_key else "any"
    limit = server.endpoint.shared.context_length if server.endpoint.shared else 0
    kept = f"saved in {settings.out}" if settings.out else "not saved: there is no --out"
    return [
        f"mtrl-train: {url} ({settings.model}, {limit} tokens; stop with Ctrl-C)",
        f"  OpenAI clients     OPENAI_BASE_URL={url}/v1  OPENAI_API_KEY={key}",
        f"  Anthropic clients  ANTHROPIC_BASE_URL={url}  ANTHROPIC_API_KEY={key}",
        f"  sessions           POST {url}/sessions; their rollouts are {kept}",
    ]


def _save(writer: RolloutWriter) -> Sink:
    async def save(rollout: Rollout) -> None:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(writer.add, rollout)

    return save


async def _save_nothing(rollout: Rollout) -> None:
    """For servers without a folder."""


def _write_run_info(settings: ServeSettings, out: Path, engine: str) -> None:
    about = {"mtrl": installed_version(), "engine": engine, "settings": settings.model_dump(mode="json")}
    write_atomically(out / RUN_INFO_FILE, (json.dumps(about, indent=2) + "\n").encode())
