#!/usr/bin/env bash
# Guess: a response object that OpenAI's own SDK accepts is a response object by the Open Responses types, which
# describe the same API.
# Instead (openresponses-types 2.4.0, openai 3.57.0 for Python): 22 fields that the SDK's type lets out are required
# there (as null at least), such as completed_at, instructions and presence_penalty. A function_call needs a status
# there and not in the SDK, and a custom_tool_call, which coding agents use, is no item at all.
# Hurts: servers tested with the SDK only: clients made from the Open Responses schema refuse the whole reply, so the
# rollout ends behind a turn that was sampled well.
# Here: replies have all of these fields.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check openresponses-types==2.4.0 openai==3.57.0
"$tmp/venv/bin/python" - <<'PY'
import sys
from importlib.metadata import version

from openai.types.responses import Response
from openresponses_types.types import ResponseResource
from pydantic import ValidationError

CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "look", "arguments": "{}"}
CUSTOM = {"type": "custom_tool_call", "id": "ct_1", "call_id": "call_1", "name": "patch", "input": "x"}
RESPONSE = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "status": "completed", "output": []}
RESPONSE |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}


def accepted(kind, response):
    try:
        kind.model_validate(response)
    except ValidationError as error:
        return [found["loc"][0] for found in error.errors() if found["type"] == "missing" and len(found["loc"]) == 1]
    return True


missing = accepted(ResponseResource, RESPONSE)
full = dict.fromkeys(missing) | {"truncation": "disabled", "text": {"format": {"type": "text"}}, "metadata": {}} | RESPONSE
full |= dict.fromkeys(("temperature", "top_p"), 1) | dict.fromkeys(("presence_penalty", "frequency_penalty", "top_logprobs"), 0)
full |= {"store": False, "background": False, "service_tier": "default"}
items = {"function_call": CALL, "function_call with a status": CALL | {"status": "completed"}, "custom_tool_call": CUSTOM}
print("openresponses-types", version("openresponses-types"), "openai", version("openai"))
print("the SDK accepts the smallest response:", accepted(Response, RESPONSE))
print("Open Responses also wants", len(missing), "fields:", ", ".join(missing))
seen = [accepted(Response, RESPONSE), len(missing), accepted(ResponseResource, full)]
for name, item in items.items():
    response = full | {"output": [item]}
    seen.append((accepted(Response, response) is True, accepted(ResponseResource, response) is True))
    print(f"{name}: the SDK accepts it: {seen[-1][0]}, Open Responses: {seen[-1][1]}")
sys.exit("changed" if seen != [True, 22, True, (True, False), (True, True), (True, False)] else 0)
PY
