# /// script
# dependencies = ["anthropic==2.14.0"]
# [tool.harness]
# dialect = "messages"
# ///
import os
import sys

import anthropic


def look(where: str, times: int = 1) -> str:
    return f"{where}: nothing, {times} times"


PROPERTIES = {"where": {"type": "string"}, "times": {"type": "integer", "default": 1}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["where"]}
TOOLS = [{"name": "look", "description": "Look somewhere.", "input_schema": SCHEMA}]

client = anthropic.Anthropic()
messages = []
for question in sys.argv[1:]:
    messages.append({"role": "user", "content": question})
    while True:
        asked = {"model": os.environ["MODEL"], "system": "You look.", "max_tokens": 500}
        with client.messages.stream(messages=messages, tools=TOOLS, **asked) as stream:
            message = stream.get_final_message()
        messages.append({"role": "assistant", "content": message.content})
        used = [block for block in message.content if block.type == "tool_use"]
        if not used:
            break
        results = [look(**one.input) if one.name == "look" else "there is no such tool" for one in used]
        blocks = [
            {"type": "tool_result", "tool_use_id": one.id, "content": result}
            for one, result in zip(used, results, strict=True)
        ]
        messages.append({"role": "user", "content": blocks})
print(message.content[-1].text)
