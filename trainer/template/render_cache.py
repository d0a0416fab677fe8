"""Caches of rendered and tokenized text, since all rollouts of a task have the same prompt and tools."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sized
from threading import Lock
from typing import Generic, TypeVar

MAX_SIZE = 2**20
"""Characters or ids in total."""

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value", bound=Sized)
Argument = TypeVar("Argument")
Result = TypeVar("Result")


class RenderCache(Generic[Key, Value]):
    """A thread-safe LRU cache that is limited by the total length of its values."""

    def __init__(self, max_size: int = MAX_SIZE) -> None:
        self._max_size, self._size = max_size, 0
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Key, compute: Callable[[], Value]) -> Value:
        """The cached value, or else a computed one."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = compute()
        with self._lock:
            self._remove(key)
            self._values[key] = value
            self._size += len(value)
            while self._size > self._max_size:
                self._remove(next(iter(self._values)))
        return value

    def _remove(self, key: Key) -> None:
        if key in self._values:
            self._size -= len(self._values.pop(key))


class IdentityCache(Generic[Argument, Result]):
    """A function's results for immutable objects, by identity; keeps the objects alive."""

    def __init__(self, compute: Callable[[Argument], Result], max_entries: int = 4096) -> None:
        self._compute, self._max_entries = compute, max_entries
        self._results: dict[int, tuple[Argument, Result]] = {}

    def get(self, argument: Argument) -> Result:
        """The cached result, or else a computed one."""
        entry = self._results.get(id(argument))
        if entry is None:
            if len(self._results) >= self._max_entries:
                self._results.clear()
            entry = self._results[id(argument)] = argument, self._compute(argument)
        return entry[1]
