# /// script
# dependencies = ["litellm==1.110.2"]
# [tool.harness]
# dialect = "messages"
# ///
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm


def look(where: str, times: int = 1) -> str:
    """Look somewhere.

    Parameters
    ----------
    where : str
        The place.
    """
    return f"{where}: nothing, {times} times"


PROPERTIES = {"where": {"type": "string"}, "times": {"type": "integer", "default": 1}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["where"]}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look somewhere.", "parameters": SCHEMA}}]

messages = [{"role": "system", "content": "You look."}]
for question in sys.argv[1:]:
    messages.append({"role": "user", "content": question})
    while True:
        reply = litellm.completion(f"anthropic/{os.environ['MODEL']}", messages, tools=TOOLS, max_tokens=500)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            known = call.function.name == "look"
            result = look(**json.loads(call.function.arguments)) if known else "there is no such tool"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            break
print(message.content)
