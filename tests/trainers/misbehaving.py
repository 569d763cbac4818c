"""What an agent may do in its session beside its turns: the tests of several plugs end their agents with it."""

from __future__ import annotations

import sys
from typing import Any

import aiohttp


async def misbehave(base_url: str, how: str, prompt: Any) -> None:
    """Do what `how` names, if it is among these.

    `inexact`: a turn whose parent nobody knows. `scored`: the agent's own reward, 0.25. `lost`: the session is deleted.
    `raises`: the agent fails. `exits`: it ends the process, as the main function of a program does.
    """
    http = aiohttp.ClientSession()
    async with http:
        if how == "inexact":
            headers, body = {"x-parent-generation": "nobody"}, {"messages": prompt}
            async with http.post(f"{base_url}/v1/chat/completions", json=body, headers=headers) as answer:
                assert answer.status == 200
        if how == "scored":
            async with http.post(f"{base_url}/reward_info", json={"reward_info": {"score": 0.25}}) as answer:
                assert answer.status == 200
        if how == "lost":
            async with http.delete(base_url) as answer:
                assert answer.status == 200
    if how == "raises":
        raise RuntimeError("it cannot")
    if how == "exits":
        sys.exit(3)
