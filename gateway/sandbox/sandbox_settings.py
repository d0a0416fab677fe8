"""Settings of a sandbox: its network, the paths that exist inside, its environment, and its limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from gateway.config.base import FrozenModel, rule_error

PATHS = ("readable", "writable")
Network = Literal["none", "loopback"]


def _check_network(value: Any) -> Any:
    if isinstance(value, list | tuple | dict):
        remedy = "write `none` or `loopback`; let a tool of your own outside the sandbox fetch what is needed"
        raise rule_error("a list of hosts is not supported", remedy)
    return value


class SandboxSettings(FrozenModel):
    """What exists inside a sandbox, and how much of it."""

    network: Annotated[Network, BeforeValidator(_check_network, json_schema_input_type=Network)] = "none"
    """`none`: no Internet sockets; `loopback`: a loopback interface of its own, which reaches nothing outside."""
    readable: tuple[Path, ...] = ()
    """Files and folders that can be read inside, besides the system's programs and Python; relative to the file."""
    writable: tuple[Path, ...] = ()
    """Folders that can be written inside, by every sandbox with these settings."""
    env: dict[str, str] = {}
    """Environment variables, in addition to PATH, HOME and LANG."""
    memory_mb: Annotated[int, Field(ge=32)] = 512
    """Memory of all processes together, with their files in memory; of each process where cgroups cannot be written."""
    processes: PositiveInt = 64
    """Processes and threads."""
    cpus: PositiveFloat = 1.0
    """Processor cores; only where cgroups can be written."""
    control_groups: Literal["preferred", "required"] = "preferred"
    """`required`: where they cannot be written, no sandbox is started, rather than one with limits by process."""
    cpu_s: PositiveInt = 3600
    """CPU time of one process."""
    disk_mb: PositiveInt = 256
    """Size of each of its folders in memory: `/rollout`, `/tmp` and `/dev/shm`; also of one file, and of what it adds
    to `writable` folders and to the folder of a server's rollout."""
    files: PositiveInt = 20_000
    """Files and folders in each of these, and that it adds to the others."""
    output_bytes: PositiveInt = 256 * 1024
    """What one call may print; a call that prints more is ended."""


def in_folder(folder: Path, settings: SandboxSettings) -> SandboxSettings:
    """The settings with absolute paths: those of a file are relative to its folder."""
    update = {name: tuple(folder / path.expanduser() for path in getattr(settings, name)) for name in PATHS}
    return settings.model_copy(update=update)
