"""Answers to a tool's question (elicitation) when nobody is behind the call: fixed, defaults, or the interaction's.

Values are checked against the schema that the tool asks with. What does not fit is declined, never sent.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from gateway.config.server_auth import Answers
from gateway.errors import RequestDeclined
from gateway.schema import ArgumentChecker, SchemaError, SlowCheckError
from gateway.types import Context, Feedback

log = logging.getLogger(__name__)

DECLINE: Mapping[str, Any] = {"action": "decline"}
_TRUE, _FALSE = ("yes", "true", "y", "ok", "okay", "sure"), ("no", "false", "n")
_MAX_FIELDS = 200
_MAX_SCHEMA_CHARS = 65_536
_FIELD_KEYS = frozenset(
    {
        *("type", "enum", "enumNames", "const", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems"),
        *("items", "anyOf", "oneOf", "format"),
    }
)
"""What a field of a form may say of its value; the protocol knows no references and no patterns."""
AskInteraction = Callable[[str], Awaitable[Feedback]]


class ElicitationAnswers:
    """Answers the elicitations of one server, as its `answers` setting says."""

    def __init__(self, server: str, answers: Answers) -> None:
        self._server, self._answers = server, answers

    async def answer(self, method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """The result of an `elicitation/create`; raises `RequestDeclined` for other requests."""
        if method != "elicitation/create":
            raise RequestDeclined(f"nobody is behind this call who could answer {method}")
        fields = _fields(params)
        if fields is None or self._answers in ("decline", "interaction"):
            return DECLINE
        fixed = self._answers if isinstance(self._answers, dict) else {}
        return self._accept(params, {**_defaults(fields), **{key: fixed[key] for key in fields if key in fixed}})

    def with_interaction(self, context: Context, ask: AskInteraction) -> Context:
        """The context with the rollout's interaction as the one who answers, if that is what the setting says."""
        if self._answers != "interaction":
            return context
        return replace(context, answer_request=partial(self._ask, ask))

    async def _ask(self, ask: AskInteraction, method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """The same as `answer`, by the interaction, which is shown the question and replies with text."""
        fields = _fields(params)
        if method != "elicitation/create" or fields is None:
            return await self.answer(method, params)
        feedback = await ask(_question(params, fields))
        if feedback.outcome.is_infrastructure:
            raise RequestDeclined(f"the interaction did not answer: {feedback.reason}")
        values = _read_reply(feedback.message, fields)
        return DECLINE if values is None else self._accept(params, {**_defaults(fields), **values})

    def _accept(self, params: Mapping[str, Any], content: dict[str, Any]) -> Mapping[str, Any]:
        """Accepts with these values, if they fit the schema."""
        problem = _explain_misfit(params["requestedSchema"], content)
        if problem is None:
            return {"action": "accept", "content": content}
        log.warning("an elicitation of server %r is declined: %s", self._server, problem)
        return DECLINE


def _fields(params: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]] | None:
    """The fields of a form; None if the request is no form."""
    schema = params.get("requestedSchema")
    fields = schema.get("properties", {}) if isinstance(schema, Mapping) else None
    if params.get("mode", "form") != "form" or not isinstance(fields, Mapping) or len(fields) > _MAX_FIELDS:
        return None
    return fields if all(isinstance(field, Mapping) for field in fields.values()) else None


def _defaults(fields: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {name: field["default"] for name, field in fields.items() if "default" in field}


def _flatten(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The form with what the protocol allows in one: fields of plain values. Raises ValueError for a huge one.

    A server could otherwise choose a schema that takes long to compile or to check.
    """
    if len(json.dumps(schema)) > _MAX_SCHEMA_CHARS:
        raise ValueError
    fields = {
        name: {key: field[key] for key in _FIELD_KEYS & field.keys()}
        for name, field in (schema.get("properties") or {}).items()
    }
    return {"type": "object", "properties": fields, "required": list(schema.get("required") or ())}


def _explain_misfit(schema: Mapping[str, Any], content: Mapping[str, Any]) -> str | None:
    """Why the values do not fit, without them: they may be secrets."""
    required = schema.get("required") or []
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return "its schema cannot be used"
    missing = [name for name in required if name not in content]
    if missing:
        return f"no answer for the field {missing[0]!r}"
    try:
        checker = ArgumentChecker(_flatten(schema))
        problem = checker.explain_quickly(json.dumps(content))
    except (SchemaError, SlowCheckError, ValueError, TypeError, RecursionError):
        return "its schema cannot be used"
    return None if problem is None else "the answers do not fit its schema"


def _question(params: Mapping[str, Any], fields: Mapping[str, Mapping[str, Any]]) -> str:
    """The question as text, with the fields to fill in."""
    lines = [str(params.get("message", ""))]
    for name, field in fields.items():
        options = field.get("enum")
        kind = " or ".join(map(str, options)) if isinstance(options, list) else str(field.get("type", "text"))
        title = field.get("description") or field.get("title") or ""
        lines.append(f"- {name} ({kind}){f': {title}' if title else ''}")
    return "\n".join(lines)


def _read_reply(reply: str, fields: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """The values in a reply: a JSON object, or the value of the only field; None if there are none."""
    try:
        values = json.loads(reply)
    except (ValueError, RecursionError):
        values = None
    if isinstance(values, dict):
        return {name: value for name, value in values.items() if name in fields}
    if not fields:
        return None if _read_value(reply, "boolean") is False else {}
    if len(fields) != 1:
        return None
    (name, field), *_ = fields.items()
    value = _read_value(reply, field.get("type"))
    return None if value is None else {name: value}


def _read_value(reply: str, kind: object) -> Any:
    """A reply as a value of this type; None if it is none."""
    text = reply.strip()
    first = text.lower().split(maxsplit=1)[0].strip(".,;:!") if text else ""
    try:
        match kind:
            case "boolean":
                return True if first in _TRUE else False if first in _FALSE else None
            case "integer":
                return int(text)
            case "number":
                return float(text)
    except ValueError:
        return None
    return text or None
