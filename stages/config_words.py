"""What the deploy configuration's schema allows, in words: keys and values by their places."""

from __future__ import annotations

from functools import cache
from typing import Any

from omni_engine.stages.config import DeployConfig
from omni_engine.stages.yaml_source import Loc

_NOUNS = {
    **{"integer": "an integer", "number": "a number", "string": "text", "array": "a list"},
    **{"boolean": "true or false", "object": "a mapping"},
}
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
_BOUNDS |= {"minItems": "with a length >="}


@cache
def _schema() -> dict[str, Any]:
    return DeployConfig.model_json_schema()


def _schema_at(loc: Loc) -> dict[str, Any]:
    node = _schema()
    for part in loc:
        node = _container(node)
        inside = node if isinstance(part, int) else node.get("properties", {})
        node = inside.get("items" if isinstance(part, int) else part, {})
    return node


def _container(node: dict[str, Any]) -> dict[str, Any]:
    node = node["anyOf"][0] if "anyOf" in node else node
    target: dict[str, Any] = _schema()["$defs"].get(node.get("$ref", "").rpartition("/")[2], node)
    return target


def known_keys(loc: Loc) -> list[str]:
    """Return the keys that the mapping at ``loc`` may have."""
    return list(_container(_schema_at(loc)).get("properties", {}))


def allowed(loc: Loc) -> str:
    """Return what the value at ``loc`` may be, in words: ``an integer >= 1 or null``."""
    node = _schema_at(loc)
    text = _in_words(_container(node))
    return f"{text}, or null" if "anyOf" in node else text


def _in_words(node: dict[str, Any]) -> str:
    if "enum" in node:
        return f"one of {', '.join(node['enum'])}"
    noun = node.get("wanted") or node.get("const") or _NOUNS.get(node.get("type", ""), "plain data")
    bounds = [f"{sign} {node[key]}" for key, sign in _BOUNDS.items() if key in node]
    return f"{noun} {' and '.join(bounds)}".strip()
