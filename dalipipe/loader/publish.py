"""The loader's state on shared storage, for a job that dies without having saved anything itself.

Two objects take turns, so that the one before is whole whatever happens to the one being written; each carries its
number and a digest, so that a torn one is recognised on stores whose writes are not atomic.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dalipipe.errors import ObjectNotFoundError, StateError, StorageError
from dalipipe.shards.digest import digest64
from dalipipe.storage.store import Store
from dalipipe.telemetry import Recorder

FORMAT = "dalipipe-loader-state-1"
STATE_NAMES = ("loader-state-0.json", "loader-state-1.json")
_PROBE_NAME = "loader-state.probe"
_JOIN_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A state as it was found: `number` counts publications under one URL, `saved_at` is Unix time in seconds."""

    state: dict[str, Any]
    number: int
    saved_at: float


def encode_published(published: Published) -> bytes:
    """One JSON object whose `digest` (xxh3-64) covers all the rest."""
    content = {
        "format": FORMAT,
        "number": published.number,
        "saved_at": published.saved_at,
        "state": published.state,
    }
    return json.dumps({**content, "digest": _digest(content)}, indent=1).encode()


def decode_published(data: bytes | memoryview, url: str) -> Published:
    """Reads what `encode_published` wrote.

    Raises:
        StateError: it is torn, changed or of another format; names `url`.
    """
    try:
        content = json.loads(bytes(data))
        digest = content.pop("digest")
        if content.get("format") != FORMAT:
            raise StateError(f"{url} has format {content.get('format')!r}; this release reads {FORMAT}")
        if digest != _digest(content):
            raise StateError(f"{url} does not match its digest {digest!r}: it was torn while written, or changed")
        return Published(
            state=dict(content["state"]), number=int(content["number"]), saved_at=float(content["saved_at"])
        )
    except StateError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(f"{url} ({len(data)} bytes) is no whole loader state: {error}") from error


def read_published(store: Store) -> Published | None:
    """The newest whole state under the store's URL; None when none was ever published.

    Raises:
        StateError: states are there, and none of them is whole.
        StorageError: the store cannot be read.
    """
    whole, torn = _found(store)
    if torn and not whole:
        raise StateError(
            f"no whole loader state at {store.url}: {'; '.join(map(str, torn))}. Give the URL of another copy as "
            "resume=, or start over with resume=none"
        )
    for error in torn:
        _log.warning("%s; the other state there is used", error)
    return max(whole, key=lambda one: one.number, default=None)


def next_number(store: Store) -> int:
    """The number of the next publication: it takes the place of the older state, or of a torn one.

    Raises:
        StorageError: the store cannot be read or written: a run of days had better know at its start.
    """
    whole, _ = _found(store)
    store.put(_PROBE_NAME, b"")
    store.delete(_PROBE_NAME)
    return max((one.number + 1 for one in whole), default=0)


def _found(store: Store) -> tuple[list[Published], list[StateError]]:
    whole: list[Published] = []
    torn: list[StateError] = []
    for name in STATE_NAMES:
        try:
            whole.append(decode_published(store.read(name), f"{store.url}/{name}"))
        except ObjectNotFoundError:
            continue
        except StateError as error:
            torn.append(error)
    return whole, torn


class StatePublisher:
    """Publishes the newest state that it was offered, at most every `every_s` seconds, on a thread of its own.

    A store that is slow or fails never stalls the trainer: the failure is logged and counted, and the next state is
    tried when it is due.

    Args:
        store: over `state.url`; closed with the publisher.
        every_s: seconds between publications; 0 publishes as fast as the store takes them.
        first_number: the number of the next publication, above those that are there.
    """

    def __init__(
        self,
        store: Store,
        *,
        every_s: float,
        first_number: int,
        recorder: Recorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._every_s = every_s
        self._number = first_number
        self._recorder = recorder
        self._clock = clock
        self._changed = threading.Condition()
        self._latest: Mapping[str, Any] | None = None
        self._wanted: Mapping[str, Any] | None = None
        self._published: Mapping[str, Any] | None = None
        self._due_at = clock() + every_s
        self._failing = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="dalipipe-state", daemon=True)
        self._thread.start()

    def offer(self, state: Mapping[str, Any]) -> None:
        """Says how far the trainer is; returns at once."""
        with self._changed:
            self._latest = state
            if self._clock() >= self._due_at:
                self._due_at = self._clock() + self._every_s
                self._wanted = state
                self._changed.notify()

    def close(self) -> None:
        """Publishes what was offered last and ends the thread, within 1 s. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._wanted = self._latest
            self._changed.notify()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            _log.warning(
                "the last loader state did not reach %s within %g s; the one published before it stays valid",
                self._store.url,
                _JOIN_S,
            )
            return  # the store is still in use by the thread, which ends with the process
        self._store.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._wanted is None and not self._closed:
                    self._changed.wait()
                state, self._wanted = self._wanted, None
                closing = self._closed
            if state is not None and state != self._published:
                self._publish(state)
            if closing:
                return

    def _publish(self, state: Mapping[str, Any]) -> None:
        published = Published(state=dict(state), number=self._number, saved_at=time.time())
        name = STATE_NAMES[self._number % len(STATE_NAMES)]
        try:
            self._store.put(name, encode_published(published))
        except StorageError as error:
            self._recorder.add("state_failures")
            if not self._failing:
                _log.warning(
                    "the loader state could not be published: %s; the one published before stays valid, and the next "
                    "is tried in %g s; check state.url",
                    error,
                    self._every_s,
                )
            self._failing = True
            return
        self._failing = False
        self._number += 1
        self._published = state
        self._recorder.add("state_published")


def _digest(content: Mapping[str, Any]) -> str:
    return f"{digest64(json.dumps(content, sort_keys=True, separators=(',', ':')).encode()):016x}"
