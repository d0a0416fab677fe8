"""Limits how many calls of one turn are made: the rest are answered with an error, so that the policy learns of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainer.parse.base import MAX_PROBLEMS, Reply
from trainer.rollout.settings import RolloutLimits

if TYPE_CHECKING:
    from trainer.template import Template


def limit_calls(reply: Reply, limits: RolloutLimits, template: Template) -> Reply:
    """The reply with the calls that are made; each further one is a problem, and is not in the chat's message.

    The limit is that of the settings or the template's own, since a message with more calls than the template writes
    could not be rendered again. The policy's ids stay as they are.
    """
    if len(reply.calls) <= 1:
        return reply
    known = [limit for limit in (limits.parallel_calls, template.max_calls) if limit is not None]
    limit = min(known, default=len(reply.calls))
    left_out = [
        f"{call.name} was not called: a turn may have {limit} {'call' if limit == 1 else 'calls'} at most."
        " Call it in your next turn."
        for call in reply.calls[limit:]
    ]
    return replace(reply, calls=reply.calls[:limit], problems=(*reply.problems, *left_out)[:MAX_PROBLEMS])
