"""Builds the credentials that a server's configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.config.models import Server
from gateway.mcp_client.auth.auth_command import CommandCredentials
from gateway.mcp_client.auth.credentials import AuthError, Challenge, Credentials
from gateway.mcp_client.auth.oauth_credentials import JobCredentials, PersonCredentials
from gateway.mcp_client.auth.oauth_http import GetClient


def build_credentials(name: str, config: Server, get_client: GetClient) -> Credentials | None:
    """The credentials of a server; None if its headers are fixed, or it is a child process."""
    if config.url is None or config.auth_token is not None:
        return None
    if config.auth_command:
        return CommandCredentials(config.auth_command, config.auth_refresh_s)
    if any(header.lower() == "authorization" for header in config.headers):
        return None
    if config.oauth is not None and config.oauth.grant == "client_credentials":
        return JobCredentials(name, config.url, config.oauth, get_client)
    return PersonCredentials(name, config.url, config.oauth, get_client)


class NoCredentials(Credentials):
    """Sends requests as they are, and keeps what a refusal asks for: the first step of a login."""

    def __init__(self) -> None:
        super().__init__()
        self.challenge: Challenge | None = None

    def needs_renewal(self) -> bool:
        return False

    async def fetch(self, challenge: Challenge | None) -> Mapping[str, str]:
        self.challenge = challenge or self.challenge
        raise AuthError("it asks for a login")
