"""The tokenizer that transformers loads from a folder. The only file of this package that uses transformers.

transformers decides what a worker's tokenizer is: its classes may build another one than the folder's tokenizer.json says.
Importing and asking it takes two seconds of processor time. So the tokenizer of a local folder is kept (`kept`) for the next
start, which finds it as long as neither a file of the folder nor a library has changed.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from stat import S_ISDIR

import msgspec
from tokenizers import Tokenizer as Backend

from middleware_hub.tokenizer import kept
from middleware_hub.tokenizer.settings import fingerprint, read_settings
from router.errors import BadRequestError

logger = logging.getLogger(__name__)

PROBES = ("Hello world", " leading space", "naïve café 你好 🙂\n\n\tend", "x")

LIBRARIES = ("transformers", "tokenizers", "huggingface-hub", "sentencepiece", "protobuf", "tiktoken", "mistral-common")
"""The libraries with which transformers loads tokenizers. Another version, or one more library, may make another tokenizer."""

_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken*")
"""A folder with none of these has no tokenizer."""

_VERSION = 2
"""The version of `LoadedTokenizer`. Raise it when that class changes, or its sources."""


class LoadedTokenizer(msgspec.Struct, frozen=True):
    """A tokenizer as transformers has it.

    Attributes:
        tokenizer_json: its backend, as `tokenizers` writes it.
        chat_template: Jinja source; if there are several, each has a name: `default`, `tool_use`.
        special_tokens_map: `bos_token` and so on, with their texts.
        vocabulary_size: the model's, if known: models pad their vocabulary.
        probes: the ids that it makes of `PROBES`.
        fingerprint: see `settings.fingerprint`.
    """

    tokenizer_json: str
    chat_template: str | dict[str, str] | None
    special_tokens_map: dict[str, str]
    vocabulary_size: int | None
    probes: list[list[int]]
    fingerprint: str


_decoder = msgspec.json.Decoder(LoadedTokenizer)


def load(path: str, *, trust_remote_code: bool) -> tuple[LoadedTokenizer, Backend]:
    """Load a tokenizer from a folder or a hub id.

    Raises:
        BadRequestError: it cannot be loaded.
    """
    try:
        there = S_ISDIR(os.stat(path).st_mode)  # `Path.is_dir` keeps other errors to itself from Python 3.14 on
    except (FileNotFoundError, NotADirectoryError):
        there = False
    except OSError as error:  # this user may not look into the folder above it
        raise BadRequestError(f"--tokenizer-path {path}: {error.strerror}") from error
    # The content of a hub id may change, and foreign code may do anything.
    folder = Path(path) if there and not trust_remote_code else None
    key = None if folder is None else kept.fingerprint(folder, LIBRARIES, _VERSION)
    content = None if key is None else kept.get(key)
    if content is not None:
        found = _decoder.decode(content)
        return found, Backend.from_str(found.tokenizer_json)
    found, backend = _asked(path, trust_remote_code)
    # Do not keep it if a file changed in the meantime.
    if folder is not None and key is not None and key == kept.fingerprint(folder, LIBRARIES, _VERSION):
        kept.put(key, msgspec.json.encode(found))
    return found, backend


def _asked(path: str, trust_remote_code: bool) -> tuple[LoadedTokenizer, Backend]:
    if (
        path.startswith(("/", "./", "../", "~")) and not Path(path).exists()
    ):  # otherwise it would be taken for a misspelt hub id
        raise BadRequestError(f"--tokenizer-path {path}: there is no such folder")
    folder = Path(path)
    if folder.is_file():
        raise BadRequestError(f"--tokenizer-path {path}: this is a file: give its folder, {folder.absolute().parent}")
    if folder.is_dir() and not any(next(folder.glob(name), None) for name in _FILES):
        raise BadRequestError(
            f"--tokenizer-path {path}: no tokenizer could be loaded from it: this folder has no tokenizer.json"
        )
    from transformers import AutoTokenizer, PreTrainedConfig  # takes a second: only if nothing was kept

    quiet_libraries()
    if not folder.is_dir():
        logger.info("there is no folder %s: the router loads the tokenizer from the Hugging Face hub", path)
    try:
        loaded = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        hint = "" if folder.is_dir() else " (no folder has this name, so it was taken for a hub id)"
        why = " ".join(str(error).split())
        raise BadRequestError(f"--tokenizer-path {path}: no tokenizer could be loaded from it{hint}: {why}") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise BadRequestError(
            f"--tokenizer-path {path}: {type(loaded).__name__} is not a fast tokenizer; "
            "a folder with a tokenizer.json is needed (save_pretrained of a fast tokenizer writes one)"
        )
    try:
        settings, _ = PreTrainedConfig.get_config_dict(path)
    except OSError:
        settings = {}
    sizes = [part.get("vocab_size") for part in (settings, settings.get("text_config") or {})]
    special = {name: token for name, token in loaded.special_tokens_map.items() if isinstance(token, str)}
    probes = [list(loaded(text)["input_ids"]) for text in PROBES]
    backend.no_truncation()
    backend.no_padding()
    tokenizer_json = backend.to_str()
    return (
        LoadedTokenizer(
            tokenizer_json=tokenizer_json,
            chat_template=loaded.chat_template,
            special_tokens_map=special,
            vocabulary_size=next((size for size in sizes if isinstance(size, int)), None),
            probes=probes,
            fingerprint=fingerprint(read_settings(tokenizer_json)),
        ),
        backend,
    )


def quiet_libraries() -> None:
    """Remove the libraries' handlers, so that their messages take the form of our log. Call it once they are imported."""
    for name in ("transformers", "huggingface_hub"):
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
    logging.getLogger("transformers.configuration_utils").addFilter(_is_of_tokenizers)


def _is_of_tokenizers(record: logging.LogRecord) -> bool:
    """Return False for the doubt whether a checkpoint fits its class. The class is of a model, and none is loaded here."""
    return not record.getMessage().startswith("You are using a model of type")
