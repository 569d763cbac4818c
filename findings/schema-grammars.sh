#!/usr/bin/env bash
# Guess: constrained decoding by a JSON schema lets a model write any JSON that is valid by the schema, and nothing else,
# whatever library makes the grammar. vLLM 0.32.0 has a backend of each of these three.
# Instead (llguidance 1.9.1, outlines-core 0.2.14, lm-format-enforcer 0.11.3): three languages, and none is that of the schema.
# llguidance forbids `\u00e9` and `\/`, outlines-core `\u00e9`, `\u001b`, `1e5` and line breaks; both want the properties in
# the schema's order. lm-format-enforcer forbids more than 20 items of an array, and more than 12 spaces between two tokens of
# JSON. It and outlines-core forbid properties that the schema leaves open, and let an integer below `minimum` through.
# Hurts: whoever changes the backend, or has another one for evaluation. A policy that writes a list of 30 files, an escape
# sequence or its arguments in another order gets its tokens masked in one and not in the other. No error says so: the model
# writes something else.
# Here: the schema goes to the engine as it came. The sampled ids are kept, and never checked against a schema.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check llguidance==1.9.1 outlines-core==0.2.14 lm-format-enforcer==0.11.3 \
  jsonschema==4.26.0
"$tmp/venv/bin/python" - <<'PY'
import json
import re
import sys
from importlib.metadata import version

from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from lmformatenforcer import JsonSchemaParser, TokenEnforcer, TokenEnforcerTokenizerData
from outlines_core.json_schema import build_regex_from_schema


class Bytes:
    """A vocabulary of all bytes, and a token that ends a reply."""

    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))


def llguidance(schema, text):
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_json_schema(schema))
    ids = list(text.encode())
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


def outlines(schema, text):
    return re.fullmatch(build_regex_from_schema(schema), text) is not None


CHARACTERS = "".join(map(chr, (9, 10, *range(32, 127), 233)))
ENFORCED = TokenEnforcerTokenizerData(
    [(number, character, False) for number, character in enumerate(CHARACTERS)],
    lambda ids: "".join(CHARACTERS[one] for one in ids),
    eos_token_id=len(CHARACTERS),
    use_bitmask=False,
    vocab_size=len(CHARACTERS) + 1,
)


def enforcer(schema, text):
    rules = TokenEnforcer(ENFORCED, JsonSchemaParser(json.loads(schema)))
    ids = [*map(CHARACTERS.index, text), ENFORCED.eos_token_id]
    return all(rules.get_allowed_tokens(ids[:at]).is_token_allowed(one) for at, one in enumerate(ids))


def json_schema(schema, text):
    return Draft202012Validator(json.loads(schema)).is_valid(json.loads(text))


TEXT = '{"type": "string"}'
LIST = '{"type": "array", "items": {"type": "integer"}}'
CALL = '{"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a", "b"]}'
SEEN = {  # what the schema says, llguidance, outlines-core, lm-format-enforcer
    (TEXT, '"a\\nb"'): "yes yes yes yes",
    (TEXT, '"é"'): "yes yes yes yes",
    (TEXT, '"\\u00e9"'): "yes no no yes",
    (TEXT, '"\\u001b[0m"'): "yes yes no yes",
    (TEXT, '"\\/"'): "yes no yes yes",
    (LIST, json.dumps([1] * 20)): "yes yes yes yes",
    (LIST, json.dumps([1] * 21)): "yes yes yes no",
    (LIST, f"[{12 * ' '}1]"): "yes yes no yes",
    (LIST, f"[{13 * ' '}1]"): "yes yes no no",
    ('{"type": "number"}', "1e5"): "yes yes no yes",
    (CALL, '{"a": "x", "b": 1}'): "yes yes yes yes",
    (CALL, '{"b": 1, "a": "x"}'): "yes no no yes",
    (CALL, '{"a": "x", "b": 1, "c": 2}'): "yes yes no no",
    (CALL, '{\n  "a": "x",\n  "b": 1\n}'): "yes yes no yes",
    ('{"type": "integer", "minimum": 10}', "5"): "no no yes yes",
}
print(", ".join(f"{name} {version(name)}" for name in ("llguidance", "outlines-core", "lm-format-enforcer")))
print(f"{'':55} {'schema':8} {'llguidance':12} {'outlines-core':15} lm-format-enforcer")
changed = []
for (schema, text), expected in SEEN.items():
    found = ["yes" if one(schema, text) else "no" for one in (json_schema, llguidance, outlines, enforcer)]
    kind = json.loads(schema)["type"]
    written = text if len(text) < 40 else f"{text[:24]} ... ({len(text)} characters)"
    print(f"{kind:8} {written!r:46} {found[0]:8} {found[1]:12} {found[2]:15} {found[3]}")
    if " ".join(found) != expected:
        changed.append(text)
sys.exit(f"changed: {changed}" if changed else 0)
PY
