"""What an editor knows of our files is made from the models: `python -m gateway.config.schema --write`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from gateway.config.files import ServersFile, ToolsFile

HERE = Path(__file__).parent
SHIPPED: dict[Path, tuple[str, type[BaseModel]]] = {
    HERE / "tools.schema.json": ("mtrl tool_configs/*.yaml", ToolsFile),
    HERE / "servers.schema.json": ("mtrl mcp_servers.json", ServersFile),
}


class _Untitled(GenerateJsonSchema):
    """Titles made from field names say nothing that the names do not."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def schema(title: str, model: type[BaseModel]) -> dict[str, Any]:
    """The JSON Schema of a file."""
    made = model.model_json_schema(schema_generator=_Untitled)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made, "title": title}


def texts() -> dict[Path, str]:
    """Each shipped file and what stands in it."""
    return {file: json.dumps(schema(*parts), indent=2) + "\n" for file, parts in SHIPPED.items()}


def main() -> None:
    for file, text in texts().items():
        if "--write" in sys.argv:
            file.write_text(text)
        else:
            sys.stdout.write(text)


if __name__ == "__main__":
    main()
