"""Operations of a host process for environments with `reset` and `step`: opens an episode, takes its steps, closes it.

Each episode has a thread, so that a slow step delays no other episode. Runs in the host process, so only the standard
library is available.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import random
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __name__.startswith("mtrl_plugins."):
    from mtrl_plugins.environments.host_server import HostError
else:
    from host_server import HostError

MAX_EPISODES = 4096
"""Episodes that may be open at once."""
CLOSE_S = 3.0
"""How long all episodes may take to close once the trainer has gone."""


class EpisodeHost:
    """One environment and its open episodes.

    The adapter's `make(options)` returns an episode with `reset(seed, options)`, `step(action)` and `close()`.
    """

    def __init__(self, adapter: Any, endpoint: Any) -> None:
        self.adapter = adapter
        self.episodes: dict[str, EpisodeThread] = {}
        self.operations: dict[str, Callable[..., Awaitable[Any]]] = {
            "open": self.open,
            "step": self.step,
            "close": self.close,
        }

    async def open(self, episode: str, seed: int, options: Mapping[str, Any]) -> Any:
        """Makes an environment and begins its episode, under a name that the trainer chose."""
        if len(self.episodes) >= MAX_EPISODES:
            raise HostError(f"{MAX_EPISODES} episodes are open", "lower `sessions`")
        self.episodes[episode] = thread = EpisodeThread(self.adapter)
        return await thread.open(seed, options)

    async def step(self, episode: str, action: Mapping[str, Any]) -> Any:
        """Takes one step."""
        if episode not in self.episodes:
            raise HostError(f"{episode} is not open here")
        return await self.episodes[episode].step(action)

    async def close(self, episode: str) -> Any:
        """Ends an episode."""
        if (thread := self.episodes.pop(episode, None)) is not None:
            await thread.close()
        return {}

    async def close_all(self) -> None:
        """Ends all episodes, as far as they let themselves be ended."""
        closing = [asyncio.ensure_future(self.close(name)) for name in [*self.episodes]]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_S)


class EpisodeThread:
    """One episode and the thread in which all its methods run."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._random = GlobalRandom() if adapter.uses_global_random else None
        self._episode: Any = None

    async def open(self, seed: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """Makes the environment and resets it."""

        def run() -> Any:
            if self._random is not None:
                seed_generators(seed)
            self._episode = self._adapter.make(options)
            return self._episode.reset(seed, options)

        answer: dict[str, Any] = await self._run(run)
        return answer

    async def step(self, action: Mapping[str, Any]) -> Any:
        """Takes a step."""
        return await self._run(lambda: self._episode.step(action))

    async def close(self) -> None:
        """Closes the environment, after the step that it is taking."""
        try:
            await self._run(lambda: self._episode and self._episode.close())
        finally:
            self._thread.shutdown(wait=False)

    async def _run(self, function: Callable[[], Any]) -> Any:
        def run() -> Any:
            if self._random is None:
                return function()
            with self._random:
                return function()

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)


class GlobalRandom:
    """The global random generators of one episode, for environments that draw from them.

    An episode's thread holds them while the environment runs, and lets go while it waits for others (`waiting`).

    Only one episode runs at a time, with its own state of the generators; so the same seed is the same episode, however
    many are open.
    """

    _lock = threading.Lock()
    _holder: GlobalRandom | None = None
    """The one whose state the generators have."""

    def __init__(self) -> None:
        self._states: tuple[Any, Any] | None = None

    @classmethod
    @contextmanager
    def waiting(cls) -> Iterator[None]:
        """Lets other episodes run meanwhile: for the holder's thread, around a wait that draws nothing."""
        held = cls._holder
        if held is None:
            yield
            return
        held.__exit__()
        try:
            yield
        finally:
            held.__enter__()

    def __enter__(self) -> None:
        self._lock.acquire()
        GlobalRandom._holder = self
        if self._states is not None:
            random.setstate(self._states[0])
            if self._states[1] is not None:
                sys.modules["numpy"].random.set_state(self._states[1])

    def __exit__(self, *_: object) -> None:
        numpy = sys.modules.get("numpy")
        self._states = random.getstate(), numpy.random.get_state() if numpy is not None else None
        GlobalRandom._holder = None
        self._lock.release()


def seed_generators(seed: int) -> None:
    """Seeds the global random generators, from which an environment may draw before its `reset` seeds them."""
    random.seed(seed)
    if importlib.util.find_spec("numpy") is not None:  # The environment may import it only when it is made.
        importlib.import_module("numpy").random.seed(seed % 2**32)
