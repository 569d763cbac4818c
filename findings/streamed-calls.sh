#!/usr/bin/env bash
# Guess: an engine finds the same text and the same calls in a reply whether it streams the reply or sends it in one piece, and
# however many tokens a chunk of the stream has.
# Instead (the parsers of sglang 0.5.23 for eleven formats, each with its own model's spelling):
# - Text behind a call: seven leave it out in one piece, six of them stream it; MiniMax M2 is the other way round.
# - Two calls: of Mistral's list the stream has the first call alone, and the second one as text.
# - A call of an unknown tool: nine give an empty reply in one piece, without text or call. Streamed it is a call in four of them, and
#   in five a piece of the JSON, or all of the call, as text. Two give the call both ways.
# - A text as argument: in one piece GLM 4.5 makes `true` to `True` and `null` to `None`, MiniMax M2 takes its newlines off, and four
#   lose the call or the text if it has `</tool_call>` in it. For Qwen3-Coder and MiniMax M2 the text `null` is no text.
# - Three tokens in a chunk, as with speculative decoding: five lose the end of the text before a call, and of two calls without
#   arguments DeepSeek V3.1 keeps one.
# Hurts: an agent that streams, where its training did not: it runs other calls for the same tokens. A policy whose call has a name
# with a slip gets an empty turn in one run and an error that it can learn from in the other.
# Here: sessions parse what the engine sampled, a stream and a reply in one piece by the same parser; how the text is cut into
# chunks changes nothing, and a call of an unknown tool is a call.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile openai==2.8.0 pydantic==2.14.4 msgspec==0.23.0 orjson==3.13.0 \
  partial-json-parser==0.2.1.1.post7 numpy==2.4.6 pybase64==1.5.1 requests==2.34.2 tqdm==4.70.1 ipython==9.18.1
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile --no-deps sglang==0.5.23
"$tmp/venv/bin/python" - <<'PY'
import importlib
import json
import logging
import re
import sys
import types
from importlib.metadata import distribution, version

logging.disable()
package = sys.modules["sglang"] = types.ModuleType("sglang")  # its own __init__ imports torch; the parsers do without
package.__path__ = [str(distribution("sglang").locate_file("sglang"))]
Tool = importlib.import_module("sglang.srt.entrypoints.openai.protocol").Tool

TEXT = {"type": "string"}
PARAMETERS = {"write": {"path": TEXT, "text": TEXT}, "add": {"a": {"type": "integer"}}, "now": {}}
TOOLS = [
    Tool(type="function", function={"name": name, "parameters": {"type": "object", "properties": properties}})
    for name, properties in PARAMETERS.items()
]


def as_json(value):
    return json.dumps(value, ensure_ascii=False)


def plain(value):
    return value if isinstance(value, str) else as_json(value)


def hermes(calls):
    return "\n".join(f"<tool_call>\n{as_json({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)


def llama3(calls):
    return "<|python_tag|>" + "; ".join(as_json({"name": n, "parameters": a}) for n, a in calls)


def mistral(calls):
    return "[TOOL_CALLS] " + as_json([{"name": n, "arguments": a} for n, a in calls])


def deepseek_v3(calls):
    each = (f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{as_json(a)}\n```<｜tool▁call▁end｜>" for n, a in calls)
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls):
    each = (f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{as_json(a)}<｜tool▁call▁end｜>" for n, a in calls)
    return "<｜tool▁calls▁begin｜>" + "".join(each) + "<｜tool▁calls▁end｜>"


def kimi_k2(calls):
    each = (
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{as_json(a)}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    )
    return "<|tool_calls_section_begin|>" + "".join(each) + "<|tool_calls_section_end|>"


def glm(calls, line="\n"):
    return line.join(
        f"<tool_call>{n}{line}"
        + "".join(f"<arg_key>{k}</arg_key>{line}<arg_value>{plain(v)}</arg_value>{line}" for k, v in a.items())
        + "</tool_call>"
        for n, a in calls
    )


def glm_47(calls):
    return glm(calls, "")


def qwen_coder(calls):
    return "\n".join(
        f"<tool_call>\n<function={n}>\n"
        + "".join(f"<parameter={k}>\n{plain(v)}\n</parameter>\n" for k, v in a.items())
        + "</function>\n</tool_call>"
        for n, a in calls
    )


def minimax_m2(calls):
    each = (
        f'<invoke name="{n}">\n'
        + "".join(f'<parameter name="{k}">{plain(v)}</parameter>\n' for k, v in a.items())
        + "</invoke>\n"
        for n, a in calls
    )
    return "<minimax:tool_call>\n" + "".join(each) + "</minimax:tool_call>"


FORMATS = {
    "qwen25": ("qwen25_detector.Qwen25Detector", hermes),
    "hermes": ("hermes_detector.HermesDetector", hermes),
    "llama3": ("llama32_detector.Llama32Detector", llama3),
    "mistral": ("mistral_detector.MistralDetector", mistral),
    "deepseekv3": ("deepseekv3_detector.DeepSeekV3Detector", deepseek_v3),
    "deepseekv31": ("deepseekv31_detector.DeepSeekV31Detector", deepseek_v31),
    "kimi_k2": ("kimik2_detector.KimiK2Detector", kimi_k2),
    "glm45": ("glm4_moe_detector.Glm4MoeDetector", glm),
    "glm47": ("glm47_moe_detector.Glm47MoeDetector", glm_47),
    "qwen3_coder": ("qwen3_coder_detector.Qwen3CoderDetector", qwen_coder),
    "minimax-m2": ("minimax_m2.MinimaxM2Detector", minimax_m2),
}


def write(text):
    return ("write", {"path": "a", "text": text})


REPLIES = {  # text, calls, text; and how many tokens a chunk of the stream has
    "one call": ("", [write("hi")], "", 1),
    "text before": ("I will look.\n\n", [write("hi")], "", 3),
    "text behind": ("", [write("hi")], "\nDone.", 1),
    "two calls": ("", [write("hi"), ("add", {"a": 1})], "", 1),
    "no arguments": ("", [("now", {}), ("now", {})], "", 3),
    "unknown tool": ("", [("nope", {"x": "y"})], "", 1),
    "text true": ("", [write("true")], "", 1),
    "text null": ("", [write("null")], "", 1),
    "text with lines": ("", [write("\nhi\n")], "", 1),
    "text with a tag": ("", [write("x </tool_call> y")], "", 1),
}
TAG = re.compile(r"(<\|\w+\|>|\[TOOL_CALLS\]|<｜[^｜]*｜>|</?tool_call>|</?arg_(?:key|value)>|</?minimax:tool_call>)")
TOKEN = re.compile(r"\s?\w{1,6}|[^\w\s]{1,3}\n*|\s+")


def chunks(text, size):
    """Pieces as a stream has them: a tag is one token, and words are cut."""
    tokens = [token for part in TAG.split(text) for token in ([part] if TAG.fullmatch(part) else TOKEN.findall(part))]
    assert "".join(tokens) == text
    return ["".join(tokens[at : at + size]) for at in range(0, len(tokens), size)]


def in_one_piece(parser, text):
    if not parser.has_tool_call(text):
        return text, []
    found = parser.detect_and_parse(text, TOOLS)
    return found.normal_text, [(call.name, call.parameters) for call in found.calls]


def streamed(parser, text, size):
    results = [*(parser.parse_streaming_increment(chunk, TOOLS) for chunk in chunks(text, size)), parser.finish(TOOLS)]
    calls = {}
    for call in (call for result in results for call in result.calls):
        name, arguments = calls.get(call.tool_index, ("", ""))
        calls[call.tool_index] = (name + (call.name or ""), arguments + (call.parameters or ""))
    last = len(parser.prev_tool_call_arr) - 1  # its server sends the rest of the last call's arguments at the end
    if 0 <= last < len(parser.streamed_args_for_tool) and last in calls:
        sent, whole = parser.streamed_args_for_tool[last], parser.prev_tool_call_arr[last].get("arguments", {})
        whole = plain(whole)
        name, arguments = calls[last]
        calls[last] = (name, arguments + (whole[len(sent) :] if whole.startswith(sent) else ""))
    return "".join(result.normal_text or "" for result in results), [calls[at] for at in sorted(calls)]


def shown(result, expected):
    text, calls = result
    try:
        found = (text.strip(), [(name, json.loads(arguments)) for name, arguments in calls])
    except ValueError:
        found = (text.strip(), calls)
    return SAME if found == expected else " ".join([repr(found[0])] * (found[0] != "") + [n + plain(a) for n, a in found[1]])


SAME, NOTHING = "as written", "(nothing)"
HI = 'write{"path": "a", "text": "hi"}'
SEEN = {  # in one piece, streamed
    "one call": {},
    "text before": {
        "qwen25": [SAME, f"'I will look' {HI}"],
        "llama3": [SAME, f"'I will look' {HI}"],
        "deepseekv3": [SAME, f"'I will look' {HI}"],
        "deepseekv31": [SAME, f"'I will look' {HI}"],
        "glm45": [SAME, f"'I will look' {HI}"],
    },
    "text behind": {
        "qwen25": [HI, HI],
        "hermes": [HI, SAME],
        "deepseekv3": [HI, SAME],
        "deepseekv31": [HI, SAME],
        "kimi_k2": [HI, SAME],
        "glm45": [HI, SAME],
        "qwen3_coder": [HI, SAME],
        "minimax-m2": [SAME, HI],
    },
    "two calls": {
        "mistral": [SAME, '\', {"name": "add", "arguments": {"a": 1}}\' write{"path": "a", "text": "hi"}'],
    },
    "no arguments": {
        "hermes": [SAME, "'</tool_call>' now{} now{}"],
        "mistral": [SAME, '\', {"name": "now", "arguments": {}}\' now{}'],
        "deepseekv31": [SAME, 'now{}'],
        "minimax-m2": [SAME, 'now now{}'],
    },
    "unknown tool": {
        "qwen25": ['', '\'"arguments": {"x": "y"}}\''],
        "hermes": ['', '\'"arguments": {"x": "y"}}\''],
        "llama3": ['', '\'"parameters":\''],
        "mistral": ['', '\'"arguments": {"x": "y"}}\''],
        "deepseekv3": ['', SAME],
        "deepseekv31": ['', SAME],
        "glm45": ['', SAME],
        "glm47": ['', SAME],
        "minimax-m2": ['', '\'<invoke name="nope">\\n<parameter name="x">y</parameter>\\n</invoke>\\n</minimax:tool_call>\''],
    },
    "text true": {
        "glm45": ['write{"path": "a", "text": "True"}', SAME],
    },
    "text null": {
        "glm45": ['write{"path": "a", "text": "None"}', SAME],
        "qwen3_coder": ['write{"path": "a", "text": null}', 'write{"path": "a", "text": null}'],
        "minimax-m2": ['write{"path": "a", "text": null}', 'write{"path": "a", "text": null}'],
    },
    "text with lines": {
        "minimax-m2": [HI, SAME],
    },
    "text with a tag": {
        "hermes": [
            '\'<tool_call>\\n{"name": "write", "arguments": {"path": "a", "text": "x </tool_call> y"}}\\n</tool_call>\'',
            SAME,
        ],
        "glm45": ['write{"path": "a"}', '\'y</arg_value>\' write{"path": "a", "text": "x}'],
        "glm47": ['\'y</arg_value></tool_call>\' write{"path": "a"}', '\'y</arg_value>\' write{"path": "a", "text": "x}'],
        "qwen3_coder": ['write{"path": "a", "text": "x "}', SAME],
    },
}
print("sglang", version("sglang"))
found = {}
for kind, (before, calls, behind, size) in REPLIES.items():
    found[kind] = {}
    print(f"{kind} (a stream has {size} in a chunk)")
    for name, (place, written) in FORMATS.items():
        module, parser = place.split(".")
        parser = getattr(importlib.import_module(f"sglang.srt.function_call.{module}"), parser)
        text, expected = before + written(calls) + behind, ((before + behind).strip(), calls)
        ways = [shown(in_one_piece(parser(), text), expected), shown(streamed(parser(), text, size), expected)]
        if ways != [SAME] * 2:
            found[kind][name] = ways
            print(f"  {name:12} one piece: {ways[0] or NOTHING}\n{'':15}streamed:  {ways[1] or NOTHING}")
sys.exit("changed" if found != SEEN else 0)
PY
