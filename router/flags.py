"""The command line's flags, made from the configuration, and the configuration made from parsed flags.

Each field in `router/config` that a flag sets describes it. Names follow SGLang's router where it has one. Three flags are
written out here, because they do not set one field: `--version`, `--no-sessions` and `--middleware`.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, NoReturn, get_args, get_origin, get_type_hints

from router.config import MOVED, RADIX_TREE_MIDDLEWARE, SESSIONS_MIDDLEWARE, RouterConfig, SessionsConfig, WorkersConfig
from router.config.flag import FlagSpec, Section, flag_of
from router.errors import BadRequestError
from router.policies import POLICIES, parameters_class
from router.policies.base import PolicyParameters
from router.version import __version__
from router.workers.worker import dns_name, normalize_url

NO_MIDDLEWARE = "none"

_ABOUT = """\
Text in, exact tokens out: a router in front of SGLang or vLLM workers.

commands (COMMAND --help has the flags of each):
  demo          two small workers and a router on this machine, without a GPU, and what they show
  demo-agent    the same for agents that send messages
  demo-worker   one such worker, to try a router on
  drift         count in logs how much changes if text is encoded again
  report        figures of all that is in a store
  store         look at, check, prune and export a store

Without a command it is the router, with the flags below.
"""

_EXAMPLES = f"""\
examples:
  a router that remembers every sampled token, in front of two SGLang servers:
    tito-router --tokenizer-path Qwen/Qwen3-8B --worker-urls http://10.0.0.1:30001 http://10.0.0.2:30001

  start without workers and add them at run time:
    tito-router --tokenizer-path /models/qwen3 --port 30000
    curl -X POST 'http://127.0.0.1:30000/add_worker?url=http://10.0.0.1:30001'

  only route:
    tito-router --middleware {NO_MIDDLEWARE} --worker-urls http://10.0.0.1:30001 --policy power_of_two

  ask for text, then for its tokens:
    curl http://127.0.0.1:30000/generate -H 'content-type: application/json' \\
      -d '{{"text": "Hello", "sampling_params": {{"max_new_tokens": 16}}}}'
    curl http://127.0.0.1:30000/retrieve_from_text -H 'content-type: application/json' -d '{{"text": "Hello..."}}'

Start the SGLang servers with --incremental-streaming-output if you stream long generations: without it every
event repeats all the text before it, 80 MB for 2,000 tokens with logprobs.
"""


_ELSEWHERE = {
    "--key": "--api-key",
    "--model": "--tokenizer-path",
    "--model-path": "--tokenizer-path",
    "--url": "--worker-urls",
    "--worker": "--worker-urls",
    "--workers": "--worker-urls",
}
"""What engines and other routers call a flag, where the letters say nothing, or lead to another flag."""

_METAVARS = {int: "N", float: "SECONDS", str: "NAME", Path: "FILE"}


class FlagParser(argparse.ArgumentParser):
    """The parser of the router's own flags, whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help shows all flags)\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exit for arguments that are not known. Names the flag that a misspelt one is most like."""
        given = next((one for one in unknown if one.startswith("-")), unknown[0]).partition("=")[0]
        given = given.replace("_", "-")
        known = self._option_string_actions
        alike = [_ELSEWHERE[given]] if given in _ELSEWHERE else get_close_matches(given, known, 1, 0.75)
        advice = f": did you mean {alike[0]}?" if alike else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{advice}")


class _OnOff(argparse.Action):
    def __call__(self, _: object, namespace: argparse.Namespace, value: Any, __: object = None) -> None:
        setattr(namespace, self.dest, value == "on")


def parser() -> FlagParser:
    """Return the parser. Its result has only the flags that were given; the configuration has the defaults."""
    parser = FlagParser(
        prog="tito-router",
        usage="%(prog)s [flags]\n       %(prog)s COMMAND [flags]",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}", help="print the version")
    title = ""
    for path, section in _sections(RouterConfig):
        if title != section.TITLE:
            title = section.TITLE
            group = parser.add_argument_group(title)
        if section is SessionsConfig:
            group.add_argument(
                "--no-sessions",
                action="store_true",
                help="serve no sessions, and pass chats without a session on to the workers; --middleware overrules it",
            )
        kinds = get_type_hints(section)
        for field in fields(section):
            if (flag := flag_of(field.metadata)) is not None:
                if path + field.name == "workers.policy":
                    flag = replace(flag, help=f"{flag.help}: {', '.join(POLICIES)}")
                _add(group, flag, field.default, kinds[field.name], path + field.name)
    parser.add_argument_group("plug-ins").add_argument(
        "--middleware",
        action="append",
        metavar="pkg.mod:Class",
        help="middleware to serve with; repeatable, the first one outermost, this project's own inside; "
        f"'{NO_MIDDLEWARE}' for a plain router ({SESSIONS_MIDDLEWARE}, {RADIX_TREE_MIDDLEWARE})",
    )
    return parser


def _sections(config: Any, path: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield the sections of a configuration in order, each with the path to its fields and before its own sections.

    The parameters of the policies follow the workers; the path to them is the policy's name.
    """
    for name, kind in get_type_hints(config).items():
        if is_dataclass(kind):
            section: Any = kind
            yield f"{path}{name}.", section
            if section is WorkersConfig:
                yield from ((f"{policy}.", parameters) for policy, parameters in _parameters())
            yield from _sections(kind, f"{path}{name}.")


def _parameters() -> Iterator[tuple[str, type[PolicyParameters]]]:
    """Yield the policies that have parameters, by name."""
    for name in POLICIES:
        if (kind := parameters_class(name)) is not None:
            yield name, kind


def _add(group: argparse._ArgumentGroup, flag: FlagSpec, default: Any, kind: Any, dest: str) -> None:
    """Add the argument for a field of the type `kind`."""
    how: dict[str, Any]
    if kind is bool and (not default or flag.name.startswith("--disable-")):
        how, shown = {"action": "store_false" if default else "store_true"}, ""
    elif kind is bool:
        how, shown = {"action": _OnOff, "choices": ("on", "off")}, "on"
    elif get_origin(kind) is Literal:
        how, shown = {"choices": get_args(kind)}, default
    elif get_origin(kind) is tuple:
        how = {"action": "extend", "nargs": "+"} if flag.many else {"action": "append"}
        how["metavar"], shown = flag.metavar, flag.unset
    else:
        plain = next(each for each in (*get_args(kind), kind) if each is not NoneType)
        limited = "" if flag.limit is None else flag.limit.metavar
        how = {"type": plain, "metavar": flag.metavar or limited or _METAVARS[plain]}
        shown = flag.unset if default is None else f"{default * flag.scale:g}" if plain is float else str(default)
    help = f"{flag.help} ({shown})" if shown else flag.help
    group.add_argument(flag.name, dest=dest, help=help.replace("%", "%%"), **how)


def config_from_args(args: argparse.Namespace) -> RouterConfig:
    """Return the configuration that the flags describe. Raise BadRequestError that names the wrong flag."""
    given = vars(args)
    sessions = () if "no_sessions" in given else (SESSIONS_MIDDLEWARE,)
    middlewares = tuple(MOVED.get(path, path) for path in given.get("middleware", (*sessions, RADIX_TREE_MIDDLEWARE)))
    if NO_MIDDLEWARE in middlewares:
        if len(middlewares) > 1:
            raise BadRequestError(f"--middleware {NO_MIDDLEWARE} cannot be combined with another one")
        middlewares = ()
    if {RADIX_TREE_MIDDLEWARE, SESSIONS_MIDDLEWARE} & set(middlewares) and "radix.tokenizer_path" not in given:
        raise BadRequestError(
            "--tokenizer-path is missing: name the workers' tokenizer,"
            f" or use --middleware {NO_MIDDLEWARE} for a plain router"
        )
    config: RouterConfig = _made(RouterConfig, given, middlewares=middlewares)
    workers = config.workers
    prefill, decode = workers.prefill_policy or workers.policy, workers.decode_policy or workers.policy
    chosen = _chosen_parameters([workers.policy, prefill, decode], given)
    workers = replace(
        workers,
        parameters=chosen.get(workers.policy),
        prefill_parameters=chosen.get(prefill),
        decode_parameters=chosen.get(decode),
    )
    return replace(config, workers=workers)


def _chosen_parameters(policies: Sequence[str], given: Mapping[str, Any]) -> Mapping[str, PolicyParameters]:
    """Return the parameters of those of the policies that have any. Raises BadRequestError for flags of another policy."""
    chosen = {}
    for name, kind in _parameters():
        parameters = _made(kind, given, f"{name}.")
        if name in policies:
            chosen[name] = parameters
            continue
        for field in fields(kind):
            flag = flag_of(field.metadata)
            if flag is not None and not field.default and getattr(parameters, field.name):
                raise BadRequestError(f"{flag.name} is of --policy {name}, not {policies[0]}")
    return chosen


def _made(config: Any, given: Mapping[str, Any], path: str = "", **values: Any) -> Any:
    """Return a configuration of `values`, and of the flags given for its other fields, by `path` and name."""
    kinds = get_type_hints(config)
    for field in fields(config):
        dest = path + field.name
        if is_dataclass(kinds[field.name]):
            values[field.name] = _made(kinds[field.name], given, f"{dest}.")
        elif (flag := flag_of(field.metadata)) is not None and dest in given:
            value = given[dest]
            if dest == "store.url":
                value = store_address(value)
            if dest == "radix.tokenizer_path":
                value = tokenizer_path(value)
            if isinstance(value, list):
                value = _LISTS.get(dest, tuple)(value)
            values[field.name] = value if flag.scale == 1 else value / flag.scale
    return config(**values)


def _prefill_workers(given: Sequence[str]) -> tuple[Any, ...]:
    """Return the workers of `--prefill`, each a URL, with its port if one follows it (`none` for none, as SGLang has it)."""
    found: list[tuple[str, int | None]] = []
    for value in given:
        if not (value.isdecimal() or value == "none"):
            found.append((normalize_url(value), None))
        elif not found or found[-1][1] is not None or not (value == "none" or 0 < int(value) < 1 << 16):
            raise BadRequestError(
                f"--prefill {value}: after a URL comes the port where decode workers find that worker"
            )
        elif value != "none":
            found[-1] = (found[-1][0], int(value))
    return tuple(found)


def tokenizer_path(given: str) -> str:
    """Return the path of a tokenizer, which may have the name of one that demo workers have. Raises BadRequestError.

    A folder of this name comes first.
    """
    function = _DEMO_TOKENIZERS.get(given)
    if function is None or Path(given).is_dir():
        return given
    try:
        shipped = importlib.import_module(_DEMO_MODULE)
    except ModuleNotFoundError as error:
        raise BadRequestError(
            f"--tokenizer-path {given} is the tokenizer of the demo workers, which are in a package of their own, tito-worker: "
            "pip install tito-worker, or in a clone pip install ./worker"
        ) from error
    return str(getattr(shipped, function)())


_DEMO_MODULE: Final = "worker.models.ngram"
_DEMO_TOKENIZERS: Final = {"demo": "shipped_tokenizer", "demo-images": "shipped_image_tokenizer"}


def store_address(given: str) -> str:
    """Return the address of a store, which `@FILE` has in a file: it may have a password. Raises BadRequestError."""
    if not given.startswith("@"):
        return given
    found = _lines("--store", given)
    if len(found) != 1:
        raise BadRequestError(f"--store {given}: there is no address in the file, or more than one")
    return found[0]


def _keys(flag: str, given: Sequence[str]) -> tuple[str, ...]:
    """Return the keys of a flag, and the keys in files that it names, one per line."""
    keys: list[str] = []
    for value in given:
        found = _lines(flag, value) if value.startswith("@") else [value]
        if not found:
            raise BadRequestError(f"{flag} {value}: there is no key in the file")
        keys += found
    return tuple(keys)


def _lines(flag: str, value: str) -> list[str]:
    """Return the lines of the file that `@FILE` names; empty ones and `#` comments are left out."""
    try:
        lines = [line.strip() for line in Path(value[1:]).read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequestError(f"{flag} {value}: the file cannot be read: {error}") from error
    return [line for line in lines if line and not line.startswith("#")]


_LISTS: Mapping[str, Callable[[list[str]], tuple[Any, ...]]] = {
    "server.api_keys": partial(_keys, "--api-key"),
    "server.admin_keys": partial(_keys, "--admin-key"),
    "workers.urls": lambda urls: tuple(map(normalize_url, urls)),
    "workers.dns": lambda names: tuple(map(dns_name, names)),
    "workers.prefill": _prefill_workers,
    "workers.decode": lambda urls: tuple(map(normalize_url, urls)),
}
"""How the values of a repeatable flag are read, if not as they are."""
