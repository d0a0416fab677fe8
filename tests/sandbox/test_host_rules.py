"""Which hosts a list names, which addresses may be connected to, and which requests a proxy reads."""

from __future__ import annotations

import ipaddress

import pytest

from gateway.sandbox.host_rules import HostRules
from gateway.sandbox.proxy_request import BadRequest, parse_request

RULES = HostRules(["pypi.org", "*.example.org:8443", "10.0.0.5:8080", "[::1]:80"])


@pytest.mark.parametrize(
    ("host", "port", "is_allowed"),
    [
        ("pypi.org", 443, True),
        ("pypi.org", 80, True),
        ("pypi.org", 22, False),
        ("evil-pypi.org", 443, False),
        ("pypi.org.evil.net", 443, False),
        ("a.b.example.org", 8443, True),
        ("example.org", 8443, False),
        ("notexample.org", 8443, False),
        ("10.0.0.5", 8080, True),
        ("::1", 80, True),
    ],
)
def test_names_and_ports_are_those_of_the_list(host: str, port: int, is_allowed: bool) -> None:
    assert RULES.allows_name(host, port) is is_allowed


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.0.0.1", "192.168.1.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254",
        "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::",
    ],
)  # fmt: skip
def test_addresses_that_are_not_of_the_internet_are_refused(address: str) -> None:
    assert not RULES.allows_address(ipaddress.ip_address(address), 80)


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1",
        b"GET https://pypi.org/ HTTP/1.1",
        b"GET http://user@pypi.org/ HTTP/1.1",
        b"GET http://pypi.org\\@evil.net/ HTTP/1.1",
        b"GET http://pypi.org /x HTTP/1.1",
        b"GET http://pypi.org/ HTTP/2.0",
        b"GET http://pypi.org/ HTTP/1.1\nHost: evil.net",
        b"GET http://pypi.org/ HTTP/1.1\r\nA: b\nHost: evil.net",
        b"GET http://pypi.org/ HTTP/1.1\r\nA: b\rHost: evil.net",
        b"GET http://pypi.org/ HTTP/1.1\r\n folded: x",
        b"GET http://pypi.org/ HTTP/1.1\r\nA : b",
        b"GET http://pypi.org/ HTTP/1.1\r\nno colon",
        b"GET http://pypi.org/ HTTP/1.1\r\nA: \x00",
        b"POST http://pypi.org/ HTTP/1.1\r\nTransfer-Encoding: chunked",
        b"POST http://pypi.org/ HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4",
        b"POST http://pypi.org/ HTTP/1.1\r\nContent-Length: +3",
        b"CONNECT pypi.org HTTP/1.1",
        b"CONNECT pypi.org:0 HTTP/1.1",
        b"CONNECT pypi.org:443:80 HTTP/1.1",
        b"CONNECT *.pypi.org:443 HTTP/1.1",
        b"CONNECT pypi.org\x00.evil.net:443 HTTP/1.1",
        b"CONNECT [pypi.org]:443 HTTP/1.1",
        b"CONNECT ::1:443 HTTP/1.1",
        "CONNECT pypi.\u043erg:443 HTTP/1.1".encode(),
        b"",
    ],
)
def test_requests_that_can_be_read_in_two_ways_are_not_read(head: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_request(head)
