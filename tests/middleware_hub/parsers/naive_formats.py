"""The grammars of calls, read the plain way. See `naive`."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

from middleware_hub.chat.messages import Call, Reasoning
from middleware_hub.parsers.base import Sampled
from tests.middleware_hub.parsers.naive import NUMBER, WHITE, Fault, Naive, without_margins


def envelope(read: Naive, *, strict: bool) -> Call:
    """An object with `name` and `arguments`, its brace gone over."""
    found: dict[str, str] = {}
    read.white()
    while not read.has("}"):
        begin = read.at
        if read.char() != '"':
            raise Fault
        read.string()
        key = json.loads(read.text[begin : read.at])
        read.white()
        read.need(":")
        read.white()
        first = read.char()
        if key == "name":
            fits = first == '"'
        elif key in ("arguments", "parameters"):
            fits = first == "{" or (not strict and first in ('"', "n"))
        else:
            fits = not strict or key in ("type", "id")
        if not first or not fits:
            raise Fault
        found[key] = read.json()
        read.white()
        if read.has("}"):
            break
        read.need(",")
        read.white()
        if read.char() == "}":
            raise Fault
    given = [found[key] for key in ("arguments", "parameters") if key in found]
    if len(given) > 1 or (strict and not given) or not json.loads(found.get("name", '""')).strip():
        raise Fault
    arguments = given[0] if given else "null"
    if arguments.startswith('"'):
        arguments = json.loads(arguments).strip(WHITE)
        inner = Naive(arguments)
        inner.json()
        if inner.at < len(arguments):
            raise Fault
    if arguments == "null":
        arguments = "{}"
    if not arguments.startswith("{"):
        raise Fault
    return Call(json.loads(found["name"]), arguments)


def hermes(read: Naive) -> Call:
    read.need("<tool_call>")
    read.white()
    read.need("{")
    call = envelope(read, strict=False)
    read.white()
    read.need("</tool_call>")
    return call


def qwen_coder(read: Naive) -> Call:
    values = {}
    read.need("<tool_call>")
    read.white()
    read.need("<function=")
    name = read.name()
    read.need(">")
    read.white()
    while read.need("<parameter=", "</function>") == "<parameter=":
        key = read.word(lambda char: char not in "<>\r\n")
        read.need(">")
        value = read.until("</parameter>", "</tool_call>")
        value = value[1:] if value[:1] == "\n" else value
        values[key] = typed(name, key, value[:-1] if value[-1:] == "\n" else value)
        read.white()
    read.white()
    read.need("</tool_call>")
    return Call(name, spelled(values))


def glm(read: Naive) -> Call:
    values = {}
    read.need("<tool_call>")
    read.white()
    name = read.name()
    read.white()
    while read.need("<arg_key>", "</tool_call>") == "<arg_key>":
        key = read.until("</arg_key>", "</tool_call>").strip(WHITE)
        if not key:
            raise Fault
        read.white()
        read.need("<arg_value>")
        values[key] = typed(name, key, read.until("</arg_value>", "</tool_call>"))
        read.white()
    return Call(name, spelled(values))


def typed(name: str, key: str, value: str) -> str:
    """Of three arguments of `f` it is known that they are strings (see `TOOLS`), of all others nothing."""
    read = Naive(value.strip(WHITE))
    if name != "f" or key not in ("s", "s1", "s two"):
        with suppress(Fault):
            read.json()
            if read.at == len(read.text):
                return read.text
    return json.dumps(value, ensure_ascii=False)


def spelled(values: dict[str, str]) -> str:
    return "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in values.items()) + "}"


def deepseek(read: Naive) -> Call:
    if read.need("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>") == "<｜tool▁calls▁begin｜>":
        read.white()
        read.need("<｜tool▁call▁begin｜>")
    name = read.name("`")
    read.need("<｜tool▁sep｜>")
    read.white()
    fenced = read.char() not in ("{", "")
    if fenced:
        name = read.name("`")
        read.white()
        read.need("```json")
        read.white()
    arguments = read.object()
    read.white()
    if fenced:
        read.need("```")
        read.white()
    read.need("<｜tool▁call▁end｜>")
    return Call(name, arguments)


def gemma4(read: Naive) -> Call:
    read.need("<|tool_call>")
    read.need("call:")
    name = read.name()
    if read.char() != "{":
        raise Fault
    value = gemma4_value(read, 0)
    read.white()
    read.need("<tool_call|>")
    return Call(name, json.dumps(value, ensure_ascii=False))


def gemma4_value(read: Naive, depth: int) -> Any:
    if read.has('<|"|>'):
        return read.until('<|"|>', "<tool_call|>")
    if read.char() in ("{", "["):
        if depth == 200:
            raise Fault
        brace = read.need("{", "[")
        close, items, members = ("}" if brace == "{" else "]"), [], {}
        read.white()
        ended = bool(read.text[read.at : read.at + 1] in ("}", "]"))
        while not ended:
            if brace == "{":
                if read.has('<|"|>'):
                    key = read.until('<|"|>', "<tool_call|>")
                    read.white()
                else:
                    key = read.word(lambda char: char not in "<>{}[]:,").strip(WHITE)
                read.need(":")
                read.white()
                members[key] = gemma4_value(read, depth + 1)
            else:
                items.append(gemma4_value(read, depth + 1))
            read.white()
            ended = not read.has(",")
            read.white() if not ended else None
        if read.need("}", "]") != close:
            raise Fault
        return members if brace == "{" else items
    word = read.word(lambda char: char in "-+." or char == "_" or char.isalnum())
    number = NUMBER.fullmatch(word)
    if word not in ("true", "false", "null", "None") and not number:
        raise Fault
    return json.loads("null" if word == "None" else word)


def llama3(read: Naive) -> Call:
    if read.need("<|python_tag|>", "{") == "<|python_tag|>":
        read.white()
        read.need("{")
    return envelope(read, strict=True)


def harmony(text: str) -> list[Sampled]:
    """Text and calls in order, and all of the reasoning in front."""
    stretches, reasoning, at = list[str | Call]([""]), "", 0
    header = re.compile(
        r"(?:(?P<start><\|start\|>assistant)(?P<first> to=[^\s<>\"]{1,256}+)?|(?P<only> to=[^\s<>\"]{1,256}+))?"
        r"<\|channel\|>(?P<channel>analysis|commentary|final)[ \t\r\n]*"
        r"(?:to=(?P<second>[^\s<>\"]{1,256}+)[ \t\r\n]*)?"
        r"(?:(?:<\|constrain\|>)?[A-Za-z]{1,256}[ \t\r\n]*)?<\|message\|>"
    )
    ends = re.compile(r"(<\|end\|>|<\|return\|>|<\|call\|>)|(?=<\|start\|>assistant|<\|channel\|>)")

    def say(more: str) -> None:
        assert isinstance(stretches[-1], str)
        stretches[-1] += more

    while at < len(text):
        found = header.match(text, at)
        if not found or (found["only"] and at):
            say(text[at])
            at += 1
            continue
        recipient = found["second"] or (found["first"] or found["only"] or "")[len(" to=") :]
        if not recipient:
            end = ends.search(text, found.end())
            body = text[found.end() : end.start() if end else len(text)]
            at = end.end() if end else len(text)
            if found["channel"] == "analysis":
                reasoning += body
            else:
                say(body)
            continue
        read = Naive(text)
        read.at = found.end()
        try:
            read.white()
            arguments = read.object()
            read.white()
            if read.at < len(text):
                read.need("<|call|>")
            name = recipient.removeprefix("functions.")
            if not name:
                raise Fault
        except Fault:
            say(text[at : read.at])
        else:
            stretches += [Call(name, arguments), ""]
        at = read.at
    return [*([Reasoning(reasoning)] if reasoning else []), *without_margins(stretches)]
