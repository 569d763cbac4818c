"""The agents at work: one leads, two look things up for it, and its answer is the best of four.

lead (openai) --delegate--> a helper (anthropic): searches, finds a text with a photo, answers
              --delegate--> another one, at the same time
              --calculate-->
              four answers at once; the conversation goes on from the best one, under new weights
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import anthropic
import openai

from worker.demo.agent.clients import Agent, AgentCall, AgentTurn, AnthropicAgent, OpenAIAgent, ToolResult, tool
from worker.demo.agent.photo import photo
from worker.demo.agent.script import Line, Prompter, tool_call
from worker.demo.rollout import call

QUESTION = "How much higher is Mount Fuji than the Zugspitze?"
FOLLOW_UP = "And how do I get there?"
LEAD = "You lead. Helpers look things up for you."
HELP = "You look things up."
HEIGHTS = ("814", "3,776", "2,962")
DELEGATE = tool("delegate", "Ask a helper.", "about", "question")
CALCULATE = tool("calculate", "The difference of two numbers.", "expression")
SEARCH = tool("search", "Search.", "query")
FOUND = {
    "Zugspitze": "The Zugspitze is 2,962 m high. It is the highest mountain of Germany.",
    "Mount Fuji": "Mount Fuji is 3,776 m high. It is the highest mountain of Japan.",
}

# The sampling seeds were chosen for replies that make sense: with most seeds they do not.
_DELEGATIONS = [tool_call("delegate", about=mountain, question="How high is it?") for mountain in FOUND]
DELEGATING = Line("\n".join(["I need two heights.", *_DELEGATIONS]), seed=1)
CALCULATING = Line("Now the difference.\n" + tool_call("calculate", expression="3776 - 2962"), seed=2)
ANSWERS = tuple(Line("By 814 m: Mount Fuji is 3,776 m", seed, free=True) for seed in (71, 20, 39, 154))
GOING_ON = Line("Both have", seed=64, free=True)
LOOKING_UP = {
    "Zugspitze": (
        Line(tool_call("search", query="height of the Zugspitze"), seed=5),
        Line("In the photo it snows. The Zugspitze is 2,962 m", seed=144, free=True),
    ),
    "Mount Fuji": (
        Line(tool_call("search", query="height of Mount Fuji"), seed=6),
        Line("Mount Fuji is 3,776 m", seed=283, free=True),
    ),
}
FIRST_VERSION, NEW_VERSION = "1", "2"


@dataclass
class Played:
    """The demonstration's own knowledge of the session: turns and rewards by generation, and the reply of `/finalize`."""

    turns: dict[str, AgentTurn] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    trajectories: list[dict[str, Any]] = field(default_factory=list)


def reward(answer: str) -> float:
    """Return the share of the three numbers that an answer has."""
    return sum(number in answer for number in HEIGHTS) / len(HEIGHTS)


async def play(url: str, prompter: Prompter, on_news: Callable[[str], None]) -> Played:
    """Play a session and finalize it; call `on_news` with a sentence about each step. Raises CallError."""
    session = await _call(url, "/sessions", {})
    path = f"/sessions/{session['session_id']}"
    async with (
        openai.AsyncOpenAI(base_url=session["base_url"], api_key="none", max_retries=0) as for_lead,
        anthropic.AsyncAnthropic(base_url=session["anthropic_base_url"], api_key="none", max_retries=0) as for_helpers,
    ):
        lead = OpenAIAgent(for_lead, "lead", LEAD, (DELEGATE, CALCULATE), prompter)
        team = _Team(lambda about: AnthropicAgent(for_helpers, f"helper, {about}", HELP, (SEARCH,), prompter))
        on_news("the lead asks two helpers, who work at the same time")
        await team.work(lead, QUESTION, (DELEGATING, CALCULATING))
        on_news("the lead answers four times at once, and the best answer is kept")
        answers = await asyncio.gather(*(team.ask(lead, line) for line in ANSWERS))
        rewards = team.played.rewards = {turn.generation: reward(turn.text) for turn in answers}
        for generation, score in rewards.items():
            await _call(url, f"{path}/reward_info", {"reward_info": {"score": score}, "branch": generation})
        on_news(f"new weights, version {NEW_VERSION}, under the running session")
        await _call(url, "/update_weights_from_disk", {"model_path": "demo", "weight_version": NEW_VERSION})
        on_news("the conversation goes on from that answer")
        lead.messages.append(max(answers, key=lambda turn: rewards[turn.generation]).message)
        await team.work(lead, FOLLOW_UP, (GOING_ON,))
    team.played.trajectories = (await _call(url, f"{path}/finalize", {}))["trajectories"]
    return team.played


class _Team:
    def __init__(self, new_helper: Callable[[str], Agent]) -> None:
        self.played = Played()
        self._new_helper = new_helper
        self._numbers = count()

    async def ask(self, agent: Agent, line: Line) -> AgentTurn:
        turn = await agent.ask(line, next(self._numbers))
        self.played.turns[turn.generation] = turn
        return turn

    async def work(self, agent: Agent, question: str, lines: Sequence[Line]) -> str:
        """Run a tool-using agent through these lines; return its last words."""
        agent.messages.append({"role": "user", "content": question})
        for line in lines:
            turn = await self.ask(agent, line)
            agent.messages.append(turn.message)
            if turn.calls:
                results = await asyncio.gather(*map(self._use, turn.calls))
                agent.add_results(list(zip(turn.calls, results, strict=True)))
        return turn.text

    async def _use(self, call: AgentCall) -> ToolResult:
        match call.name, call.arguments:
            case "delegate", {"about": about, "question": question}:
                answer = await self.work(self._new_helper(about), f"{about}: {question}", LOOKING_UP[about])
                return ToolResult(answer)
            case "search", {"query": query}:
                found_of = (ToolResult(text, photo(about)) for about, text in FOUND.items() if about in query)
                return next(found_of, ToolResult("nothing found"))
            case "calculate", {"expression": expression} if found := re.fullmatch(r"(\d+) - (\d+)", expression):
                return ToolResult(str(int(found[1]) - int(found[2])))
        return ToolResult("this tool cannot do that")


async def _call(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    return (await asyncio.to_thread(call, url, path, body))[1]
