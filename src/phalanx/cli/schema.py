"""The JSON schema of recipes, for editors: what `phalanx settings --schema FILE` writes.

An editor with TOML support (taplo, Even Better TOML) then completes settings, shows their meaning and marks what is wrong. A recipe names it in its first line: `#:schema ./recipe.schema.json`.
"""

from __future__ import annotations

from typing import Any

from phalanx.core.rules import LIMITS
from phalanx.core.settings import Setting, describe_settings, section_docs

TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def recipe_schema() -> dict[str, Any]:
    """Draft-07, which editors know best. Rules between settings are not in it: the dry run says those."""
    sections: dict[str, Any] = {
        name: {"type": "object", "description": doc, "additionalProperties": False, "properties": {}}
        for name, doc in section_docs().items()
    }
    for setting in describe_settings():
        sections[setting.section]["properties"][setting.key] = _of(setting)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A recipe of Phalanx",
        "type": "object",
        "additionalProperties": False,
        "properties": sections,
    }


def _of(setting: Setting) -> dict[str, Any]:
    one: dict[str, Any] = {"type": TYPES[setting.base]}
    if setting.choices:
        one = {"enum": list(setting.choices)}
    limit = LIMITS.get(setting.name)
    if limit is not None and not setting.choices:
        bounds = {
            "minimum": limit.least,
            "maximum": limit.most,
            "exclusiveMinimum": limit.above,
            "exclusiveMaximum": limit.below,
        }
        one |= {name: bound for name, bound in bounds.items() if bound is not None}
    if setting.many:
        one = {"type": "array", "items": one}
        if setting.words:
            one = {"anyOf": [one, {"enum": list(setting.words)}]}
    return {"description": setting.doc, **one, **({} if setting.default is None else {"default": setting.default})}
