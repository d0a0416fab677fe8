"""Generates the JSON Schemas that editors use for our files: `python -m gateway.config.editor_schema --write`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from gateway.config.file_forms import ServersFile, ToolsFile

FOLDER = Path(__file__).parent
SCHEMA_FILES: dict[Path, tuple[str, type[BaseModel]]] = {
    FOLDER / "tools.schema.json": ("mtrl tool_configs/*.yaml", ToolsFile),
    FOLDER / "servers.schema.json": ("mtrl mcp_servers.json", ServersFile),
}


class _WithoutTitles(GenerateJsonSchema):
    """Leaves out the titles that pydantic makes from field names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def file_schema(title: str, model: type[BaseModel]) -> dict[str, Any]:
    """Generates the JSON Schema of a file's model."""
    schema = model.model_json_schema(schema_generator=_WithoutTitles)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": title}


def schema_texts() -> dict[Path, str]:
    """The text of each shipped schema file."""
    return {file: json.dumps(file_schema(*parts), indent=2) + "\n" for file, parts in SCHEMA_FILES.items()}


def main() -> None:
    """Prints the schemas, or writes them with `--write`."""
    for file, text in schema_texts().items():
        if "--write" in sys.argv:
            file.write_text(text)
        else:
            sys.stdout.write(text)


if __name__ == "__main__":
    main()
