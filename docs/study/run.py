"""Run every loop against a worker, measure, write results.json and results.md. See README.md for the commands."""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import platform
import threading
import time
import urllib.request
import warnings
from collections import Counter
from collections.abc import Callable
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import chat_loops
import shapes
import text_loops
from chains import Chain, extend, match, match_one
from chat import Template
from measure import replay, summarize
from proxy import Conversation, Proxy, post
from vocabulary import Tekken, Vocabulary, Worker

TURNS = 5
QUESTION = "Which river runs through Lyon?"
STOP = ["</search>", "</answer>"]


@dataclasses.dataclass(frozen=True)
class Variant:
    """One loop as one kind of user writes it."""

    loop: str
    name: str
    run: Callable[[str], object]
    pick: Callable[[bool, int], shapes.Pick]
    template: Template | None = None


def variants(model: Path) -> list[Variant]:
    """Return all loops, in the order of the report."""
    trl = Path(str(distribution("trl").locate_file("trl/chat_templates")))
    chatml = Template(model / "chat_template.jinja")
    qwen3, qwen25 = trl / "qwen3.jinja", trl / "qwen2_5.jinja"
    partial, last = functools.partial, TURNS - 1
    search = partial(shapes.search, last=last)
    step = r"\nAction: search\nAction Input: {words}{end}\nObservation: {words}"
    react = partial(shapes.react, action=step, last=last, final=r"\nFinal Answer: {words}")
    paper = partial(
        shapes.react,
        action=r"\nAction {i}: Search\[{words}\]{end}\nObservation {i}: {words}",
        last=last,
        final=r"\nAction {i}: Finish\[{words}\]",
    )
    slime, by_hand = text_loops.slime_search, text_loops.react_by_hand
    plain_tools, thinking_tools = (partial(shapes.tool_call, think=t, last=last) for t in (False, True))
    parsed = Template(qwen3, parse_reasoning=True)
    off = Template(qwen3, options=(("enable_thinking", False),))
    messages, sdk = chat_loops.langchain_messages, chat_loops.openai_chat
    sdk_tools, bind_tools = chat_loops.openai_tools, chat_loops.langchain_tools

    def variant(
        loop: str, name: str, run: Callable[..., object], pick: Any, template: Template | None = None, **options: Any
    ) -> Variant:
        if run in (slime, text_loops.react_paper, by_hand, text_loops.react_langchain):
            options["question"] = QUESTION
        return Variant(loop, name, partial(run, turns=TURNS, **options), pick, template)

    return [
        variant("1 search", "reply kept whole (slime with logprobs)", slime, search, cut=False, stop=None),
        variant("1 search", "cut at </search> by the workflow", slime, search, cut=True, stop=None),
        variant("1 search", "the same, `stop` at </search>, not trimmed", slime, search, cut=True, stop=STOP),
        variant("2 LangChain", "list of messages", messages, shapes.chat, chatml),
        variant("2 LangChain", "RunnableWithMessageHistory", chat_loops.langchain_history, shapes.chat, chatml),
        variant("2 LangChain", "application keeps answer.strip()", chat_loops.langchain_stripped, shapes.chat, chatml),
        variant("2 LangChain", "ConversationChain", chat_loops.langchain_conversation_chain, shapes.completion_chat),
        variant("3 ReAct", "create_react_agent, completions", text_loops.react_langchain, react, chat=False),
        variant("3 ReAct", "create_react_agent, chat model", text_loops.react_langchain, react, chatml, chat=True),
        variant("3 ReAct", "by hand, the paper's notebooks", text_loops.react_paper, paper),
        variant("3 ReAct", "by hand, reply.rstrip()", by_hand, react, tidy=True),
        variant("3 ReAct", "by hand, reply as it is", by_hand, react, tidy=False),
        variant("4 thinking", "qwen3, content echoed", sdk, shapes.thinking, Template(qwen3)),
        variant("4 thinking", "qwen3, reasoning parser, message echoed", sdk, shapes.thinking, parsed),
        variant("4 thinking", "qwen3, reasoning parser, LangChain", messages, shapes.thinking, parsed),
        variant("4 thinking", "qwen3, enable_thinking=False", sdk, shapes.chat, off),
        variant("4 thinking", "qwen3_training", sdk, shapes.thinking, Template(trl / "qwen3_training.jinja")),
        variant("5 tools", "qwen2_5, OpenAI SDK", sdk_tools, plain_tools, Template(qwen25)),
        variant("5 tools", "qwen2_5, LangChain", bind_tools, plain_tools, Template(qwen25)),
        variant("5 tools", "qwen3, OpenAI SDK", sdk_tools, plain_tools, Template(qwen3)),
        variant("5 tools", "qwen3 thinking, OpenAI SDK", sdk_tools, thinking_tools, parsed),
        variant("5 tools", "qwen3 thinking, LangChain", bind_tools, thinking_tools, parsed),
    ]


def converse(proxy: Proxy, variant: Variant, number: int, ragged: bool, index: int) -> tuple[Conversation, object]:
    """Play one conversation and return what the loop returned."""
    name = f"{number}-{'ragged' if ragged else 'clean'}-{index}"
    conversation = Conversation(name, variant.pick(ragged, index), variant.template)
    returned = variant.run(proxy.url(conversation))
    return conversation, returned


def search_facts(results: list[tuple[Conversation, object]], vocabulary: Vocabulary, whole: bool) -> dict[str, int]:
    """Return what the search loop shows in addition to the table.

    A reply is kept up to its tag. Of those tokens, how many are in the last chain? How many sampled tokens are in it for
    text behind the tag, which the workflow wrote there and which happens to begin as the reply went on? And where does
    the last text end, the one a trajectory is asked for?
    """
    facts = Counter(kept_tokens=0, kept_in_last_chain=0, behind_a_cut_in_last_chain=0, conversations_with_such=0)
    facts.update(last_text_ends_with_chain=0, last_text_ends_inside_reply=0, last_text_ends_inside_token=0)
    for conversation, text in results:
        turns = conversation.turns
        last = replay(turns, vocabulary)[0][-1]
        behind = made_up = kept = 0
        for number, turn in enumerate(turns):
            tags = [] if whole else [tag for tag in STOP if tag in turn.reply]
            cut = turn.reply.find(tags[0]) + len(tags[0]) if tags else len(turn.reply)
            kept += sum(end <= cut for end in vocabulary.sampled(turn.output_ids).ends)
            start = len(turn.text) + cut
            end = len(turns[number + 1].text) if number + 1 < len(turns) else len(last.text)
            here = sum(s and start < e <= end for s, e in zip(last.sampled, last.ends, strict=True))
            behind += here
            made_up += here if number + 1 < len(turns) else 0
        facts["behind_a_cut_in_last_chain"] += made_up
        facts["conversations_with_such"] += made_up > 0
        facts["kept_tokens"] += kept
        facts["kept_in_last_chain"] += sum(last.sampled) - behind
        found = match_one(last, str(text))
        if found.consumed != len(str(text)):
            facts["last_text_ends_inside_token"] += 1
        elif found.count < len(last.ends):
            facts["last_text_ends_inside_reply"] += 1
        else:
            facts["last_text_ends_with_chain"] += 1
    return dict(facts)


def groups(proxy: Proxy, cut: bool, number: int, vocabulary: Vocabulary) -> dict[str, Any]:
    """Several groups, added up."""
    found = [group(proxy, cut, f"group-{cut}-{n}", 8, 2, vocabulary) for n in range(number)]
    total: dict[str, Any] = {"aborted_replies": [reply for outcome in found for reply in outcome["aborted_replies"]]}
    for rule in ("as written", "a complete reply decides only if it finished"):
        total[rule] = dict(sum((Counter(outcome[rule]) for outcome in found), Counter()))
    return total


def group(proxy: Proxy, cut: bool, label: str, size: int, aborted: int, vocabulary: Vocabulary) -> dict[str, Any]:
    """Sample one prompt, abort some samples early as a trainer does once it has enough: which reply becomes a parent?"""
    run = functools.partial(text_loops.slime_search, question=QUESTION, turns=TURNS, cut=cut, stop=None)
    picks = [shapes.search(False, i, TURNS - 1) for i in range(size)]
    conversations = [Conversation(f"{label}-{i}", pick) for i, pick in enumerate(picks)]
    stopped = conversations[:aborted]

    def abort_early(conversation: Conversation) -> None:
        rid = f"{conversation.name}-{time.time_ns()}"
        prompt = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
        body = {"text": prompt, "rid": rid, "sampling_params": {"max_new_tokens": 400}}
        thread = threading.Thread(target=lambda: proxy.generate(conversation, body))
        thread.start()
        time.sleep(0.05)
        post(proxy.upstream + "/abort_request", {"rid": rid})
        thread.join()

    for conversation in stopped:
        abort_early(conversation)
    for conversation in conversations[aborted:]:
        run(proxy.url(conversation))
    turns = [turn for c in conversations for turn in c.turns]
    outcome: dict[str, Any] = {"aborted_replies": [c.turns[0].reply for c in stopped]}
    for name, finished_only in (("as written", False), ("a complete reply decides only if it finished", True)):
        chains: list[Chain] = []
        taken = kept = 0
        for turn in turns:
            found = match(chains, turn.text, finished_only)
            taken += any(match_one(c, turn.text).tokens > found.tokens for c in chains)
            chains.append(extend(found, turn, vocabulary))
            kept += found.tokens
        total = sum(len(vocabulary.sampled(t.output_ids).ends) for c in conversations[aborted:] for t in c.turns)
        lasts = [i for i, t in enumerate(turns) if any(t is c.turns[-1] for c in conversations[aborted:])]
        outcome[name] = {
            "requests_with_a_worse_parent": taken,
            "next_requests": sum(len(c.turns) - 1 for c in conversations[aborted:]),
            "sampled_tokens": total,
            "in_last_chains": sum(sum(chains[i].sampled) for i in lasts),
        }
    return outcome


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as Markdown: one line per variant, clean and ragged replies side by side."""
    lines = [
        "| loop | as written by | next requests | verbatim | and its end | reply before divergence "
        "| sampled tokens in the last chain | with tekken | cover | its chains | messages echoed | why not |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for clean, ragged in zip(rows[::2], rows[1::2], strict=True):
        both = (clean, ragged)
        causes = Counter(clean["causes"]) + Counter(ragged["causes"])
        cells = [
            clean["loop"],
            clean["variant"],
            " / ".join(str(r["next_requests"]) for r in both),
            " / ".join(str(r["verbatim"]) for r in both),
            " / ".join(str(r["verbatim_with_end"]) for r in both),
            " / ".join(_share(r["reply_chars_before_divergence"], r["reply_chars"]) for r in both),
            " / ".join(_share(r["worker"]["in_last_chain"], r["worker"]["sampled_tokens"]) for r in both),
            " / ".join(_share(r["tekken"]["in_last_chain"], r["tekken"]["sampled_tokens"]) for r in both),
            " / ".join(_share(r["worker"]["in_cover"], r["worker"]["sampled_tokens"]) for r in both),
            " / ".join(f"{r['worker']['cover_chains'] / r['conversations']:.1f}" for r in both),
            " / ".join(str(r["messages_echoed"]) for r in both) if "messages_echoed" in clean else "",
            ", ".join(f"{name} {count}" for name, count in causes.most_common()),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", default="http://127.0.0.1:30100", help="URL of the SGLang worker")
    parser.add_argument("--model", type=Path, required=True, help="folder of the worker's model")
    parser.add_argument("--conversations", type=int, default=7, help="per variant and kind of reply")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where the results go")
    options = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)  # half of what people run is deprecated; that is the point
    worker = Worker(options.model)
    vocabularies: list[Vocabulary] = [worker, Tekken(worker)]
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    with Proxy(options.worker, worker.id("<|endoftext|>")) as proxy, concurrent.futures.ThreadPoolExecutor(8) as pool:
        for number, variant in enumerate(variants(options.model)):
            for ragged in (False, True):
                one = functools.partial(converse, proxy, variant, number, ragged)
                results = list(pool.map(one, range(options.conversations)))
                row: dict[str, Any] = {
                    "loop": variant.loop,
                    "variant": variant.name,
                    "replies": "ragged" if ragged else "clean",
                }
                row |= summarize([conversation.turns for conversation, _ in results], vocabularies)
                if variant.template:
                    row["messages_echoed"] = sum(sum(conversation.echoes) for conversation, _ in results)
                rows.append(row)
                if variant.loop == "1 search":
                    facts[f"{variant.name}, {row['replies']}"] = {
                        v.name: search_facts(results, v, "whole" in variant.name) for v in vocabularies
                    }
            print(table(rows[-2:]).splitlines()[-1], flush=True)
        facts["5 prompts, 8 samples each, 2 of them aborted early"] = {
            "cut at </search>": groups(proxy, True, 5, worker),
            "reply kept whole": groups(proxy, False, 5, worker),
        }
    versions = {
        name: version(name) for name in ("trl", "langchain-openai", "langchain-classic", "openai", "mistral-common")
    }
    versions["python"] = platform.python_version()
    versions["sglang"] = worker_version(options.worker)
    results_json = {"versions": versions, "rows": rows, "facts": facts}
    (options.out / "results.json").write_text(json.dumps(results_json, indent=1, ensure_ascii=False) + "\n")
    (options.out / "results.md").write_text(table(rows))


def worker_version(url: str) -> str:
    """Return the worker's version."""
    with urllib.request.urlopen(url + "/get_server_info", timeout=30) as reply:
        return str(json.load(reply)["version"])


if __name__ == "__main__":
    main()
