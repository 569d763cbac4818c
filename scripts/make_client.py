"""Make `middleware_hub/client/sync.py`, the blocking client, from `asynchronous.py`.

Usage: python -m scripts.make_client

The calls of both clients are the same; only how they travel differs (`transport.py`). So the script rewrites words, as httpcore
does with its own client.
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "middleware_hub" / "client"
SOURCE, MADE = FOLDER / "asynchronous.py", FOLDER / "sync.py"

DOC = '''"""The blocking client: `Client`, and conversations and sessions with it.

`scripts/make_client.py` made this file from `asynchronous.py`: edit that one, and run `make client`.
"""
'''
PARTS = {
    """    def __init__(self, client: Client, made: Mapping[str, Any]) -> None:
        self.client = client
""": """    def __init__(self, client: Client, **options: Unpack[SessionOptions]) -> None:
        self.client = client
        made = client.run(operations.create_session(options))
""",
    '''    @classmethod
    def create(cls, client: Client, **options: Unpack[SessionOptions]) -> Self:
        """Make a session at the router."""
        made = client.run(operations.create_session(options))
        return cls(client, made)

''': "",
}
"""What differs otherwise: a constructor may wait here."""
WORDS = {
    r"\basync (?=def |with |for )": "",
    r"\bawait ": "",
    r"\b__a(?=enter__|exit__)": "__",
    r"\ban `Async": "a `",
    r"\bAsyncGenerator\[(\w+), None\]": r"Iterator[\1]",
    r"\bAsyncGenerator\b": "Iterator",
    r"\bAsync(?=[A-Z])": "",
}


def made(source: str) -> str:
    """Return the blocking client. Raises ValueError if the source lacks a part that has to be another one."""
    text = source
    for word, other in WORDS.items():
        text = re.sub(word, other, text)
    for part, other in PARTS.items():
        if part not in text:
            raise ValueError(f"the source has no such part any more: mend PARTS. {part}")
        text = text.replace(part, other)
    return DOC + text[text.index("\nfrom __future__") :]


if __name__ == "__main__":
    MADE.write_text(made(SOURCE.read_text(encoding="utf-8")), encoding="utf-8")
