"""A rollout as JSON for the web UI: entries with their tokens, and why each is trained or not.

Token texts come from the model's tokenizer.json, without loading transformers or a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.types import Resource, Text
from mtrl_plugins.web.search import DATA_URL
from trainer.ledger import Author, Entry
from trainer.rollout.rollout import Rollout
from trainer.view.branches import name_branches
from trainer.view.text import to_printable
from trainer.view.why import RolloutCredit, explain_training, explain_zero_weight

if TYPE_CHECKING:
    from tokenizers import Tokenizer


FILE = "tokenizer.json"
REPLACEMENT = "\ufffd"
MAX_TOKENS_PER_CHARACTER = 8
"""Longer sequences of tokens without a complete character are not combined."""


class TokenTexts:
    """The text of each token; a character of several tokens belongs to the first of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        # Some decoders trim the start of the text, so a known token is put before it.
        self._anchor = next(((id, token.content) for id, token in sorted(added.items())), None)
        self._cache: dict[int, str] = {}
        self.vocabulary: int = tokenizer.get_vocab_size()

    @classmethod
    def load(cls, model: Path) -> TokenTexts:
        """The texts from a model's folder. Raises ValueError with a message for users if there is no tokenizer."""
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ValueError("the package `tokenizers` is not installed: pip install 'mtrl-rl[tokens]'") from error
        file = model / FILE
        if not file.is_file():
            raise ValueError(f"{file} does not exist any more")
        try:
            return cls(Tokenizer.from_file(str(file)))
        except Exception as error:  # boundary: the package raises bare Exceptions for damaged files
            raise ValueError(f"{file} cannot be read: {error}") from error

    def split(self, ids: Sequence[int]) -> list[str]:
        """One printable text per id."""
        texts: list[str] = []
        while len(texts) < len(ids):
            start = len(texts)
            text, count = self._token_text(ids[start]), 1
            while text.endswith(REPLACEMENT) and count < MAX_TOKENS_PER_CHARACTER and start + count < len(ids):
                count += 1
                text = self._decode(ids[start : start + count])
            if text.endswith(REPLACEMENT):
                text, count = self._token_text(ids[start]), 1
            texts += [to_printable(text), *[""] * (count - 1)]
        return texts

    def text(self, ids: Sequence[int]) -> str:
        return to_printable(self._decode(ids))

    def _token_text(self, id: int) -> str:
        if id not in self._cache:
            self._cache[id] = self._decode([id])
        return self._cache[id]

    def _decode(self, ids: Sequence[int]) -> str:
        if self._anchor is None:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
        id, text = self._anchor
        return str(self._tokenizer.decode([id, *ids], skip_special_tokens=False)).removeprefix(text)


def rollout_to_json(rollout: Rollout, token_texts: TokenTexts | None, credited: RolloutCredit) -> dict[str, Any]:
    """The JSON of a rollout for the web UI."""
    names = name_branches(rollout) or (None,) * len(rollout.ledgers)
    ledgers = [
        _without_empty(branch=name, entries=list(_entries_to_json(rollout, number, token_texts, credited)))
        for number, name in enumerate(names)
    ]
    return {
        "task": rollout.task,
        "group": rollout.group,
        "index": rollout.index,
        "stop": rollout.stop,
        "infrastructure": rollout.stop.is_infrastructure,
        "reason": to_printable(rollout.reason),
        "rewards": dict(rollout.rewards),
        "timing": dict(rollout.timing),
        "timeline": [list(span) for span in rollout.timeline],
        "infos": dict(rollout.infos),
        "credited": bool(credited.ledgers),
        "ledgers": ledgers,
    }


def _entries_to_json(
    rollout: Rollout, number: int, token_texts: TokenTexts | None, credited: RolloutCredit
) -> Iterator[dict[str, Any]]:
    ledger, credit = rollout.ledgers[number], credited.expand(number)
    turn_rewards = iter(ledger.rewards)
    turn = sum(len(before.turns) for before in rollout.ledgers[:number]) - 1
    for index, (start, expanded_start, entry) in enumerate(
        zip(ledger.starts, ledger.expanded.starts, ledger, strict=True)
    ):
        answers: Sequence[float] = ()
        if entry.author is Author.POLICY:
            turn, answers = turn + 1, next(turn_rewards)
        spans = credit[expanded_start : expanded_start + len(entry.ids)]
        heaviest = max(spans, key=lambda span: (span[2], abs(span[1])), default=None)
        trained, why = explain_training(rollout, entry, answers, heaviest, credited.untrained_reason)
        untrained = [offset for offset, span in enumerate(spans) if not span[2]] if trained else []
        yield _without_empty(
            author=entry.author,
            source=to_printable(entry.source) or None,
            turn=turn if turn >= 0 else None,
            start=start,
            seen=expanded_start,
            ids=list(entry.ids),
            pieces=token_texts.split(entry.ids) if token_texts else None,
            logprobs=None if entry.logprobs is None else [round(value, 5) for value in entry.logprobs],
            advantages=[span[1] for span in spans] if spans and entry.author is Author.POLICY else None,
            weights=[span[2] for span in spans] if spans and entry.author is Author.POLICY else None,
            version=entry.version,
            versions=list(ledger.versions[start : start + len(entry.ids)]) if entry.earlier_versions else None,
            cached=entry.cached_tokens,
            stop=entry.finish_reason,
            messages=[_printable_message(message) for message in entry.messages],
            calls=[_printable_call(call) for call in _calls_to_json(entry, ledger.entries[index + 1 : index + 2])],
            outcomes=list(entry.outcomes),
            reward=entry.reward,
            parts=[_part_to_json(part) for part in entry.parts],
            spans=[list(span) for span in entry.spans],
            widths=list(entry.widths),
            info={name: value for name, value in entry.info.items() if name != "own"},
            trained=trained,
            because=to_printable(why),
            because_not=explain_zero_weight(entry, untrained) if untrained else None,
        )


def _calls_to_json(turn: Entry, behind: Sequence[Entry]) -> Iterator[dict[str, Any]]:
    """Each call with its outcome, duration and result."""
    if turn.author is not Author.POLICY:
        return
    answer = next((entry for entry in behind if entry.author is Author.TOOL), None)
    outcomes = answer.outcomes if answer else ()
    details: Sequence[Mapping[str, Any]] = answer.info.get("tools", ()) if answer else ()
    messages = answer.messages if answer else ()
    for call, outcome, more, message in zip_longest(turn.calls, outcomes, details, messages):
        yield {
            "id": call.id if call else None,
            "name": call.name if call else None,
            "arguments": call.arguments if call else None,
            "outcome": outcome,
            "elapsed_s": more.get("elapsed_s") if more else None,
            "content": _printable_message(message).get("content") if message else None,
        }


def _printable_call(call: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: value for name, value in call.items() if value is not None}
    for name in ("name", "arguments"):
        if isinstance(shown.get(name), str):
            shown[name] = to_printable(shown[name])
    return shown


def _printable_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with control characters escaped and media data shortened."""
    return {str(name): _printable_value(value) for name, value in message.items()}


def _printable_value(value: Any) -> Any:
    if isinstance(value, str):
        return f"{value[:40]}…" if DATA_URL.match(value) else to_printable(value)
    if isinstance(value, Mapping):
        return {str(name): _printable_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_printable_value(item) for item in value]
    return value


def _part_to_json(part: Any) -> dict[str, Any]:
    match part:
        case Text(text):
            return {"kind": "text", "text": to_printable(text)}
        case Resource():
            content = None if part.text is None else to_printable(part.text)
            return {"kind": "resource", "uri": to_printable(part.uri), "text": content, "mime": part.mime}
    return {
        "kind": type(part).__name__.lower(),
        "mime": part.mime,
        "sha256": sha256(part.data).hexdigest(),
        "bytes": len(part.data),
    }


def _without_empty(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None and value not in ([], {})}
