"""The command `serve-policy`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.errors import ConfigError
from trainer.cli.errors import report_errors
from trainer.cli.options import OverrideWords, app

if TYPE_CHECKING:
    from mtrl_plugins.agents.policy_server import ServeSettings
    from mtrl_plugins.agents.settings import AgentSettings

PORT = 8767
"""The port after that of `mtrl-train view`."""


@app.command("serve-policy")
def serve_policy(
    overrides: OverrideWords = None,
    model: Annotated[
        str | None, typer.Option(metavar="PATH", help="A model's or run's folder, org/name of the hub, or `demo`.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="A run file: its model, engine, template, limits and sampling.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the rollouts of sessions.")] = None,
    engine: Annotated[str | None, typer.Option(metavar="auto|torch|sglang|URL", help="Inference engine.")] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; other than loopback needs a token. Default: 127.0.0.1")
    ] = None,
    port: Annotated[int | None, typer.Option(help=f"Port to listen on; 0 for a free one. Default: {PORT}")] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the token that clients send as their API key.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed and requests give the same answers.")] = None,
) -> None:
    """Serve a model to agents as OpenAI, Anthropic and Google do, without training it. Stop with Ctrl-C.

    Point a client at the address that is printed: `/v1/chat/completions`, `/v1/responses`, `/v1/messages` and
    `/v1/models`. Tool calls, streaming and images work; temperature and top-p are the request's.

    `POST /sessions` opens a session with an address and a key of its own. Its requests are one rollout, which is saved
    to --out at `POST /sessions/ID/end`, with the rewards of `POST /sessions/ID/reward`: read it with `mtrl-train show`.
    """
    import anyio

    from mtrl_plugins.agents.settings import AgentSettings

    options: dict[str, Any] = {"model": model, "out": out, "engine": engine, "seed": seed}
    with report_errors(stopped=lambda: "nothing was served yet"):
        from rich.console import Console

        from gateway.http.settings import read_token
        from mtrl_plugins.agents.policy_server import ServeSettings, serve_policy
        from trainer.cli.run_file import find_run_file, load_settings, override_settings, read_run_file
        from trainer.model import configure_torch
        from trainer.rollout.settings import RolloutSettings
        from trainer.train.settings import TrainSettings

        file = None if config is None else find_run_file(config)
        if model is None and "model" not in override_settings(read_run_file(file), overrides or ()):
            remedy = "name a model's folder, org/name of the hub, a run's folder, or `demo`"
            raise ConfigError("there is no model to serve", field="--model", remedy=remedy)
        configure_torch()
        others = {*TrainSettings.model_fields, *RolloutSettings.model_fields}
        ignored = others - {*ServeSettings.model_fields}
        settings = load_settings(ServeSettings, file, options, ignored, overrides or ())
        settings = settings.model_copy(update={"model": _find_model(settings)})
        token = "" if token_file is None else read_token(token_file).get_secret_value()
        agent = _agent_settings(AgentSettings.of(settings), host, port)
        anyio.run(partial(serve_policy, settings, agent, token, Console()))


def _agent_settings(agent: AgentSettings | None, host: str | None, port: int | None) -> AgentSettings:
    """The run file's address, unless options name another; the request's sampling counts."""
    from mtrl_plugins.agents.settings import AgentSettings

    address: Mapping[str, Any] = {} if agent is None else {"host": agent.host, "port": agent.port or PORT}
    given = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    kept = {} if agent is None else {"public_url": agent.public_url, "idle_s": agent.idle_s}
    values = {"port": PORT, **address, **kept, **given}
    return AgentSettings(external=True, sampling="request", **values)


def _find_model(given: ServeSettings) -> Path:
    """A model's folder: that of a demo, which may have to be built, of the hub, or of a run's latest checkpoint."""
    from trainer.cli.run_file import fetch_model
    from trainer.data.tasks import example_names, load_example
    from trainer.model import require_whole_model
    from trainer.train.settings import TrainSettings

    if (name := str(given.model)) in example_names():
        sys.stderr.write("mtrl-train: building the demo's model, unless it was built before (a minute)\n")
        settings = TrainSettings(model=name, data=name, seed=given.seed)
        return load_example(name).prepare_model(settings, lambda *_: None)
    folder = fetch_model(given).model
    if (folder / "config.json").exists() or not (folder / "checkpoints").is_dir():
        require_whole_model(folder)
        return folder
    from trainer.train.checkpoint import Checkpoints

    latest = Checkpoints(folder).find_latest()
    if latest is None:
        raise ConfigError("the run has no checkpoint yet", file=folder, field="--model", remedy="name another folder")
    require_whole_model(latest.folder)
    return latest.folder
