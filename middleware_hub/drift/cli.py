"""`tito-router drift`: compares the sampled ids in the log of a loop with those of the same text, encoded again.

Two ways of encoding are in use, and both are compared. `whole` encodes the conversation at its end, and takes the tokens that
lie in the reply. `alone` encodes each reply by itself. A sampled token is trained on only if it is among the new ones, in
order:

    sampled   [ four][ty][-two][<|im_end|>]
    whole     [ forty][-two]                       2 of 4 changed, 1 of them without a text; 1 new token that was not sampled
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec
from tokenizers import Tokenizer as Backend

from middleware_hub.tokenizer.loaded import load
from router.engines.json import JSON_ERRORS
from router.errors import BadRequestError
from router.flags import tokenizer_path

MAX_ID: Final = 2**31 - 1


@dataclass(frozen=True)
class LoggedReply:
    """One reply.

    Attributes:
        line: its number in the file, from 1.
        conversation: the name of its conversation in the log; empty without one.
        prompt: the text that was sent. Empty if ids were sent.
        text: the reply's.
        ids: the sampled ids.
    """

    line: int
    conversation: str
    prompt: str
    text: str
    ids: list[int]

    @property
    def whole(self) -> str:
        return self.prompt + self.text


def read_log(lines: Iterable[bytes]) -> Iterator[LoggedReply]:
    """Read lines of JSON. Raises BadRequestError with the number of a line that is not JSON, or that lacks a field."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _reply(number, msgspec.json.decode(line))
        except (*JSON_ERRORS, KeyError, TypeError, IndexError, AttributeError) as error:
            wrong = f"it has no `{error.args[0]}`" if isinstance(error, KeyError) else repr(error)
            raise BadRequestError(
                f"line {number}: {wrong}. A line is {{'prompt': text, 'text': the reply, 'output_ids': [ids]}}, or a body "
                "and an answer of /generate: {'request': {'text': ...}, 'response': {'text': ..., 'output_ids': [...]}}"
            ) from error


def _reply(number: int, fields: dict[str, Any]) -> LoggedReply:
    answer = fields.get("response", fields)
    prompt = fields["request"].get("text", "") if "request" in fields else fields.get("prompt", "")
    meta = answer.get("meta_info") or {}
    ids = answer.get("output_ids")
    if ids is None and "output_token_logprobs" in meta:
        ids = [pair[1] for pair in meta["output_token_logprobs"]]
    elif ids is None:
        raise KeyError("output_ids")
    if not isinstance(prompt, str) or not isinstance(answer["text"], str):
        raise TypeError("`prompt` and `text` are one text each: write a line for each reply of a batch")
    if not all(type(one) is int and 0 <= one <= MAX_ID for one in ids):
        raise TypeError(f"`output_ids` are numbers from 0 to {MAX_ID}")
    return LoggedReply(number, str(fields.get("conversation", "")), prompt, answer["text"], ids)


@dataclass(frozen=True)
class ReplyDrift:
    """The result for one reply.

    Attributes:
        reply: as it was logged.
        sampled: its tokens.
        hidden: tokens at its end that its text lacks: an EOS, a stop string. No text can bring them back.
        whole_changed, whole_new: the tokens that the encoding of the whole text lacks, and the tokens that it has instead.
        alone_changed, alone_new: the same for the reply's own encoding.
        left_out: whether the conversation's last text no longer begins with this reply: then nothing of it is trained on.
        mismatch: whether the ids do not spell the text at all: another tokenizer, or another reply.
        example: the first difference, as the pieces that were sampled and those that were encoded.
    """

    reply: LoggedReply
    sampled: int
    hidden: int
    whole_changed: int
    whole_new: int
    alone_changed: int
    alone_new: int
    left_out: bool
    mismatch: bool
    example: tuple[str, str]


def drifts(replies: Sequence[LoggedReply], backend: Backend) -> Iterator[ReplyDrift]:
    """Yield the result for each reply, conversation by conversation."""
    for last, members in _by_last_text(replies):
        encoded = backend.encode(last, add_special_tokens=False)
        for reply, left_out in members:
            begin, end = len(reply.prompt), len(reply.whole)
            whole = encoded
            if left_out:  # it is compared with its own text: that is what would have been trained on
                whole = backend.encode(reply.whole, add_special_tokens=False)
            inside = [
                token
                for token, (low, high) in zip(whole.ids, whole.offsets, strict=True)
                if (low < end and high > begin) or begin <= low == high < end
            ]
            alone = backend.encode(reply.text, add_special_tokens=False).ids
            yield _drift(reply, inside, alone, backend, left_out=left_out)


def _by_last_text(replies: Sequence[LoggedReply]) -> Iterator[tuple[str, list[tuple[LoggedReply, bool]]]]:
    """Yield the last text of each conversation, with its replies and whether each one is no longer in it."""
    named = sorted((one for one in replies if one.conversation), key=lambda one: one.conversation)
    for _, group in groupby(named, key=lambda one: one.conversation):
        members = sorted(group, key=lambda one: one.line)
        last = members[-1].whole
        yield last, [(one, not last.startswith(one.whole)) for one in members]
    # Without names: a text belongs to the next longer text that begins with it. Sorted, texts that begin alike are neighbours.
    chain: list[LoggedReply] = []
    for one in sorted((one for one in replies if not one.conversation), key=lambda one: one.whole):
        if chain and not one.whole.startswith(chain[-1].whole):
            yield chain[-1].whole, [(member, False) for member in chain]
            chain = []
        chain.append(one)
    if chain:
        yield chain[-1].whole, [(member, False) for member in chain]


def _drift(
    reply: LoggedReply, whole: Sequence[int], alone: Sequence[int], backend: Backend, *, left_out: bool
) -> ReplyDrift:
    in_whole, example = _kept(reply.ids, whole, backend)
    in_alone, _ = _kept(reply.ids, alone, backend)
    spelled = backend.decode(reply.ids, skip_special_tokens=False)
    bare = backend.decode(reply.ids, skip_special_tokens=True)
    return ReplyDrift(
        reply=reply,
        sampled=len(reply.ids),
        hidden=_hidden(reply, backend),
        whole_changed=len(reply.ids) - in_whole,
        whole_new=len(whole) - in_whole,
        alone_changed=len(reply.ids) - in_alone,
        alone_new=len(alone) - in_alone,
        left_out=left_out,
        mismatch=not any(one.strip().startswith(reply.text.strip()[:40]) for one in (spelled, bare)),
        example=example,
    )


def _kept(sampled: Sequence[int], encoded: Sequence[int], backend: Backend) -> tuple[int, tuple[str, str]]:
    """Return how many sampled tokens are in an encoding, in order, and the first difference."""
    matcher = SequenceMatcher(None, sampled, encoded, autojunk=False)
    codes = matcher.get_opcodes()
    kept = sum(end - begin for kind, begin, end, _, _ in codes if kind == "equal")
    for kind, low, high, begin, end in codes:
        if kind == "replace":
            return kept, (_pieces(sampled[low:high], backend), _pieces(encoded[begin:end], backend))
    return kept, ("", "")


def _pieces(ids: Iterable[int], backend: Backend) -> str:
    return " ".join(repr(backend.decode([one], skip_special_tokens=False)) for one in ids)


def _hidden(reply: LoggedReply, backend: Backend) -> int:
    """Return how many tokens at the end contribute nothing to the text."""
    count = 0
    while count < len(reply.ids):
        shorter = backend.decode(reply.ids[: len(reply.ids) - count - 1], skip_special_tokens=False)
        if not shorter.startswith(reply.text):
            break
        count += 1
    return count


_DESCRIPTION = """\
Counts the tokens that a loop trains wrongly because it encodes its text again: sampled ids against those of the same text. Each
line of the log is a reply: {"prompt": text, "text": the reply, "output_ids": [ids], "conversation": a name, if there is one},
or {"request": a body of /generate, "response": its answer}.
"""
_STATUS = (
    "The status is 0, or 1 if most ids do not spell their texts with this tokenizer, or 2 for a wrong flag or line."
)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tito-router drift", description=_DESCRIPTION, epilog=_STATUS, allow_abbrev=False
    )
    parser.add_argument("--text-log", required=True, metavar="FILE", help="JSON lines; - for standard input")
    parser.add_argument(
        *("--tokenizer-path", "--tokenizer"),
        required=True,
        dest="tokenizer",
        metavar="PATH",
        help="a folder or a hub id: that of the model",
    )
    parser.add_argument("--parquet", metavar="FILE", help="also write a row for each reply")
    parser.add_argument("--examples", type=int, default=5, metavar="N", help="differences to print (%(default)s)")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code that comes with the tokenizer"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command, and exit with its status."""
    flags = parser()
    args = flags.parse_args(argv)
    try:
        sys.exit(_run(args))
    except BadRequestError as error:
        flags.exit(2, f"{flags.prog}: error: {error.message}\n")
    except OSError as error:
        flags.exit(2, f"{flags.prog}: error: {error}\n")


def _run(args: argparse.Namespace) -> int:
    if args.parquet:
        check_parquet(args.parquet)
    if args.text_log == "-":
        replies = list(read_log(sys.stdin.buffer))
    else:
        with open(args.text_log, "rb") as file:
            replies = list(read_log(file))
    if not replies:
        raise BadRequestError(f"--text-log {args.text_log}: there is no reply in it")
    _, backend = load(tokenizer_path(args.tokenizer), trust_remote_code=args.trust_remote_code)
    found = sorted(drifts(replies, backend), key=lambda one: one.reply.line)
    sys.stdout.write(report(found, args.examples))
    if args.parquet:
        write_parquet(found, args.parquet)
    mismatches = sum(one.mismatch for one in found)
    if mismatches * 2 > len(found):
        sys.stderr.write(
            f"{mismatches} of {len(found)} replies: their ids do not spell their text. Is it their tokenizer?\n"
        )
        return 1
    return 0


def report(found: Sequence[ReplyDrift], examples: int) -> str:
    """Return the table, and the differences that occur most often."""
    tokens = sum(one.sampled for one in found)
    rows = [
        ("encoded again", "tokens", "of sampled", "replies", "of replies"),
        _row("the whole text at the end: sampled tokens lost", found, [one.whole_changed for one in found], tokens),
        _row("  tokens trained that were never sampled", found, [one.whole_new for one in found], tokens),
        _row("each reply by itself: sampled tokens lost", found, [one.alone_changed for one in found], tokens),
        _row("  tokens trained that were never sampled", found, [one.alone_new for one in found], tokens),
        _row("either: lost because the text lacks them (EOS, stop)", found, [one.hidden for one in found], tokens),
        _row(
            "not in the last text of its conversation",
            found,
            [one.sampled if one.left_out else 0 for one in found],
            tokens,
        ),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [f"{len(found)} replies, {tokens} sampled tokens\n"]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    common = Counter(one.example for one in found if one.example != ("", "")).most_common(max(0, examples))
    if common:
        lines.append("\nfirst differences, the most frequent first")
        lines += [f"{count:6}  sampled {sampled}  encoded {encoded}" for (sampled, encoded), count in common]
    return "\n".join(lines) + "\n"


def _row(name: str, found: Sequence[ReplyDrift], counts: Sequence[int], tokens: int) -> tuple[str, ...]:
    changed = sum(count > 0 for count in counts)
    return name, str(sum(counts)), _share(sum(counts), tokens), str(changed), _share(changed, len(found))


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "-"


def check_parquet(path: str) -> None:
    """Raise BadRequestError if a file could not be written at the end: a long log would have been read for nothing."""
    if importlib.util.find_spec("pyarrow") is None:
        raise BadRequestError("--parquet needs pyarrow: pip install 'tito-router[export]'")
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise BadRequestError(f"--parquet {path}: there is no folder {folder}")


def write_parquet(found: Sequence[ReplyDrift], path: str) -> None:
    """Write a row for each reply; pyarrow is there (`check_parquet`)."""
    import pyarrow as pa
    from pyarrow.parquet import write_table

    columns: dict[str, list[Any]] = {
        "line": [one.reply.line for one in found],
        "conversation": [one.reply.conversation for one in found],
        **{
            name: [getattr(one, name) for one in found]
            for name in ("sampled hidden whole_changed whole_new alone_changed alone_new left_out mismatch".split())
        },
        "sampled_pieces": [one.example[0] for one in found],
        "encoded_pieces": [one.example[1] for one in found],
    }
    write_table(pa.table(columns), path)
