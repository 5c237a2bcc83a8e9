"""The field `response_format`: answers that are JSON, or JSON of a schema."""

from __future__ import annotations

from typing import Any

from hostring.integrations.llm.serve.guides import schema_grammar
from hostring.integrations.llm.serve.http.errors import invalid
from hostring.integrations.llm.serve.http.fields import BodyFields


def format_grammar(fields: BodyFields) -> str | None:
    """The grammar of the answer, in llguidance's form; None where any text will do.

    Raises:
        ApiError: the field is wrong.
    """
    found = fields.object("response_format")
    if found is None:
        return None
    kind = found.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return schema_grammar({"type": "object"})
    if kind != "json_schema":
        raise invalid(
            "response_format.type", f"'response_format.type' is {kind!r}; expected text, json_object or json_schema"
        )
    return schema_grammar(_schema(found.get("json_schema")))


def _schema(found: Any) -> dict[str, Any]:
    schema = found.get("schema") if isinstance(found, dict) else None
    if not isinstance(schema, dict):
        raise invalid("response_format.json_schema", "'response_format.json_schema' has no object 'schema'")
    return schema
