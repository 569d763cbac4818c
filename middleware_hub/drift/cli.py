"""`tito-router drift`."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

from middleware_hub.drift.compare import Drift, drifts
from middleware_hub.drift.log import read_log
from middleware_hub.tokenizer.loaded import load
from router.errors import BadRequestError

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
    if args.text_log == "-":
        replies = list(read_log(sys.stdin.buffer))
    else:
        with open(args.text_log, "rb") as file:
            replies = list(read_log(file))
    if not replies:
        raise BadRequestError(f"--text-log {args.text_log}: there is no reply in it")
    _, backend = load(args.tokenizer, trust_remote_code=args.trust_remote_code)
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


def report(found: Sequence[Drift], examples: int) -> str:
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


def _row(name: str, found: Sequence[Drift], counts: Sequence[int], tokens: int) -> tuple[str, ...]:
    changed = sum(count > 0 for count in counts)
    return name, str(sum(counts)), _share(sum(counts), tokens), str(changed), _share(changed, len(found))


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "-"


def write_parquet(found: Sequence[Drift], path: str) -> None:
    """Write a row for each reply. Raises BadRequestError without pyarrow."""
    try:
        import pyarrow as pa
        from pyarrow.parquet import write_table
    except ImportError as error:
        raise BadRequestError("--parquet needs pyarrow: pip install 'tito-router[export]'") from error
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
