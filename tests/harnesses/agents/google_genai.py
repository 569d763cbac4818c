# /// script
# dependencies = ["google-genai==3.6.1"]
# [tool.harness]
# dialect = "gemini"
# unknown = false
# ///
import os
import sys

from google import genai
from google.genai import types


def look(where: str, times: int) -> str:
    """Look somewhere.

    Args:
        where: the place.
        times: how often.
    """
    return f"nothing {where}, {times} times"


client = genai.Client(api_key="none", http_options=types.HttpOptions(base_url=os.environ["GOOGLE_GEMINI_BASE_URL"]))
config = types.GenerateContentConfig(tools=[look], system_instruction="You look.")
chat = client.chats.create(model=os.environ["MODEL"], config=config)
for question in sys.argv[1:]:
    answer = chat.send_message(question).text
print(answer)
