#!/usr/bin/env bash
# Guess: a tool's JSON schema in verl's tool config reaches the prompt as it was written.
# Instead (verl 0.9.1): the classes of verl/tools/schemas.py know type, description and enum of a parameter. What else
# it has (items, default, limits, properties of an object) is dropped without a word; a parameter written with anyOf
# and no type is refused. Its agent loop puts the dump of these classes into the prompt.
# Hurts: the policy is trained on tools whose arrays and objects have no known content, and evaluated on whole
# schemas.
# Here: in a session, tools go into the template as the client wrote them.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check pydantic==2.14.4
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-deps verl==0.9.1
"$tmp/venv/bin/python" - "$tmp" <<'PY'
import importlib.util
import json
import sys
from importlib.metadata import version
from pathlib import Path

# The file alone: verl itself imports torch.
path = next(Path(sys.argv[1]).glob("venv/lib/python*/site-packages/verl/tools/schemas.py"))
spec = importlib.util.spec_from_file_location("schemas", path)
schemas = importlib.util.module_from_spec(spec)
spec.loader.exec_module(schemas)

PROPERTIES = {
    "queries": {"type": "array", "items": {"type": "string"}, "minItems": 1},
    "limit": {"type": "integer", "default": 10, "maximum": 50},
    "filter": {"type": "object", "properties": {"language": {"type": "string"}}},
}


def through(properties):
    parameters = {"type": "object", "properties": properties, "required": []}
    tool = {"type": "function", "function": {"name": "search", "description": "Search.", "parameters": parameters}}
    kept = schemas.OpenAIFunctionToolSchema.model_validate(tool).model_dump(exclude_unset=True, exclude_none=True)
    return kept["function"]["parameters"]["properties"]


kept = through(PROPERTIES)
print("verl", version("verl"))
for name, wanted in PROPERTIES.items():
    print(f"{name:8} {json.dumps(wanted)}\n      -> {json.dumps(kept[name])}")
try:
    through({"mode": {"anyOf": [{"type": "string"}, {"type": "null"}]}})
    refused = False
except ValueError as error:
    refused = True
    print("anyOf:", str(error).splitlines()[2].strip())
expected = {name: {"type": wanted["type"]} for name, wanted in PROPERTIES.items()}
sys.exit(0 if kept == expected and refused else "changed")
PY
