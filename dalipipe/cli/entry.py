"""From `sys.argv` to a verb, and from errors to exit codes.

Kept free of heavy imports: `dalipipe --help` answers before Hydra or torch are touched.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module, metadata
from typing import Protocol

from dalipipe.errors import ConfigError, DalipipeError
from dalipipe.interrupts import Stopping
from dalipipe.masking import masked

VERBS = {
    "demo": "make a small lake of real JPEGs, pack it, train a tiny net through the whole pipeline; no network",
    "pack": "source=URL target=URL pack=images|tars: a lake of files to tar shards with manifest and index",
    "index": "source=URL: a manifest for tars that exist already, in place or at target=URL",
    "merge": "sources=[URL,URL] target=URL: one data set of several, by manifest, without copying",
    "preview": "a contact sheet of what the model will see of the data set at data.url",
    "info": "what the data set at data.url holds",
    "verify": "checksums, tar structure and decodability of the data set at data.url",
    "bench": "throughput of the loader; utilisation of an accelerator emulated by bench.step_s",
    "spin": "the idle-spin upper bound: the same step fed from batches held in memory",
    "doctor": "what bounds a run (folder or metrics ports), what it costs and which knob to turn; `env`: this host",
    "top": "a running job, live: what each rank waits for (run folder or metrics ports)",
    "report": "one HTML file about a run folder: verdict, where the time went, tails, queues, cost",
    "plan": "what a job of plan.gpus=N GPUs will do, simulated: AU, lake, caches, cost; plan.from=RUN calibrates",
    "cache": "stat | warm | verify | clear: what the cache of this node holds",
}
# Verbs whose first bare word is an action, and verbs that take the data set's URL as a bare word.
_ACTIONS = {"cache": ("stat", "warm", "verify", "clear")}
_URL_VERBS = ("info", "verify", "preview", "bench", "spin", "plan")
# Verbs whose first bare word is a run: its folder, or the metrics ports of its ranks.
_RUN_VERBS = ("doctor", "top", "report")

_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
_EXIT_BY_SIGNAL = 128


class Verb(Protocol):
    """A module `dalipipe.cli.<verb>`: `run` does the work and returns the exit code."""

    def run(self, cfg: object, *, as_json: bool) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb. Returns 0 done, 1 the data or the check failed, 2 wrong usage, 130 interrupted, 143 terminated.

    Without `argv` it is the command of its process, which then ends; with it, signal handlers are as before afterwards.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(_help())
        return EXIT_OK if args else EXIT_USAGE
    if args[0] in ("-V", "--version", "version"):
        print(f"dalipipe {_version()}")
        return EXIT_OK
    verb, rest = args[0], args[1:]
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        return _fail(f"unknown verb '{verb}'; {hint}Verbs: {', '.join(VERBS)}", EXIT_USAGE)
    as_json = "--json" in rest
    level = os.environ.get("DALIPIPE_LOG", "WARNING").upper()
    if level not in _LOG_LEVELS:
        return _fail(f"DALIPIPE_LOG={level} is not one of {', '.join(_LOG_LEVELS)}", EXIT_USAGE)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_MaskingFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    stopping = Stopping(ends_process=argv is None)
    try:
        with stopping:
            return _run(verb, _bare_words(verb, [word for word in rest if word != "--json"]), as_json, stopping)
    except KeyboardInterrupt:
        how = "terminated" if stopping.number == signal.SIGTERM else "interrupted"
        return _fail(how, _EXIT_BY_SIGNAL + (stopping.number or signal.SIGINT))
    except BrokenPipeError:
        with contextlib.suppress(OSError):  # the reader of stdout left: nothing more to say there
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except DalipipeError as error:
        return _fail(str(error), error.exit_code)
    except OSError as error:
        return _fail(f"{verb}: {error}", EXIT_FAILED)
    except Exception as error:  # noqa: BLE001 - the last one who can say it
        if level == "DEBUG":
            return _fail(traceback.format_exc(), EXIT_FAILED)
        text = f"{verb} failed where it should not: {type(error).__name__}: {error}"
        return _fail(f"{text} (DALIPIPE_LOG=DEBUG shows where; please report it)", EXIT_FAILED)


class _MaskingFormatter(logging.Formatter):
    """Log lines, of clients' libraries and with tracebacks too, without the secrets of URLs."""

    def format(self, record: logging.LogRecord) -> str:
        return masked(super().format(record))


def _run(verb: str, words: list[str], as_json: bool, stopping: Stopping) -> int:
    try:
        from dalipipe.cli.compose import run_hydra

        module: Verb = import_module(f"dalipipe.cli.{verb}")
        code = run_hydra(verb, words, lambda cfg: module.run(cfg, as_json=as_json), about=VERBS[verb])
    except Exception as error:
        if stopping.number is not None:  # an import that was broken off, a reader that the same Ctrl-C ended
            raise KeyboardInterrupt from error
        raise
    if stopping.number is not None:
        raise KeyboardInterrupt
    return code


def _bare_words(verb: str, words: list[str]) -> list[str]:
    """Turns `info URL` into `info data.url=URL`, `cache stat` into `cache action=stat`, `report RUN` into `run=RUN`,
    and `plan from=RUN` into `plan.from=RUN`."""
    from dalipipe.cli.words import is_bare, quoted, split_flags

    flags, others = split_flags(words)
    if verb == "plan":
        others = [f"plan.{word}" if word.startswith("from=") else word for word in others]
        words = [*flags, *others]
    place = next((i for i, word in enumerate(others) if is_bare(word)), None)
    if place is None:
        return words
    word = others[place]
    if verb in _ACTIONS:
        if word not in _ACTIONS[verb]:
            raise ConfigError(f"dalipipe {verb} {word!r}: use one of {', '.join(_ACTIONS[verb])}")
        others[place] = f"action={word}"
    elif verb in _URL_VERBS or verb in _RUN_VERBS:
        others[place] = f"{'data.url' if verb in _URL_VERBS else 'run'}={quoted(word)}"
    elif verb == "index":
        others[place] = f"source={quoted(word)}"
    return [*flags, *others]


def _help() -> str:
    lines = [f"  {verb:<8}{text}" for verb, text in VERBS.items()]
    return "\n".join(
        [
            "dalipipe VERB [key=value ...] [--json]",
            "",
            *lines,
            "",
            "Keys are Hydra overrides: `dalipipe VERB --cfg job` prints them all, `dalipipe VERB --help` has examples.",
            "--config-dir, --config-name and --multirun work as Hydra users know them.",
            "Exit code: 0 done, 1 the data or the check failed, 2 wrong usage; ended by SIGINT 130, by SIGTERM 143.",
        ]
    )


def _version() -> str:
    try:
        return metadata.version("dalipipe")
    except metadata.PackageNotFoundError:
        return "(a checkout that is not installed)"


def _fail(message: str, code: int) -> int:
    print(f"dalipipe: {masked(message)}", file=sys.stderr)
    return code
