"""The agents at work: one leads, two look things up for it, and its answer is the best of four.

lead (openai) --delegate--> a helper (anthropic): searches, answers
              --delegate--> another one, at the same time
              --calculate-->
              four answers at once; the one with the best reward is gone on with, under new weights
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import anthropic
import openai

from router.demo.agent_clients import Agent, AnthropicAgent, Called, OpenAIAgent, Tool, Turn
from router.demo.agent_lines import Line, Prompter, tool_call
from router.demo.conversations import call

QUESTION = "How much higher is Mount Fuji than the Zugspitze?"
ANOTHER = "And how do I get there?"
LEAD = "You lead. Helpers look things up for you."
HELP = "You look things up."
HEIGHTS = ("814", "3,776", "2,962")

DELEGATE = Tool("delegate", "Ask a helper.", ("about", "question"))
CALCULATE = Tool("calculate", "The difference of two numbers.", ("expression",))
SEARCH = Tool("search", "Search.", ("query",))
FOUND = {
    "Zugspitze": "The Zugspitze is 2,962 m high. It is the highest mountain of Germany.",
    "Mount Fuji": "Mount Fuji is 3,776 m high. It is the highest mountain of Japan.",
}

# The seeds of what is drawn were chosen for replies that are worth reading: most are not.
DELEGATING = Line(
    "I need two heights.\n"
    + tool_call("delegate", about="Zugspitze", question="How high is it?")
    + "\n"
    + tool_call("delegate", about="Mount Fuji", question="How high is it?"),
    seed=1,
)
CALCULATING = Line("Now the difference.\n" + tool_call("calculate", expression="3776 - 2962"), seed=2)
ANSWERS = tuple(Line("By 814 m: Mount Fuji is 3,776 m", seed, free=True) for seed in (71, 20, 39, 154))
GOING = Line("Both have", seed=64, free=True)
LOOKING = {
    "Zugspitze": (
        Line(tool_call("search", query="height of the Zugspitze"), seed=5),
        Line("The Zugspitze is 2,962", seed=73, free=True),
    ),
    "Mount Fuji": (
        Line(tool_call("search", query="height of Mount Fuji"), seed=6),
        Line("Mount Fuji is 3,776 m", seed=36, free=True),
    ),
}
FIRST_VERSION, NEW_VERSION = "1", "2"

_DIFFERENCE = re.compile(r"\s*(\d+)\s*-\s*(\d+)\s*")


@dataclass
class Played:
    """What the demonstration itself knows of the session.

    Attributes:
        turns: by generation.
        rewards: of the answers, by generation.
        trajectories: the answer of `/finalize`.
    """

    turns: dict[str, Turn] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    trajectories: list[dict[str, Any]] = field(default_factory=list)


def reward(answer: str) -> float:
    """How many of the three numbers an answer has."""
    return sum(number in answer for number in HEIGHTS) / len(HEIGHTS)


async def play(url: str, prompter: Prompter, tell: Callable[[str], None]) -> Played:
    """A session from its beginning to its trajectories. Raises CallError."""
    session = await _call(url, "/sessions", {})
    async with (
        openai.AsyncOpenAI(base_url=session["base_url"], api_key="none", max_retries=0) as ours,
        anthropic.AsyncAnthropic(base_url=session["anthropic_base_url"], api_key="none", max_retries=0) as theirs,
    ):
        team = _Team(url, session["session_id"], ours, theirs, prompter, tell)
        await team.work()
    finalized = await _call(url, f"/sessions/{session['session_id']}/finalize", {})
    team.played.trajectories = finalized["trajectories"]
    return team.played


class _Team:
    def __init__(
        self,
        url: str,
        session: str,
        ours: openai.AsyncOpenAI,
        theirs: anthropic.AsyncAnthropic,
        prompter: Prompter,
        tell: Callable[[str], None],
    ) -> None:
        self.played = Played()
        self._url = url
        self._session = session
        self._theirs = theirs
        self._prompter = prompter
        self._tell = tell
        self._asked = 0
        self._lead = OpenAIAgent(ours, "lead", LEAD, (DELEGATE, CALCULATE), prompter)

    async def work(self) -> None:
        lead = self._lead
        lead.hear(QUESTION)
        self._tell("the lead asks two helpers, who work at the same time")
        await self._loop(lead, (DELEGATING, CALCULATING), {"delegate": self._delegate, "calculate": _calculate})
        self._tell("the lead answers four times at once, and the best answer is kept")
        answers = await asyncio.gather(*(self._ask(lead, line) for line in ANSWERS))
        for turn in answers:
            self.played.rewards[turn.generation] = reward(turn.text)
        await asyncio.gather(*map(self._reward, answers))
        self._tell(f"new weights, version {NEW_VERSION}, under the running session")
        await _call(self._url, "/update_weights_from_disk", {"model_path": "demo", "weight_version": NEW_VERSION})
        lead.take(max(answers, key=lambda turn: self.played.rewards[turn.generation]))
        lead.hear(ANOTHER)
        self._tell("the conversation goes on from that answer")
        await self._ask(lead, GOING)

    async def _loop(
        self, agent: Agent, lines: Sequence[Line], tools: Mapping[str, Callable[[Called], Awaitable[str]]]
    ) -> Turn:
        """A tool-using agent: ask, call, tell what came of it, ask again. Ends with its lines, or with its calls."""
        for line in lines:
            turn = await self._ask(agent, line)
            agent.take(turn)
            if not turn.calls:
                break
            said = await asyncio.gather(*(tools.get(one.name, _unknown)(one) for one in turn.calls))
            agent.learn(list(zip(turn.calls, said, strict=True)))
        return turn

    async def _ask(self, agent: Agent, line: Line) -> Turn:
        number = self._asked
        self._asked += 1
        turn = await agent.ask(line)
        self.played.turns[turn.generation] = replace(turn, number=number)
        return turn

    async def _delegate(self, called: Called) -> str:
        about = str(called.arguments.get("about"))
        lines = LOOKING.get(about)
        if lines is None:
            return "no helper knows of this"
        helper = AnthropicAgent(self._theirs, f"helper, {about}", HELP, (SEARCH,), self._prompter)
        helper.hear(f"{about}: {called.arguments.get('question')}")
        return (await self._loop(helper, lines, {"search": _search})).text

    async def _reward(self, turn: Turn) -> None:
        info = {"score": self.played.rewards[turn.generation]}
        body = {"reward_info": info, "branch": turn.generation}
        await _call(self._url, f"/sessions/{self._session}/reward_info", body)


async def _call(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    return (await asyncio.to_thread(call, url, path, body))[1]


async def _search(called: Called) -> str:
    query = str(called.arguments.get("query"))
    return next((text for about, text in FOUND.items() if about in query), "nothing found")


async def _calculate(called: Called) -> str:
    found = _DIFFERENCE.fullmatch(str(called.arguments.get("expression")))
    return str(int(found[1]) - int(found[2])) if found else "this calculator can only subtract"


async def _unknown(called: Called) -> str:
    return f"there is no tool {called.name}"
