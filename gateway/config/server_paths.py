"""Resolves the paths in a server's section of a servers file: its program, its working folder and its `envFile`."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic_core import PydanticCustomError

from gateway.config.entries import display_path
from gateway.config.environment import format_loc
from gateway.config.file_forms import ServerSection
from gateway.config.models import Server
from gateway.config.reader import read_text
from gateway.errors import ConfigError
from gateway.sandbox.sandbox_paths import resolve_paths
from gateway.sandbox.sandbox_settings import check_environment

ENV_LINE_PATTERN = re.compile(
    r"(?:export\s+)?(?P<name>[A-Za-z_][\w.]*)\s*="
    r"""\s*(?:"(?P<double>[^"]*)"|'(?P<single>[^']*)'|(?P<plain>.*?))(?:\s+\#.*)?"""
)

CLIENT_FOLDERS = frozenset(
    {
        *(".vscode", ".vs", ".cursor", ".gemini", ".zed", ".codex", ".roo", ".kiro", ".amazonq", ".junie"),
        *(".windsurf", ".claude", ".copilot", ".lmstudio"),
    }
)
"""Folders for a client's files in a project; relative paths in these are seen from the project."""


def project_folder(file: Path) -> Path:
    """The folder from which relative paths in a servers file are seen: its own, or the project of a client's folder."""
    for folder in file.parents[:2]:
        if folder.name in CLIENT_FOLDERS:
            return folder.parent
    return file.parent


def resolve_server(name: str, section: ServerSection, file: Path) -> tuple[Server, tuple[Path, ...]]:
    """The server of a section with absolute paths, and the further files that were read. Raises ConfigError."""
    fields, folder, place = section.server_fields(), project_folder(file), format_loc(("mcpServers", name))
    for key in ("cwd", "state", "states", "keep_state", "ca_file", "cert_file", "key_file"):
        if (path := getattr(section, key)) is not None and not str(path).startswith("${"):
            fields[key] = folder / path.expanduser()
    if "sandbox" in section.model_fields_set:
        fields["sandbox"] = resolve_paths(folder, section.sandbox, display_path(file), f"{place}.sandbox")
    if section.command is not None:
        fields["command"] = _resolve_program(section.command, folder)
    if section.auth_command:
        fields["auth_command"] = (_resolve_program(section.auth_command[0], folder), *section.auth_command[1:])
    if section.oauth is not None and section.oauth.private_key_file is not None:
        key_file = folder / section.oauth.private_key_file.expanduser()
        fields["oauth"] = section.oauth.model_copy(update={"private_key_file": key_file})
    if section.env_file is None:
        return Server(**fields), ()
    env_file = folder / section.env_file.expanduser()
    fields["env"] = read_env_file(env_file) | section.env
    if section.isolation == "sandbox":
        try:
            check_environment(fields["env"])
        except PydanticCustomError as error:
            field, context = f"{place}.envFile", error.context or {}
            raise ConfigError(
                str(context["problem"]), file=display_path(file), field=field, remedy=str(context["remedy"])
            ) from error
    return Server(**fields), (env_file,)


def _resolve_program(program: str, folder: Path) -> str:
    """A program; one that begins with `./`, `../` or `~/` is resolved against the folder."""
    is_path = program.startswith(("./", "../", "~/"))
    return str((folder / Path(program).expanduser()).resolve()) if is_path else program


def read_env_file(file: Path) -> dict[str, str]:
    """The variables of `NAME=value` lines; empty lines and comments are left out."""
    variables = {}
    for number, line in enumerate(read_text(file).splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = ENV_LINE_PATTERN.fullmatch(text)
        if match is None:
            remedy = "correct the line, or put `#` before it"
            raise ConfigError("is not `NAME=value`", file=f"{display_path(file)}:{number}", remedy=remedy)
        variables[match["name"]] = match["double"] or match["single"] or match["plain"] or ""
    return variables
