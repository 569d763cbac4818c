"""A vocabulary of a dozen ids in which everything that makes tokenization hard happens all the time.

`ab` is one token or two, `é` is two halves, `<e>` is special, one id spells nothing.
"""

from __future__ import annotations

from middleware_hub.tokenizer.vocabulary import Vocabulary

A, B, AB, BA, SPACE, EOS, E_HEAD, E_TAIL, NOTHING, SPACE_A, EOT, LT, E, T, GT = range(15)
PIECES = {
    A: b"a",
    B: b"b",
    AB: b"ab",
    BA: b"ba",
    SPACE: b" ",
    EOS: b"<e>",
    E_HEAD: "é".encode()[:1],
    E_TAIL: "é".encode()[1:],
    NOTHING: b"",
    SPACE_A: b" a",
    EOT: b"<t>",
    LT: b"<",
    E: b"e",
    T: b"t",
    GT: b">",
}
LITERALS = {"<e>": EOS, "<t>": EOT}


def toy_vocabulary() -> Vocabulary:
    return Vocabulary(PIECES, special=[EOS, EOT], boundaries=[EOS, EOT], added=[EOS, EOT])


def encode(text: str) -> list[int]:
    """Longest match, left to right; characters that no id spells are ids of halves of `é`."""
    ids: list[int] = []
    i = 0
    while i < len(text):
        for literal, token in LITERALS.items():
            if text.startswith(literal, i):
                ids.append(token)
                i += len(literal)
                break
        else:
            for token in (AB, BA, SPACE_A, A, B, SPACE, LT, E, T, GT):
                piece = PIECES[token].decode()
                if text.startswith(piece, i):
                    ids.append(token)
                    i += len(piece)
                    break
            else:
                ids += [E_HEAD, E_TAIL]
                i += 1
    return ids
