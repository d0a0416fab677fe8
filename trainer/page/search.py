"""What rollouts say is searched line by line, a moment at a time: whoever asks again gets further."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock

from trainer.page.index import Index
from trainer.page.said import said

KEPT = 8
"""Searches that are remembered how far they came."""
ENTRIES = b'"entries":['
"""Before it stand ids and logprobs, in which anything can be found by chance."""


@dataclass
class Come:
    """How far a search is, in an index that began so often."""

    begun: int
    place: int = 0
    end: int = 0


class Search:
    """Any thread may look; one at a time gets further."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._lock = Lock()
        self._come: OrderedDict[str, Come] = OrderedDict()

    def look(self, words: str, for_s: float) -> int:
        """Goes on for that long; how many rollouts were looked at so far. `words` are in lower case."""
        with self._lock:
            come = self._come.setdefault(words, Come(self._index.begun))
            self._come.move_to_end(words)
            if len(self._come) > KEPT:
                old, _ = self._come.popitem(last=False)
                self._index.put("DELETE FROM found WHERE words = ?", [(old,)])
            if come.begun != self._index.begun:
                come = self._come[words] = Come(self._index.begun)
                self._index.put("DELETE FROM found WHERE words = ?", [(words,)])
            found = list(self._found(words, come, time.monotonic() + for_s))
            if found:
                self._index.put("INSERT OR IGNORE INTO found VALUES (?, ?)", [(words, place) for place in found])
            return come.place

    def _found(self, words: str, come: Come, until: float) -> Iterator[int]:
        once = json.dumps(words, ensure_ascii=False)[1:-1]
        twice = json.dumps(once, ensure_ascii=False)[1:-1]  # Arguments are JSON within JSON.
        wanted = {once.encode("utf-8", "surrogatepass"), twice.encode("utf-8", "surrogatepass")}
        lower = bytes.lower if words.isascii() else _lower
        known = self._index.known
        if not known:
            return
        with self._index.file.open("rb") as text:
            text.seek(come.end)
            for line in text:
                if not line.endswith(b"\n") or come.place >= known:
                    return
                near = lower(line[max(0, line.find(ENTRIES)) :])
                if any(one in near for one in wanted) and _says(line, (words, once)):
                    yield come.place
                come.place, come.end = come.place + 1, come.end + len(line)
                if time.monotonic() >= until:
                    return


def _says(line: bytes, wanted: tuple[str, ...]) -> bool:
    """Whether somebody did, and not the file's own format; what is damaged says nothing."""
    try:
        told = json.loads(line.decode("utf-8", "surrogatepass"))
        return any(one in text.lower() for text in said(told) for one in wanted)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _lower(said: bytes) -> bytes:
    """Slower, and of every letter."""
    return said.decode("utf-8", "replace").lower().encode()
