"""Settings of a sandbox: its network, the paths that exist inside, its environment, and its limits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import AfterValidator, Field, PositiveInt, model_validator

from gateway.config.base import FrozenModel, rule_error
from gateway.config.sections import make_sections
from gateway.sandbox.host_rules import parse_rule
from gateway.sandbox.provider_settings import ProviderSettings
from gateway.sandbox.sandbox_environment import NAME

PATHS = ("readable", "writable")
UNUSABLE = re.compile(r"[\0\ud800-\udfff]")
"""Characters that no file's name and no variable has."""
MAX_MB = 2**24
"""The kernel counts bytes, and more of them than its numbers have is no limit."""
NAME_OF_ROOT = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
Network = Literal["none", "loopback"] | tuple[str, ...]


def check_network(value: Network) -> Network:
    """Raises for entries that name no host."""
    for entry in value if isinstance(value, tuple) else ():
        try:
            parse_rule(entry)
        except ValueError as error:
            raise rule_error(str(error), "write names such as `pypi.org`, `*.pypi.org` or `10.0.0.5:8080`") from error
    return value


def check_environment(value: dict[str, str]) -> dict[str, str]:
    """Raises for variables that no shell passes on."""
    for name, text in value.items():
        if not NAME.fullmatch(name):
            problem = f"a variable's name has other characters than letters, digits and `_`: {name!r:.100}"
            raise rule_error(problem, "rename it in `env`, or remove it")
        if UNUSABLE.search(text):
            raise rule_error(f"a variable's value has a zero byte or half a character: {name}", "correct it in `env`")
    return value


def _check_paths(value: tuple[Path, ...]) -> tuple[Path, ...]:
    if any(UNUSABLE.search(str(path)) for path in value):
        raise rule_error("a path has a zero byte or half a character", "correct it")
    return value


if TYPE_CHECKING:
    ProviderSections = FrozenModel
else:
    ProviderSections = make_sections("ProviderSections", lambda plugin: plugin.sandboxes)


class SandboxSettings(ProviderSections):
    """What exists inside a sandbox, and how much of it."""

    root: Annotated[str, Field(pattern=f"^({NAME_OF_ROOT.pattern})?$")] = ""
    """A root file system instead of this machine's, by the name that `mtrl-gateway roots add` gave it. All of it can be
    written; what is written is in memory, and the sandbox's alone."""
    workdir: Annotated[str, Field(pattern="^(/.*)?$")] = ""
    """The folder in which tools of a sandbox with a `root` work; by default that of its image, or `/rollout`."""
    network: Annotated[Network, AfterValidator(check_network)] = "none"
    """`none`: no Internet sockets; `loopback`: a loopback interface of its own, which reaches nothing outside; a list
    of hosts, such as `[pypi.org, "*.pythonhosted.org", "10.0.0.5:8080"]`: these alone, through a proxy of the gateway.
    Ports are 80 and 443 where none is named; addresses that are not of the Internet must be in the list themselves."""
    network_mb: PositiveInt = 256
    """What may be sent to and received from these hosts."""
    readable: Annotated[tuple[Path, ...], AfterValidator(_check_paths)] = ()
    """Files and folders that can be read inside, besides the system's programs and Python; relative to the file."""
    writable: Annotated[tuple[Path, ...], AfterValidator(_check_paths)] = ()
    """Folders that can be written inside, by every sandbox with these settings."""
    env: Annotated[dict[str, str], AfterValidator(check_environment)] = {}
    """Environment variables, in addition to PATH, HOME and LANG."""
    memory_mb: Annotated[int, Field(ge=32, le=MAX_MB)] = 512
    """Memory of all processes together, with their files in memory; of each process where cgroups cannot be written."""
    processes: Annotated[int, Field(ge=1, le=4_000_000)] = 64
    """Processes and threads."""
    cpus: Annotated[float, Field(ge=0.01, le=10_000)] = 1.0
    """Processor cores; only where cgroups can be written."""
    control_groups: Literal["preferred", "required"] = "preferred"
    """`required`: where they cannot be written, no sandbox is started, rather than one with limits by process."""
    cpu_s: Annotated[int, Field(ge=1, le=10**9)] = 3600
    """CPU time of one process."""
    disk_mb: Annotated[int, Field(ge=1, le=MAX_MB)] = 256
    """Size of each of its folders in memory: `/rollout`, `/tmp` and `/dev/shm`; also of one file, and of what it adds
    to `writable` folders and to the folder of a server's rollout."""
    files: Annotated[int, Field(ge=1, le=2**31)] = 20_000
    """Files and folders in each of these, and that it adds to the others."""
    output_bytes: PositiveInt = 256 * 1024
    """What one call may print; a call that prints more is ended."""

    @model_validator(mode="after")
    def _check_provider(self) -> Self:
        named = [name for name in ProviderSections.model_fields if getattr(self, name) is not None]
        if len(named) > 1:
            raise rule_error(f"{' and '.join(f'`{name}`' for name in named)} exclude each other", "keep one of them")
        if self.workdir and not self.root:
            raise rule_error("`workdir` belongs to `root`", "name a `root`, or remove it")
        if self.provider is not None and not self.provider.is_local and (self.readable or self.writable):
            raise rule_error("paths of this machine do not exist on another one", "remove `readable` and `writable`")
        if self.provider is not None:
            self.provider.check(self)
        return self

    @property
    def provider(self) -> ProviderSettings | None:
        """The provider that is named instead of bubblewrap."""
        return next((given for name in ProviderSections.model_fields if (given := getattr(self, name))), None)

    @property
    def writes_root(self) -> bool:
        """Whether all of its files can be written, rather than folders in memory alone."""
        return bool(self.root) and (self.provider is None or not self.provider.is_local)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The list of hosts, if the network is one."""
        return self.network if isinstance(self.network, tuple) else ()


def check_is_local(settings: SandboxSettings) -> None:
    """Raises for a provider or a root that has only the tools `python`, `shell` and `files`."""
    if settings.root:
        raise rule_error(
            "`root` is for the tools `python`, `shell` and `files` only", "use `sandbox_tools`, or remove it"
        )
    if settings.provider is not None:
        problem = f"`{settings.provider.key}` runs the tools `python`, `shell` and `files` only"
        raise rule_error(problem, "use `sandbox_tools`, or remove it: bubblewrap runs this")
