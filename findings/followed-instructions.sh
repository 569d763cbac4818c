#!/usr/bin/env bash
# Guess: the checkers of IFEval, which are also used as rewards because they are code and no judge, say of one response the same
# each time, and say yes if a reader sees at a glance that the instruction was followed.
# Instead (lm-eval 0.4.13, langdetect 1.0.9): English in small letters is refused if langdetect takes it for another language: `i am
# here` for Danish, `no problem at all` for Catalan, and in capitals HELLO WORLD for Somali. It draws numbers: of `hello world` it
# says yes and no by turns. A number 0 in an instruction is taken for none, and one between 1 and 5 is drawn in its place: no bullet
# points are wrong if none are wanted, and three are right at times. A line `---` and a line that begins with -5 are bullet points,
# `don't` is two words, `C++` is in `Cats`, `U.P.S.` is a postscript, and `cout << x >> y` a title.
# Hurts: a policy whose response is right in one sample of a group and wrong in the next, at the same text: its advantage is
# chance. It is punished for short texts and for a rule beside its bullet points, and paid for rules in place of them.
# Here: the product scores nothing; rewards come from the trainer's own code.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile nltk==3.10.4 langdetect==1.0.9 immutabledict==4.3.1 \
  packaging==26.4
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile --no-deps lm-eval==0.4.13
mkdir -p "$tmp/nltk/tokenizers/punkt_tab"  # so that the import loads no data: these checkers use none
NLTK_DATA=$tmp/nltk "$tmp/venv/bin/python" - <<'PY'
import importlib
import sys
import types
from importlib.metadata import distribution, version

for name in ("lm_eval", "lm_eval.tasks"):  # their own __init__ wants the whole of the harness
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [str(distribution("lm-eval").locate_file(name.replace(".", "/")))]
ifeval = importlib.import_module("lm_eval.tasks.ifeval.utils")

SMALL, CAPITAL = "change_case:english_lowercase", "change_case:english_capital"
BULLETS, WORDS = "detectable_format:number_bullet_lists", "length_constraints:number_words"
KEYWORDS, TITLE, POSTSCRIPT = "keywords:existence", "detectable_format:title", "detectable_content:postscript"
CASES = [  # what a reader says, what the checker says, in how many runs; instruction, its numbers and words, response
    ("yes", "yes", 20, SMALL, {}, "the answer is 42."),
    ("yes", "no", 20, SMALL, {}, "i am here"),
    ("yes", "no", 20, SMALL, {}, "no problem at all"),
    ("yes", "yes and no", 100, SMALL, {}, "hello world"),
    ("yes", "yes", 20, CAPITAL, {}, "I AM HERE"),
    ("yes", "no", 20, CAPITAL, {}, "HELLO WORLD"),
    ("yes", "yes", 20, BULLETS, {"num_bullets": 2}, "* one\n* two"),
    ("yes", "no", 20, BULLETS, {"num_bullets": 2}, "Two of them\n\n---\n\n* one\n* two"),
    ("yes", "no", 20, BULLETS, {"num_bullets": 2}, "* one\n* two\n\n-5 is the sum"),
    ("no", "yes", 20, BULLETS, {"num_bullets": 2}, "One\n---\nTwo\n---\nThree"),
    ("yes", "no", 100, BULLETS, {"num_bullets": 0}, "None."),
    ("no", "yes and no", 100, BULLETS, {"num_bullets": 0}, "* one\n* two\n* three"),
    ("yes", "no", 20, WORDS, {"num_words": 4, "relation": "less than"}, "don't you know"),
    ("no", "yes", 20, KEYWORDS, {"keywords": ["C++"]}, "Cats"),
    ("no", "yes", 20, KEYWORDS, {"keywords": ["art"]}, "We start."),
    ("no", "yes", 20, POSTSCRIPT, {"postscript_marker": "P.S."}, "The U.P.S. van is here."),
    ("no", "yes", 20, TITLE, {}, "cout << x >> y"),
]
print(f"lm-eval {version('lm-eval')}, langdetect {version('langdetect')}")
changed = []
for reader, expected, runs, instruction, wanted, response in CASES:
    example = ifeval.InputExample(1, [instruction], "", [wanted])
    said = {ifeval.test_instruction_following_strict(example, response).follow_all_instructions for _ in range(runs)}
    found = " and ".join("yes" if one else "no" for one in sorted(said, reverse=True))
    numbers = ", ".join(map(str, wanted.values()))
    print(f"{instruction.split(':')[1]:20} {numbers:14} {response!r:45} reader {reader:4} checker {found}")
    if found != expected:
        changed.append(response)
sys.exit(f"changed: {changed}" if changed else 0)
PY
