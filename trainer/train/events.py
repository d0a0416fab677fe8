"""TensorBoard's file of scalars takes a page of code, so that nobody has to install 50 MB in order to be able to look.

A file is records, and a record is its length, the length's checksum, its bytes, and their checksum. The bytes are an
`Event` in protobuf's encoding: the wall time, the step, and for scalars a summary of named 32-bit numbers.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

VERSION = b"brain.Event:2"
POLYNOMIAL, MASK, WORD = 0x82F63B78, 0xA282EAD8, 0xFFFFFFFF
VARINT, DOUBLE, BYTES, FLOAT = 0, 1, 2, 5
"""Wire types of protobuf."""
START = b"\x08\x01"
"""A session's log that says: begun."""
MOST = 3.4e38
"""Larger numbers have no room in 32 bits."""


def _table() -> Iterator[int]:
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (POLYNOMIAL if crc & 1 else 0)
        yield crc


TABLE = tuple(_table())


class Events:
    """One file of a run; every start makes its own, and steps that an earlier one told are told anew."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        seconds, rest = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010}.{socket.gethostname()}.{os.getpid()}.{rest:09}"
        self._file = (folder / name).open("ab", buffering=0)
        self._file.write(_record(_event(0, _field(3, BYTES, VERSION))))
        self._begun = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        scalars = (
            _field(1, BYTES, name.encode()) + _field(2, FLOAT, max(-MOST, min(MOST, value)))
            for name, value in metrics.items()
        )
        event = _event(step, _field(5, BYTES, b"".join(_field(1, BYTES, scalar) for scalar in scalars)))
        begun = b"" if self._begun else _record(_event(step, _field(7, BYTES, START)))
        self._file.write(begun + _record(event))
        self._begun = True

    def close(self) -> None:
        self._file.close()


def _event(step: int, what: bytes) -> bytes:
    return _field(1, DOUBLE, time.time()) + _field(2, VARINT, step) + what


def _field(number: int, kind: int, value: float | bytes) -> bytes:
    key = _varint(number << 3 | kind)
    match kind, value:
        case 2, bytes():
            return key + _varint(len(value)) + value
        case 0, int():
            return key + _varint(value)
        case _:
            return key + struct.pack("<d" if kind == DOUBLE else "<f", value)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    """CRC-32C, turned and shifted as the format wants it: a checksum of checksums would be weak."""
    crc = WORD
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= WORD
    return struct.pack("<I", ((crc >> 15 | crc << 17) + MASK) & WORD)
