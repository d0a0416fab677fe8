"""Tapes: recordings of a gateway's requests and answers, which can be replayed without the gateway.

A tape is a folder that can be moved and copied as one thing:

    TAPE/tape.jsonl        one JSON object per line, in the order in which requests ended
    TAPE/blobs/<sha256>    every image, audio clip, video and document, once

`tape.jsonl` begins with a header (`kind: tape`, the format, mtrl's version, the tools offered). Then come `specs` (a
list of tools that differs from those before it), `open` (a session and its task; `unopened` if opening it failed),
`call`, `feedback`, `finish` (the final rewards) and `close`. Each request contains a digest of all earlier requests
of its session (`after`).
"""

from __future__ import annotations

from gateway.tape.record import RecordedGateway as RecordedGateway
from gateway.tape.record import record_gateway as record_gateway
from gateway.tape.replay import ReplayGateway as ReplayGateway
