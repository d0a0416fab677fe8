"""`mtrl-gateway import`: finds the servers of other MCP clients on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli import DEFAULT_SERVERS, app, errors_to_exit
from gateway.errors import GatewayError

if TYPE_CHECKING:
    from mtrl_plugins.client_files.import_servers import ServerImport


@app.command("import")
def import_servers(
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write this file; an existing one is not overwritten.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Write ./mcp_servers.json.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the servers file alone.")] = False,
) -> None:
    """Find the servers of other MCP clients (Claude, Cursor, VS Code, ...) on this machine and in this folder.

    Shows them, or writes them as one servers file, with environment variables in place of secrets.
    """
    from mtrl_plugins.client_files.import_servers import find_servers, write_servers_file

    with errors_to_exit():
        found = find_servers(Path.home(), Path.cwd())
        if json:
            sys.stdout.write(found.to_text())
        else:
            print_import(found)
        if file := out or (DEFAULT_SERVERS if write else None):
            if not found.servers:
                raise GatewayError("no server was found, so nothing is written")
            write_servers_file(found.to_text(), file.resolve())
            sys.stderr.write(f"wrote {file}; try: mtrl-gateway check --mcp {file}\n")
        elif found.servers and not json:
            sys.stderr.write("nothing was written: --write makes ./mcp_servers.json, --out FILE another file\n")


def print_import(found: ServerImport) -> None:
    """Prints the files of other clients, their servers, and what to do for them."""
    from rich.table import Table
    from rich.text import Text as Line

    from gateway.terminal import escape_control_codes, stdout_console

    console = stdout_console()
    for place, count in found.places:
        console.print(Line(f"{place.client}: {place.file} ({count} server{'' if count == 1 else 's'})"))
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("server", "how", "from"):
        table.add_column(column, overflow="fold")
    for server in found.servers:
        program = " ".join(
            str(word) for word in (server.section.get("command"), *server.section.get("args", ())) if word
        )
        cells = (server.name, str(server.section.get("url") or program), server.place.client)
        table.add_row(*(Line(escape_control_codes(cell)) for cell in cells))
    if found.servers:
        console.print(table)
    else:
        console.print(Line("no servers of other MCP clients were found"))
    for note in found.notes:
        console.print(Line(f"note {escape_control_codes(note)}"))
    for name, where in found.exports().items():
        console.print(Line(f"export {name}: its value is in {escape_control_codes(where)}"))
