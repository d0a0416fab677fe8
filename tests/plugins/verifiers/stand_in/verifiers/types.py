"""What a client is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ClientConfig:
    api_base_url: str
    api_key_var: str
    timeout: float
    max_retries: int
