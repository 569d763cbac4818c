"""Loops that build the text themselves: slime's search loop and three ReAct loops.

Each reimplements the string handling of the code it is named after; the searches are canned.
"""

import re
from typing import Any

from langchain_classic.agents import AgentExecutor, create_react_agent
from langchain_core.prompts import PromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from proxy import post

INVALID = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
DOCUMENTS = 'Doc 1(Title: "Lyon") Lyon lies on the Rhone.\nDoc 2(Title: "Saone") A river of France.\n'

REACT = """Answer the following questions as best you can. You have access to the following tools:

{tools}

Use the following format:

Question: the input question you must answer
Thought: you should always think about what to do
Action: the action to take, should be one of [{tool_names}]
Action Input: the input to the action
Observation: the result of the action
... (this Thought/Action/Action Input/Observation can repeat N times)
Thought: I now know the final answer
Final Answer: the final answer to the original input question

Begin!

Question: {input}
Thought:{agent_scratchpad}"""


def slime_search(url: str, question: str, turns: int, cut: bool, stop: list[str] | None) -> str:
    """slime's examples/search-r1: `cut` is postprocess_responses, which it leaves out where it collects logprobs.

    Sampling parameters as slime sets them: special tokens are kept in the text, stop strings are not trimmed.
    Returns prompt + response, the text a trajectory is asked for in the end.
    """
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    sampling: dict[str, Any] = {
        "max_new_tokens": 400,
        "temperature": 1.0,
        "stop": stop,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    response = ""
    for _ in range(turns):
        output = post(url + "/generate", {"text": prompt + response, "sampling_params": sampling})
        reply = output["text"]
        if cut:
            for tag in ("</search>", "</answer>"):
                if tag in reply:
                    reply = reply.split(tag)[0] + tag
                    break
        response += reply
        if output["meta_info"]["finish_reason"]["type"] in ("length", "abort"):
            break
        action = re.search(r"<(search|answer)>(.*?)</\1>", reply, re.DOTALL)
        if action and action.group(1) == "answer":
            break
        response += f"\n\n<information>{DOCUMENTS.strip()}</information>\n\n" if action else INVALID
    return prompt + response


def react_paper(url: str, question: str, turns: int) -> None:
    """The loop of the ReAct paper's notebooks: strip, split into thought and action, join."""
    prompt = f"Solve a question answering task with interleaving Thought, Action, Observation steps.\n{question}\n"
    for i in range(1, turns + 1):
        reply = _complete(url, prompt + f"Thought {i}:", [f"\nObservation {i}:"])
        thought, action = reply.strip().split(f"\nAction {i}: ")
        if action.startswith("Finish"):
            return
        prompt += f"Thought {i}: {thought}\nAction {i}: {action}\nObservation {i}: Lyon lies on the Rhone.\n"


def react_by_hand(url: str, question: str, turns: int, tidy: bool) -> None:
    """The short loop of many tutorials: the reply, with or without its trailing white space, then the observation."""
    prompt = f"Answer by Thought, Action, Action Input, Observation.\n\nQuestion: {question}\nThought:"
    for _ in range(turns):
        reply = _complete(url, prompt, ["\nObservation:"])
        if "Final Answer:" in reply:
            return
        prompt += (reply.rstrip() if tidy else reply) + "\nObservation: Lyon lies on the Rhone.\nThought:"


def react_langchain(url: str, question: str, turns: int, chat: bool) -> None:
    """create_react_agent in an AgentExecutor, on a completion model or, as most write it, on a chat model."""

    @tool
    def search(query: str) -> str:
        """Search the web."""
        return "Lyon lies on the Rhone."

    settings: dict[str, Any] = {"base_url": url + "/v1", "api_key": "none", "model": "study", "max_retries": 0}
    model = ChatOpenAI(**settings) if chat else OpenAI(**settings)
    agent = create_react_agent(model, [search], PromptTemplate.from_template(REACT))
    options: dict[str, Any] = {"max_iterations": turns, "stream_runnable": False}
    AgentExecutor(agent=agent, tools=[search], **options).invoke({"input": question})


def _complete(url: str, text: str, stop: list[str]) -> str:
    answer = post(url + "/generate", {"text": text, "sampling_params": {"max_new_tokens": 256, "stop": stop}})
    return str(answer["text"])
