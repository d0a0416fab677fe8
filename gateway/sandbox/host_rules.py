"""The hosts that a sandbox may reach: names and ports as its settings list them, and addresses that are refused."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

WEB_PORTS = (80, 443)
NAME = re.compile(r"(?:\*\.)?[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?(?:\.[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?)*", re.ASCII)
MAX_NAME = 253
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
"""Addresses of version 6 by which those of version 4 are reached."""


@dataclass(frozen=True, slots=True)
class HostRule:
    """One entry of a list: `pypi.org`, `*.pypi.org`, `10.0.0.5:8080`, `[::1]:80`."""

    host: str
    ports: tuple[int, ...]

    def allows(self, host: str, port: int) -> bool:
        """Whether a name is meant; a star stands for one or more names before the rest."""
        is_host = host.endswith(self.host[1:]) if self.host.startswith("*.") else host == self.host
        return is_host and port in self.ports


def parse_rule(text: str) -> HostRule:
    """Reads an entry; raises ValueError."""
    host, port = split_port(text)
    return HostRule(normalize(host, is_rule=True), WEB_PORTS if port is None else (port,))


def split_port(text: str) -> tuple[str, int | None]:
    """The host and the port of `host:port`; an address of version 6 stands in brackets. Raises ValueError."""
    match = re.fullmatch(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::([0-9]{1,5}))?", text, re.ASCII)
    if match is None:
        raise ValueError(f"{text[:100]!r} is no host, or host and port")
    port = int(match[2]) if match[2] else None
    if port is not None and not 0 < port < 2**16:
        raise ValueError(f"{port} is no port")
    return match[1], port


def normalize(host: str, *, is_rule: bool = False) -> str:
    """A host in the one form in which it is compared; raises ValueError for what is no name and no address."""
    bare = host.removeprefix("[").removesuffix("]")
    if (address := parse_address(bare)) is not None and (address.version == 6) == (bare != host):
        return str(address)
    name = host.lower().removesuffix(".")
    if len(name) > MAX_NAME or not NAME.fullmatch(name) or (name.startswith("*") and not is_rule):
        raise ValueError(f"{host[:100]!r} is no name of a host")
    return name


def parse_address(text: str) -> Address | None:
    """An address, if the text is one."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


class HostRules:
    """A list of hosts."""

    def __init__(self, entries: Sequence[str]) -> None:
        self.rules = [parse_rule(entry) for entry in entries]

    def allows_name(self, host: str, port: int) -> bool:
        """Whether the list names a host."""
        return any(rule.allows(host, port) for rule in self.rules)

    def includes(self, entry: str) -> bool:
        """Whether all that an entry of another list names is in this one."""
        rule = parse_rule(entry)
        return all(self.allows_name(rule.host, port) for port in rule.ports)

    def allows_address(self, address: Address, port: int) -> bool:
        """Whether an address may be connected to: those of the Internet, and others only where the list has them.

        A name in the list may lead to an address of this machine or its network, by whoever owns the name.
        """
        if any(rule.host == str(address) and port in rule.ports for rule in self.rules):
            return True
        return all(each.is_global and not each.is_multicast for each in embedded_addresses(address))


def embedded_addresses(address: Address) -> list[Address]:
    """An address and that of version 4 which it stands for."""
    found: list[Address] = [address]
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in TRANSLATED:
            inner.append(ipaddress.IPv4Address(address.packed[-4:]))
        mapped = [each for each in inner if each is not None]
        return mapped if address.ipv4_mapped is not None else [*found, *mapped]
    return found
