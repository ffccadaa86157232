"""The run config as JSON Schema (draft 2020-12), for editors that complete and check a YAML or JSON file."""

from __future__ import annotations

import json
from typing import Any

from clap_zero.config.schema import RunConfig

DRAFT = "https://json-schema.org/draft/2020-12/schema"
ONE_IS_A_LIST = ("train", "val", "blacklist", "shards", "caption_templates")
"""Lists in whose place a single entry may stand."""


def run_config_schema() -> dict[str, Any]:
    """What a run config file may hold. Rules between keys, such as train.max_steps or train.epochs, are not in it."""
    schema = RunConfig.model_json_schema(mode="validation")
    del schema["required"]  # ds_config and the rest may come from the command line
    for section in ("DataSection", "DataSetSection"):
        properties = schema["$defs"][section]["properties"]
        for name in ONE_IS_A_LIST:
            if name in properties:
                properties[name] = _or_one(properties[name])
    return {"$schema": DRAFT, "title": "clap_zero run config", **_without_titles(schema)}


def _without_titles(node: Any, *, names: bool = False) -> Any:
    """Pydantic's titles repeat the keys. `names`: the mapping's keys are names, and one of them may be `title`."""
    if isinstance(node, list):
        return [_without_titles(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _without_titles(value, names=key in ("properties", "$defs") and not names)
        for key, value in node.items()
        if names or key != "title"
    }


def _or_one(field: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in field.items() if name in ("description", "unit", "default", "title")}
    array = {name: value for name, value in field.items() if name not in kept}
    return {**kept, "anyOf": [array, array["items"]]}


def schema_text() -> str:
    """The schema as it is printed and shipped."""
    return json.dumps(run_config_schema(), indent=2, ensure_ascii=False) + "\n"
