"""A seccomp filter for sandboxes, as a program for the kernel's BPF machine.

It refuses what no tool needs and what attacks on kernels begin with: keys, BPF, tracing, io_uring, new user namespaces,
the kernel's log, typing into a terminal; Internet sockets where a sandbox has no network; and what takes memory that
nothing counts without a control group. Other calls are the kernel's to judge.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from functools import cache

LOAD, EQUAL, AT_LEAST, AND_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, ARCHITECTURE_AT, FIRST_ARGUMENT_AT, SECOND_ARGUMENT_AT = 0, 4, 16, 24
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
NOT_PERMITTED, NO_SUCH_CALL, NOT_SUPPORTED, NO_SUCH_FAMILY = 1, 38, 95, 97
NO_CALL = REFUSE | NO_SUCH_CALL
NEW_USER = 0x10000000
X32 = 0x40000000
"""Numbers of the x32 interface begin there; they would get past a list of numbers."""
TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which type into a terminal."""
LOCAL_FAMILIES = (1,)
"""AF_UNIX."""
LOOPBACK_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK: with its own network namespace, these reach its own loopback interface."""
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CALLS: dict[str, dict[str, int]] = {
    "x86_64": {
        "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "add_key": 248,
        "request_key": 249, "keyctl": 250, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
        "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_by_handle_at": 304,
        "name_to_handle_at": 303, "setns": 308, "pidfd_getfd": 438, "syslog": 103,
    },
    "aarch64": {
        "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "add_key": 217,
        "request_key": 218, "keyctl": 219, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282,
        "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_by_handle_at": 265,
        "name_to_handle_at": 264, "setns": 268, "pidfd_getfd": 438, "syslog": 116,
    },
}  # fmt: skip
"""Numbers of the system calls that are refused."""
UNCOUNTED: dict[str, dict[str, int]] = {
    "x86_64": {"memfd_create": 319, "memfd_secret": 447, "msgget": 68, "semget": 64},
    "aarch64": {"memfd_create": 279, "memfd_secret": 447, "msgget": 186, "semget": 190},
}
"""Numbers of those that give memory which is in no folder, and may be in no process: files without a name, queues and
semaphores of System V (500 MB and 64 GB by the kernel's default limits). Databases and web servers need segments and
shared mappings, which stay."""
CHECKED: dict[str, dict[str, int]] = {
    "x86_64": {
        "socket": 41, "ioctl": 16, "clone": 56, "unshare": 272, "clone3": 435, "fallocate": 285,
        "prlimit64": 302,
    },
    "aarch64": {
        "socket": 198, "ioctl": 29, "clone": 220, "unshare": 97, "clone3": 435, "fallocate": 47,
        "prlimit64": 261,
    },
}  # fmt: skip
"""Numbers of those that depend on an argument, such as whose limits prlimit64 sets; of clone3, whose arguments cannot
be seen: clone does its work; and of fallocate, which takes a disk in no time: programs write instead, which is limited
in time."""


def has_filter() -> bool:
    """Whether the numbers of this machine's system calls are known."""
    return os.uname().machine in ARCHITECTURES


@cache
def filter_program(has_loopback: bool, counts_memory: bool = True) -> bytes:
    """The filter for this machine; `counts_memory`: a control group does."""
    machine = os.uname().machine
    calls, uncounted = CHECKED[machine], UNCOUNTED[machine]
    families = LOOPBACK_FAMILIES if has_loopback else LOCAL_FAMILIES
    refused_input = [step for value in TERMINAL_INPUT for step in _when(EQUAL, value, REFUSE | NOT_PERMITTED)]
    steps = [
        *_instruction(LOAD, ARCHITECTURE_AT),
        *_instruction(EQUAL, ARCHITECTURES[machine], 1, 0),
        *_instruction(RETURN, KILL),
        *_instruction(LOAD, NUMBER_AT),
        *(_when(AT_LEAST, X32, NO_CALL) if machine == "x86_64" else ()),
        *(step for number in CALLS[machine].values() for step in _when(EQUAL, number, REFUSE | NOT_PERMITTED)),
        *(step for number in uncounted.values() if not counts_memory for step in _when(EQUAL, number, NO_CALL)),
        *_when(EQUAL, calls["clone3"], NO_CALL),
        *_when(EQUAL, calls["fallocate"], REFUSE | NOT_SUPPORTED),
        *_for_call(calls["socket"], FIRST_ARGUMENT_AT, _only(families, NO_SUCH_FAMILY)),
        *_for_call(calls["ioctl"], SECOND_ARGUMENT_AT, refused_input),
        *_for_call(calls["clone"], FIRST_ARGUMENT_AT, _when(AND_BITS, NEW_USER, REFUSE | NOT_PERMITTED)),
        *_for_call(calls["unshare"], FIRST_ARGUMENT_AT, _when(AND_BITS, NEW_USER, REFUSE | NOT_PERMITTED)),
        *_for_call(calls["prlimit64"], FIRST_ARGUMENT_AT, _only((0,), NOT_PERMITTED)),
        *_instruction(RETURN, ALLOW),
    ]
    return b"".join(steps)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> Iterator[bytes]:
    yield struct.pack("=HBBI", code, if_true, if_false, value)


def _when(test: int, value: int, action: int) -> list[bytes]:
    """Ends with the action if the loaded word passes the test."""
    return [*_instruction(test, value, 0, 1), *_instruction(RETURN, action)]


def _only(values: tuple[int, ...], error: int) -> list[bytes]:
    """Allows these values of an argument."""
    tests = [step for value in values for step in _when(EQUAL, value, ALLOW)]
    return [*tests, *_instruction(RETURN, REFUSE | error)]


def _for_call(number: int, argument_at: int, steps: list[bytes]) -> list[bytes]:
    """Steps on the lower half of an argument of one call; the number is loaded again after them."""
    body = [*_instruction(LOAD, argument_at), *steps, *_instruction(RETURN, ALLOW)]
    return [*_instruction(EQUAL, number, 0, len(body)), *body]
