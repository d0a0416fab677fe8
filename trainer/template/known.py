"""What the rollouts of a task ask for again and again is worked out once: the prompt, and answers that are the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sized
from threading import Lock
from typing import Generic, TypeVar

MOST = 2**20
"""Characters, or ids, that are kept in all."""

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value", bound=Sized)
Given = TypeVar("Given")
Made = TypeVar("Made")


class Known(Generic[Key, Value]):
    """A function's values, one for each key. The least recently asked for goes first; any thread may ask."""

    def __init__(self, most: int = MOST) -> None:
        self._most, self._held = most, 0
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._lock = Lock()

    def of(self, key: Key, make: Callable[[], Value]) -> Value:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        with self._lock:
            self._forget(key)
            self._values[key] = value
            self._held += len(value)
            while self._held > self._most:
                self._forget(next(iter(self._values)))
        return value

    def _forget(self, key: Key) -> None:
        if key in self._values:
            self._held -= len(self._values.pop(key))


class Same(Generic[Given, Made]):
    """A function's values of objects that nobody changes, each known by which it is; they are held with them."""

    def __init__(self, make: Callable[[Given], Made], most: int = 4096) -> None:
        self._make, self._most = make, most
        self._values: dict[int, tuple[Given, Made]] = {}

    def of(self, one: Given) -> Made:
        known = self._values.get(id(one))
        if known is None:
            if len(self._values) >= self._most:
                self._values.clear()
            known = self._values[id(one)] = one, self._make(one)
        return known[1]
