"""The grammars of calls, read the plain way. See `naive`."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

from middleware_hub.chat.messages import Reasoning, SampledCall
from middleware_hub.parsers.base import Sampled
from tests.middleware_hub.parsers.naive import NUMBER, WHITE, Fault, Naive, without_margins


def envelope(read: Naive, *, strict: bool, ids: str = "(?!)") -> SampledCall:
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
    number = json.loads(found.get("id", '""'))
    known = isinstance(number, str) and re.fullmatch(ids, number)
    return SampledCall(json.loads(found["name"]), arguments, number if known else "")


def hermes(read: Naive) -> SampledCall:
    read.need("<tool_call>")
    read.white()
    read.need("{")
    call = envelope(read, strict=False)
    read.white()
    read.need("</tool_call>")
    return call


def qwen_coder(read: Naive, end: str = "</tool_call>") -> SampledCall:
    values = {}
    read.need(end.replace("/", ""))
    read.white()
    read.need("<function=")
    name = read.name()
    read.need(">")
    read.white()
    tag = read.need("<parameter=", "</function>")
    while tag == "<parameter=":
        key = read.word(lambda char: char not in "<>\r\n")
        read.need(">")
        value, tag = read.up_to("</parameter>", "<parameter=", "</function>", end)
        while tag == "</function>" and not read.comes(end):
            more, further = read.up_to("</parameter>", "<parameter=", "</function>", end)
            value, tag = value + tag + more, further
        if tag == end:
            raise Fault
        value = value[1:] if value[:1] == "\n" else value
        values[key] = typed(name, key, value[:-1] if value[-1:] == "\n" else value)
        if tag == "</parameter>":
            read.white()
            tag = read.need("<parameter=", "</function>")
    read.white()
    read.need(end)
    return SampledCall(name, spelled(values))


def seed_oss(read: Naive) -> SampledCall:
    return qwen_coder(read, "</seed:tool_call>")


def glm(read: Naive) -> SampledCall:
    values = {}
    read.need("<tool_call>")
    read.white()
    name = read.name()
    read.white()
    tag = read.need("<arg_key>", "</tool_call>")
    while tag == "<arg_key>":
        key = read.until("</arg_key>", "</tool_call>").strip(WHITE)
        if not key:
            raise Fault
        read.white()
        read.need("<arg_value>")
        value, tag = read.up_to("</arg_value>", "<arg_key>", "</tool_call>")
        values[key] = typed(name, key, value if tag == "</arg_value>" else value.rstrip("\r\n"))
        if tag == "</arg_value>":
            read.white()
            tag = read.need("<arg_key>", "</tool_call>")
    return SampledCall(name, spelled(values))


def value_of(read: Naive, close: str, parameter: str, invoke: str, *ends: str) -> tuple[str, str]:
    """A value, and the tag that comes next: that of a parameter, or the end of the call."""
    value, tag = read.up_to(close, parameter, f"</{invoke}>", *ends)
    if tag in ends or (tag == f"</{invoke}>" and not read.comes(f'<{invoke} name="', *ends)):
        raise Fault
    if tag != close:
        return value.rstrip("\r\n"), tag
    read.white()
    return value, read.need(parameter, f"</{invoke}>")


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


def deepseek(read: Naive) -> SampledCall:
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
    return SampledCall(name, arguments)


def deepseek_v32(read: Naive) -> SampledCall:
    if read.has("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"):
        read.white()
    read.need('<｜DSML｜invoke name="')
    name, values = read.name(), {}
    if read.need('">', '"/>') == '"/>':
        return SampledCall(name, "{}")
    read.white()
    if read.char() == "{":
        arguments = read.object()
        read.white()
        read.need("</｜DSML｜invoke>")
        return SampledCall(name, arguments)
    tag = read.need('<｜DSML｜parameter name="', "</｜DSML｜invoke>")
    while tag != "</｜DSML｜invoke>":
        key = read.word(lambda char: char not in '<>"\r\n')
        kind = read.need('" string="true">', '" string="false">', '">')
        close, opening = "</｜DSML｜parameter>", '<｜DSML｜parameter name="'
        value, tag = value_of(
            read, close, opening, "｜DSML｜invoke", "</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"
        )
        if "true" in kind:
            values[key] = json.dumps(value, ensure_ascii=False)
        else:
            values[key] = typed(name if kind == '">' else "", key, value)
    return SampledCall(name, spelled(values))


def minimax_m2(read: Naive) -> SampledCall:
    if read.has("<minimax:tool_call>"):
        read.white()
    read.need('<invoke name="')
    name, values = read.name(), {}
    read.need('">')
    read.white()
    tag = read.need('<parameter name="', "</invoke>")
    while tag != "</invoke>":
        key = read.word(lambda char: char not in '<>"\r\n')
        read.need('">')
        value, tag = value_of(read, "</parameter>", '<parameter name="', "invoke", "</minimax:tool_call>")
        values[key] = typed(name, key, value)
    return SampledCall(name, spelled(values))


def kimi_k2(read: Naive) -> SampledCall:
    if read.has("<|tool_calls_section_begin|>"):
        read.white()
    read.need("<|tool_call_begin|>")
    read.white()
    header = read.name()
    name, colon, number = header.removeprefix("functions.").rpartition(":")
    if not name or not colon or not re.fullmatch("[0-9]+", number):
        raise Fault
    read.white()
    read.need("<|tool_call_argument_begin|>")
    read.white()
    arguments = read.object()
    read.white()
    read.need("<|tool_call_end|>")
    return SampledCall(name, arguments, header)


def mistral(read: Naive) -> SampledCall:
    listed = bool(read.has(","))
    if not listed:
        read.need("[TOOL_CALLS]")
    read.white()
    if not listed:
        listed = bool(read.has("["))
        if listed:
            read.white()
    if listed or read.char() == "{":
        read.need("{")
        call = envelope(read, strict=False, ids="[0-9A-Za-z]{9}")
    else:
        name, number = read.name("[]"), ""
        read.white()
        if read.has("[CALL_ID]"):
            read.white()
            number = read.name("[]")
            read.white()
            read.need("[ARGS]")
        else:
            read.has("[ARGS]")
        read.white()
        call = SampledCall(name, read.object(), number if re.fullmatch("[0-9A-Za-z]{9}", number) else "")
    read.trailer, read.further = ("]", ",") if listed else ("", "")
    return call


def pythonic(read: Naive) -> SampledCall:
    if read.has("<|python_start|>", "<|tool_call_start|>"):
        read.white()
        read.need("[")
    elif not read.again:
        read.need("[")
    read.again = False
    read.white()
    name = read.word(lambda char: char in ".-_" or char.isalnum())
    read.need("(")
    members = []
    read.white()
    while not members or read.has(","):
        read.white()
        if not members and read.char() in (")", "}", "]"):
            break
        key = read.word(lambda char: char == "_" or char.isalnum())
        read.white()
        read.need("=")
        read.white()
        members.append(f"{json.dumps(key, ensure_ascii=False)}: {pythonic_value(read, 1)}")
        read.white()
    if read.need(")", "}", "]") != ")":
        raise Fault
    read.white()
    read.again = read.need(",", "]") == ","
    return SampledCall(name, "{" + ", ".join(members) + "}")


def pythonic_value(read: Naive, depth: int) -> str:
    if read.char() in ("'", '"'):
        return pythonic_string(read)
    if read.char() in ("{", "["):
        if depth == 200:
            read.at += 1
            raise Fault
        brace = read.need("{", "[")
        items = []
        read.white()
        while not items or read.has(","):
            read.white()
            if not items and read.char() in (")", "}", "]"):
                break
            key = ""
            if brace == "{":
                if read.char() not in ("'", '"'):
                    raise Fault
                key = pythonic_string(read) + ": "
                read.white()
                read.need(":")
                read.white()
            items.append(key + pythonic_value(read, depth + 1))
            read.white()
        if read.need(")", "}", "]") != ("}" if brace == "{" else "]"):
            raise Fault
        return brace + ", ".join(items) + ("}" if brace == "{" else "]")
    word = read.word(lambda char: char in "-+._" or char.isalnum())
    word = {"True": "true", "False": "false", "None": "null"}.get(word, word)
    if word not in ("true", "false", "null") and not NUMBER.fullmatch(word):
        raise Fault
    return word


def pythonic_string(read: Naive) -> str:
    quote, said = read.need("'", '"'), ""
    while not read.has(quote):
        if not read.char():
            raise Fault
        if not read.has("\\"):
            said += read.char()
            read.at += 1
            continue
        kind = read.has("x", "u", "U")
        digits = {"x": 2, "u": 4, "U": 8}.get(kind, 0)
        for number in range(digits):
            if read.char() not in [*"0123456789abcdefABCDEF"]:
                raise Fault
            read.at += 1
            if number == digits - 1:
                code = int(read.text[read.at - digits : read.at], 16)
                if code > 0x10FFFF:
                    raise Fault
                said += chr(code)
        if kind:
            continue
        if read.char() and read.char() in "N01234567":
            read.at += 1
            raise Fault
        found = read.has("\n", *"\\'\"ntrbf/")
        said += {"\n": "", "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "": "\\"}.get(found, found)
    try:
        said = said.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise Fault from None
    return json.dumps(said, ensure_ascii=False)


def gemma4(read: Naive) -> SampledCall:
    read.need("<|tool_call>")
    read.need("call:")
    name = read.name()
    if read.char() != "{":
        raise Fault
    value = gemma4_value(read, 0)
    read.white()
    read.need("<tool_call|>")
    return SampledCall(name, json.dumps(value, ensure_ascii=False))


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


def llama3(read: Naive) -> SampledCall:
    if read.need("<|python_tag|>", "{") == "<|python_tag|>":
        read.white()
        read.need("{")
    return envelope(read, strict=True)


def harmony(text: str) -> list[Sampled]:
    """Text and calls in order, and all of the reasoning in front."""
    stretches, reasoning, at = list[str | SampledCall]([""]), "", 0
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
            stretches += [SampledCall(name, arguments), ""]
        at = read.at
    return [*([Reasoning(reasoning)] if reasoning else []), *without_margins(stretches)]
