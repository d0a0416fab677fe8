"""Episodes in a host process, which has the Python of Gymnasium or of TextArena."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

from anyio import to_thread

from mtrl_plugins.environments.episodes import Episode, EpisodeAnswer, read_answer
from mtrl_plugins.environments.host_process import EnvironmentHost, HostEpisode


class ProcessEpisodes:
    """The episodes of one environment."""

    def __init__(self, host: EnvironmentHost) -> None:
        self.host = host

    async def __aenter__(self) -> Self:
        await to_thread.run_sync(self.host.start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.host.stop_async()

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """What the adapter says which tools the environment has."""
        tools: Sequence[Mapping[str, Any]] = self.host.about.get("tools") or ()
        return tools

    @asynccontextmanager
    async def open(self, seed: int, options: Mapping[str, Any]) -> AsyncIterator[tuple[Episode, EpisodeAnswer]]:
        """Begins an episode."""
        episode, answer = await self.host.open_episode(seed, options)
        try:
            yield _ProcessEpisode(episode, self.host.name), read_answer(answer, self.host.name)
        finally:
            episode.close()


class _ProcessEpisode:
    def __init__(self, episode: HostEpisode, owner: str) -> None:
        self._episode, self._owner = episode, owner

    async def step(self, tool: str, action: Mapping[str, Any]) -> EpisodeAnswer:
        return read_answer(await self._episode.ask("step", action=dict(action)), self._owner)
