# /// script
# dependencies = ["browser-use==0.13.14"]
# [tool.harness]
# dialect = "chat"
# needs = "chromium"
# marks = "<agent_history>"
# trajectories = 4
# because = "each step is a prompt of its own, with a summary of the steps and the page as it is"
# replies = [
#   """ {"thinking":  "I look.", "evaluation_previous_goal": "", "memory": "\u0049 look.", "next_goal": "Look",
#  "action": [{"find_text": {"text":"not there" }}]}""",
#   """{"thinking": "I err.", "action": [{"wait": """,
#   """{"thinking":"It is done.","evaluation_previous_goal":"","memory":"","next_goal":"" ,
#  "action":[{"done": {"text": "Nowhere,  it is gone.", "success":true}}]}
# """,
#   """{"thinking": "They ask again.", "evaluation_previous_goal": "", "memory": "", "next_goal": "",
#  "action": [ {"done": {"text": "I am  sure.", "success": true}}]}""",
# ]
# ///
import asyncio
import http.server
import os
import shutil
import sys
import threading
from pathlib import Path

os.environ |= {"ANONYMIZED_TELEMETRY": "false", "BROWSER_USE_CLOUD_SYNC": "false"}
from browser_use import Agent, Browser, ChatOpenAI


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


Path("index.html").write_text("<p>It is not there.</p><a href=/>Look again</a>")


async def main() -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page = f"http://127.0.0.1:{server.server_address[1]}/"
    flags = {"headless": True, "chromium_sandbox": False, "enable_default_extensions": False}
    browser = Browser(executable_path=shutil.which("chromium"), keep_alive=True, **flags)
    opens = [{"navigate": {"url": page}}]
    model = ChatOpenAI(os.environ["MODEL"])
    agent = Agent(sys.argv[1], llm=model, browser=browser, use_vision=False, initial_actions=opens)
    told = await agent.run()
    for question in sys.argv[2:]:
        agent.add_new_task(question)
        told = await agent.run()
    await browser.kill()
    print(told.final_result())


asyncio.run(main())
