"""The part of Ray that verl's tools use, in this process: actors whose methods run in threads.

Only offered to users' files where Ray is not installed. Other names of Ray are refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from threading import RLock, Semaphore, Thread
from typing import Any

import anyio.to_thread

_GROUP = "__concurrency_group__"
_named: dict[str, ActorHandle] = {}
_named_lock = RLock()  # An actor may create others in its constructor.


class ObjectRef:
    """A result that may not be there yet; can be awaited."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        return await anyio.to_thread.run_sync(self.future.result, abandon_on_cancel=True)


class ActorMethod:
    """A method of an actor; `remote` calls it in a thread."""

    def __init__(self, method: Callable[..., Any], slots: Semaphore) -> None:
        self._method, self._slots = method, slots

    def remote(self, *args: Any, **kwargs: Any) -> ObjectRef:
        """Calls the method and returns a reference to its result."""
        future: Future[Any] = Future()
        Thread(target=self._run, args=(future, args, kwargs), name="actor", daemon=True).start()
        return ObjectRef(future)

    def _run(self, future: Future[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._slots:
            try:
                future.set_result(self._method(*args, **kwargs))
            except BaseException as error:  # boundary: a user's method may raise anything, for its caller
                future.set_exception(error)


class ActorHandle:
    """An object whose methods are called by `actor.method.remote(...)`, as many at once as its options allow."""

    def __init__(self, actor: Any, options: Mapping[str, Any]) -> None:
        self._actor = actor
        groups: Mapping[str, int] = options.get("concurrency_groups") or {}
        default = Semaphore(int(options.get("max_concurrency") or 1))
        self._slots = defaultdict(lambda: default, {name: Semaphore(size) for name, size in groups.items()})

    def __getattr__(self, name: str) -> ActorMethod:
        method = getattr(self._actor, name)
        return ActorMethod(method, self._slots[getattr(method, _GROUP, "")])


class ActorClass:
    """A class whose instances are actors."""

    def __init__(self, actor_class: type, **options: Any) -> None:
        self._class, self._options = actor_class, options

    def options(self, **options: Any) -> ActorClass:
        """The same class with other options."""
        return ActorClass(self._class, **{**self._options, **options})

    def remote(self, *args: Any, **kwargs: Any) -> ActorHandle:
        """Creates an actor, or returns the one of this name with `get_if_exists`."""
        name = self._options.get("name")
        with _named_lock:
            if name in _named and self._options.get("get_if_exists"):
                return _named[name]
            handle = ActorHandle(self._class(*args, **kwargs), self._options)
            if name:
                _named[name] = handle
            return handle


def remote(*args: Any, **options: Any) -> Any:
    """The decorator of actor classes, with or without options."""
    if args and isinstance(args[0], type):
        return ActorClass(args[0], **options)
    if args:
        raise NotImplementedError("ray is not installed: only classes can be remote, and they run in this process")
    return lambda actor_class: remote(actor_class, **options)


def method(concurrency_group: str = "", **options: Any) -> Callable[[Any], Any]:
    """The decorator that puts a method into a concurrency group."""

    def mark(function: Any) -> Any:
        setattr(function, _GROUP, concurrency_group)
        return function

    return mark


def get(refs: Any, *, timeout: float | None = None) -> Any:
    """The result of a reference, or of each in a list; waits for it."""
    if isinstance(refs, list):
        return [get(ref, timeout=timeout) for ref in refs]
    return refs.future.result(timeout)


def is_initialized() -> bool:
    """Always True: there is nothing to start."""
    return True
