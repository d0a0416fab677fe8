"""Models of how the gateway proves itself to an MCP server: OAuth, and what answers a server's questions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, model_validator

from gateway.config.base import FrozenModel, rule_error

Grant = Literal["authorization_code", "client_credentials"]
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")

Scope = Annotated[str, Field(pattern=r"^[\x21\x23-\x5b\x5d-\x7e]+$")]


def _check_web_address(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise rule_error("this is not an HTTP address", "begin it with https://")
    return value


def _check_loopback_redirect(value: str) -> str:
    parts = urlsplit(value)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "http" or parts.hostname not in LOOPBACK_HOSTS or not port or parts.query or parts.fragment:
        remedy = "write it as http://127.0.0.1:8912/callback, as it is registered"
        raise rule_error("a redirect URI is an address of this machine with a port", remedy)
    return value


def _check_metadata_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme != "https" or not parts.hostname or parts.path in ("", "/"):
        remedy = "serve the document at an address such as https://example.org/mtrl-client.json"
        raise rule_error("a client metadata document has an https address with a path", remedy)
    return value


class OAuth(FrozenModel):
    """How the gateway gets OAuth tokens for a server. Every field has a default that most servers accept."""

    grant: Grant = "authorization_code"
    """`authorization_code`: a person logs in with `mtrl-gateway login`; `client_credentials`: nobody has to."""
    client_id: str | None = None
    """Id of a client that is registered already; by default, the gateway registers itself."""
    client_secret: SecretStr | None = None
    """Secret of that client."""
    private_key: SecretStr | None = None
    """Private key (PEM) that signs a JWT in place of a secret; for `client_credentials`."""
    private_key_file: Path | None = None
    """File with that private key, relative to this file."""
    scopes: tuple[Scope, ...] = ()
    """Scopes to ask for; by default, those that the server names."""
    issuer: Annotated[str, AfterValidator(_check_web_address)] | None = None
    """The only authorization server that may get a login; by default, the one that the server names. A secret or a
    key needs it, so that it goes nowhere else."""
    client_metadata_url: Annotated[str, AfterValidator(_check_metadata_url)] | None = None
    """Address of a client ID metadata document of yours, used as the client id where that is supported."""
    redirect_uri: Annotated[str, AfterValidator(_check_loopback_redirect)] | None = None
    """Where a login returns to on this machine, if it is registered; by default, a free port of 127.0.0.1."""

    @model_validator(mode="after")
    def _check_client(self) -> OAuth:
        key = self.private_key is not None or self.private_key_file is not None
        if self.private_key is not None and self.private_key_file is not None:
            raise rule_error("`private_key` and `private_key_file` exclude each other", "give one of the two")
        if key and self.client_secret is not None:
            raise rule_error("a client has either a secret or a private key", "give one of the two")
        if self.client_id is None and (key or self.client_secret is not None):
            raise rule_error("a secret or key without the client that it belongs to", "give its `client_id`")
        if self.grant == "client_credentials" and not (key or self.client_secret is not None):
            remedy = "give `client_id` with `client_secret` or `private_key_file`"
            raise rule_error("`grant: client_credentials` needs a client's own credentials", remedy)
        if key and self.grant != "client_credentials":
            raise rule_error("a private key is for jobs without a person", "set `grant: client_credentials`")
        if self.issuer is None and (key or self.client_secret is not None):
            remedy = "name the authorization server that it is for: `issuer: https://login.example.org`"
            raise rule_error("a secret or key without an issuer would go to whatever the server names", remedy)
        return self


Answers = Literal["decline", "defaults", "interaction"] | dict[str, Any]
"""What answers a server's question (elicitation) when nobody is behind a call."""
