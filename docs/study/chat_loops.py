"""Loops that keep messages and leave the text to a chat template: LangChain's and the OpenAI SDK's."""

from typing import Any

import openai
from langchain_classic.chains import ConversationChain
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_openai import ChatOpenAI, OpenAI

QUESTIONS = [
    "Which river runs through Lyon?",
    "And which one joins it?",
    "How long is it?",
    "Who says so?",
    "Thanks. Why?",
]
SEARCH: Any = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the web.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}, "top_k": {"type": "number"}},
            "required": ["query"],
        },
    },
}
RESULT = "Lyon lies on the Rhône."


def _settings(url: str) -> dict[str, Any]:
    return {"base_url": url + "/v1", "api_key": "none", "model": "study", "max_retries": 0}


def _model(url: str) -> ChatOpenAI:
    return ChatOpenAI(**_settings(url))


def langchain_messages(url: str, turns: int) -> None:
    """A list of messages: the question in, the AIMessage appended unchanged."""
    model = _model(url)
    messages: list[BaseMessage] = [SystemMessage("You are a helpful assistant.")]
    for question in QUESTIONS[:turns]:
        messages.append(HumanMessage(question))
        messages.append(model.invoke(messages))


def langchain_history(url: str, turns: int) -> None:
    """prompt | model | StrOutputParser within RunnableWithMessageHistory."""
    history = InMemoryChatMessageHistory()
    prompt = ChatPromptTemplate.from_messages(
        [("system", "You are a helpful assistant."), MessagesPlaceholder("history"), ("human", "{question}")]
    )
    chain = RunnableWithMessageHistory(
        prompt | _model(url) | StrOutputParser(),
        lambda session_id: history,
        input_messages_key="question",
        history_messages_key="history",
    )
    for question in QUESTIONS[:turns]:
        chain.invoke({"question": question}, config={"configurable": {"session_id": "one"}})


def langchain_stripped(url: str, turns: int) -> None:
    """Like the first, but the application keeps `answer.strip()`, which it showed its user."""
    model = _model(url)
    messages: list[Any] = [("system", "You are a helpful assistant.")]
    for question in QUESTIONS[:turns]:
        messages.append(("human", question))
        messages.append(("ai", str(model.invoke(messages).content).strip()))


def langchain_conversation_chain(url: str, turns: int) -> None:
    """The classic ConversationChain on a completion model: `Human:` and `AI:` in one text."""
    chain = ConversationChain(llm=OpenAI(**_settings(url)))
    for question in QUESTIONS[:turns]:
        chain.invoke({"input": question})


def openai_chat(url: str, turns: int) -> None:
    """The OpenAI SDK: the message object of the answer is appended to the list."""
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "system", "content": "You are a helpful assistant."}]
    for question in QUESTIONS[:turns]:
        messages.append({"role": "user", "content": question})
        answer = client.chat.completions.create(model="study", messages=messages)
        messages.append(answer.choices[0].message)


def openai_tools(url: str, turns: int) -> None:
    """The SDK's tool loop: one question, calls until there are none."""
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": QUESTIONS[0]}]
    for _ in range(turns):
        answer = client.chat.completions.create(model="study", messages=messages, tools=[SEARCH])
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return
        messages += [{"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in message.tool_calls]


def langchain_tools(url: str, turns: int) -> None:
    """bind_tools: LangChain parses the arguments and prints them again."""
    model = _model(url).bind_tools([SEARCH])
    messages: list[BaseMessage] = [HumanMessage(QUESTIONS[0])]
    for _ in range(turns):
        answer = model.invoke(messages)
        messages.append(answer)
        if not answer.tool_calls:
            return
        messages += [ToolMessage(RESULT, tool_call_id=call["id"]) for call in answer.tool_calls]
