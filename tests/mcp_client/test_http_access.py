"""How servers are reached: through a proxy, with a private authority, with a client's certificate."""

from __future__ import annotations

import datetime
import ipaddress
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from anyio.abc import ByteStream
from anyio.streams.tls import TLSListener
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from gateway.errors import ConfigError
from gateway.gateway import Gateway
from gateway.mcp_client.http_client import HttpClients, send_request
from gateway.types import ToolCall
from tests.live_server import live_server_async
from tests.toolset_conformance.sample_tools import sample_sources
from tests.waiting import PATIENCE_S


@dataclass
class Certificates:
    """A private authority, and the PEM files of a server and of a client that it signed."""

    folder: Path
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    def __post_init__(self) -> None:
        self.sign("ca", self.key)
        for name in ("server", "client"):
            self.sign(name, ec.generate_private_key(ec.SECP256R1()))

    def sign(self, name: str, key: ec.EllipticCurvePrivateKey) -> None:
        subject, issuer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (name, "ca"))
        now = datetime.datetime.now(datetime.UTC)
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        certificate = (
            x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=name == "ca", path_length=None), critical=True)
            .add_extension(address, critical=False)
            .sign(self.key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        (self.folder / f"{name}.pem").write_bytes(certificate.public_bytes(pem))
        (self.folder / f"{name}-key.pem").write_bytes(key.private_bytes(pem, *plain))


async def relay(first: ByteStream, second: ByteStream) -> None:
    """Passes bytes both ways until either side ends."""

    async def one_way(source: ByteStream, target: ByteStream) -> None:
        try:
            async for chunk in source:
                await target.send(chunk)
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, ssl.SSLError):
            pass
        tasks.cancel_scope.cancel()

    async with first, second, anyio.create_task_group() as tasks:
        tasks.start_soon(one_way, first, second)
        tasks.start_soon(one_way, second, first)


@asynccontextmanager
async def reached_over_tls(folder: Path) -> AsyncIterator[tuple[dict[str, Any], list[bytes]]]:
    """Serves a gateway that asks for a certificate, and a proxy; gives the entry, and heads that the proxy got."""
    Certificates(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server-key.pem")
    context.load_verify_locations(folder / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    heads: list[bytes] = []

    async with live_server_async(lambda: Gateway(sample_sources())) as server:
        port = int(server.url.rpartition(":")[2])

        async def to_gateway(stream: ByteStream) -> None:
            await relay(stream, await anyio.connect_tcp("127.0.0.1", port))

        async def to_target(stream: ByteStream) -> None:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += await stream.receive()
            heads.append(head)
            target = await anyio.connect_tcp("127.0.0.1", int(head.split()[1].rpartition(b":")[2]))
            await stream.send(b"HTTP/1.1 200 Connected\r\n\r\n")
            await relay(stream, target)

        plain = await anyio.create_tcp_listener(local_host="127.0.0.1")
        secure = TLSListener(plain, context, standard_compatible=False)
        proxy = await anyio.create_tcp_listener(local_host="127.0.0.1")
        async with secure, proxy, anyio.create_task_group() as tasks:
            tasks.start_soon(partial(secure.serve, to_gateway))
            tasks.start_soon(partial(proxy.serve, to_target))
            numbers = [each.extra(anyio.abc.SocketAttribute.local_port) for each in (plain, proxy)]
            entry = {
                "url": f"https://127.0.0.1:{numbers[0]}/mcp",
                "proxy": f"http://user:word@127.0.0.1:{numbers[1]}",
                "ca_file": "ca.pem",
                "cert_file": "client.pem",
                "key_file": "client-key.pem",
                "transport": "streamable-http",
            }
            with anyio.fail_after(PATIENCE_S):
                yield entry, heads
            tasks.cancel_scope.cancel()


def write_servers(folder: Path, entry: dict[str, Any]) -> Path:
    file = folder / "mcp_servers.json"
    file.write_text(json.dumps({"mcpServers": {"far": entry}}))
    return file


async def test_server_is_reached_through_a_proxy_with_a_private_authority_and_a_certificate(tmp_path: Path) -> None:
    async with reached_over_tls(tmp_path) as (entry, heads):
        async with Gateway.load(None, write_servers(tmp_path, entry)) as gateway, gateway.open() as session:
            result = await session.call(ToolCall("1", "add", '{"a": 1, "b": 2}'))
        assert result.text == "3", result
        assert heads and all(head.startswith(b"CONNECT 127.0.0.1:") for head in heads)
        assert all(b"Proxy-Authorization: Basic dXNlcjp3b3Jk" in head for head in heads)


@pytest.mark.parametrize(("without", "reason"), [("ca_file", "self-signed"), ("cert_file", "cannot be started")])
async def test_server_is_not_reached_without(
    tmp_path: Path, without: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with reached_over_tls(tmp_path) as (entry, _):
        left = {
            key: value
            for key, value in entry.items()
            if key not in (without, "proxy") and (without, key) != ("cert_file", "key_file")
        }
        async with Gateway.load(None, write_servers(tmp_path, left)) as gateway:
            assert not gateway.specs
    assert reason in caplog.text


async def test_certificate_is_shown_to_the_servers_own_origin_alone(tmp_path: Path) -> None:
    async with reached_over_tls(tmp_path) as (entry, _):
        plan_gateway = Gateway.load(None, write_servers(tmp_path, entry | {"url": "https://127.0.0.1:1/mcp"}))
        server = plan_gateway.servers[0].server
        clients = HttpClients()
        other = await clients.for_server(server.model_copy(update={"proxy": None}))(entry["url"])
        with pytest.raises(httpx2.TransportError):
            await send_request(other, "GET", httpx2.URL(entry["url"]), {}, None)
        await clients.aclose()


@pytest.mark.parametrize(("name", "content"), [("cert_file", "no PEM"), ("ca_file", None)])
def test_file_that_cannot_be_used_is_named_at_the_start(tmp_path: Path, name: str, content: str | None) -> None:
    if content is not None:
        (tmp_path / "file.pem").write_text(content)
    with pytest.raises(ConfigError, match=rf"(?s){name}.*file\.pem cannot be used.*remedy"):
        Gateway.load(None, write_servers(tmp_path, {"url": "https://127.0.0.1:1/mcp", name: "file.pem"}))
