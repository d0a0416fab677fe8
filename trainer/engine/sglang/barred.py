"""An id that may not be written is taken back and drawn anew, so that logprobs stay those before anything was barred.

A server's own way is to change the logits, and it tells logprobs of what it changed them to.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from trainer.engine.base import EngineError, Sampling, Written
from trainer.ledger import spelled

MOST = 256
"""Taken back in one turn: a policy that wants such ids as often has gone wrong."""
Write = Callable[[Sequence[int], Sampling], Awaitable[Written]]


async def unbarred(write: Write, ids: Sequence[int], sampling: Sampling) -> Written:
    """The likeliest ids are drawn once only: there the server bars them itself."""
    if not sampling.barred or not sampling.temperature:
        return await write(ids, sampling)
    done, logprobs, versions, first = list[int](), list[float](), list[int](), Written((), (), "abort")
    for taken in range(MOST):
        seed = None if sampling.seed is None else sampling.seed + taken
        stop_ids = (*sampling.stop_ids, *sampling.barred)
        left = sampling.max_tokens - len(done)
        part = await write((*ids, *done), replace(sampling, barred=(), stop_ids=stop_ids, max_tokens=left, seed=seed))
        first = first if taken else part
        back = bool(part.ids) and part.ids[-1] in sampling.barred
        done += part.ids[: len(part.ids) - back]
        logprobs += part.logprobs[: len(part.ids) - back]
        versions += part.versions[: len(part.ids) - back]
        if not back or part.stop == "abort":
            version, before = spelled(versions, part.version)
            return Written(tuple(done), tuple(logprobs), part.stop, version, first.cached, before, first.read)
    raise EngineError(f"the policy wrote ids {MOST} times in one turn that it may not write, as {sampling.barred[0]}")
