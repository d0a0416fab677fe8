"""A tape holds what a gateway was asked and what it answered, so that the same questions can be answered without it.

A tape is a folder that can be moved and copied as one thing:

    TAPE/tape.jsonl        one JSON object per line, in the order in which things ended
    TAPE/blobs/<sha256>    every picture, sound, film and document, once

`tape.jsonl` begins with a header (`kind: tape`, the format, mtrl's version, the tools offered). Then come `specs` (a
list of tools that differs from those before it), `open` (a session and its task; `unopened` where it was refused one),
`call`, `feedback`, `finish` (the rewards of the end) and `close`. Each question says what was asked in its session
before it, as one digest (`after`).
"""

from __future__ import annotations

from gateway.tape.read import Summary as Summary
from gateway.tape.read import describe as describe
from gateway.tape.record import Recorded as Recorded
from gateway.tape.record import recorded as recorded
from gateway.tape.replay import Replay as Replay
