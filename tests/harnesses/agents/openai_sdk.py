# /// script
# dependencies = ["openai==3.57.0"]
# [tool.harness]
# dialect = "chat"
# ///
import json
import os
import sys

import openai


def look(where: str, times: int = 1) -> str:
    return f"{where}: nothing, {times} times"


PROPERTIES = {"where": {"type": "string"}, "times": {"type": "integer", "default": 1}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["where"]}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look somewhere.", "parameters": SCHEMA}}]

client = openai.OpenAI()
messages = [{"role": "system", "content": "You look."}]
for question in sys.argv[1:]:
    messages.append({"role": "user", "content": question})
    while True:
        with client.chat.completions.stream(model=os.environ["MODEL"], messages=messages, tools=TOOLS) as stream:
            message = stream.get_final_completion().choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            known = call.function.name == "look"
            result = look(**json.loads(call.function.arguments)) if known else "there is no such tool"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            break
print(message.content)
