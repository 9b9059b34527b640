"""A notice board for the ranks of a job: small values under names, with deadlines that hold."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from dalipipe.errors import CoordinationError

_T = TypeVar("_T")


class Board(Protocol):
    """Values under names, seen by all ranks of a job."""

    def post(self, name: str, value: bytes) -> None:
        """Puts up a value. Raises CoordinationError when the board cannot be reached in time."""

    def read(self, name: str) -> bytes:
        """Waits for a value. Raises CoordinationError when it is not there in time."""

    def close(self) -> None:
        """Leaves the board. Idempotent."""


class TcpBoard:
    """A board over the TCPStore that the launcher or `init_process_group` serves at MASTER_ADDR:MASTER_PORT.

    Its own timeouts do not cover a server that hangs, so each call runs on a thread of ours and is given up on.

    Args:
        host, port: of the store.
        prefix: what this job's names begin with.
        timeout_s: deadline of each call.
    """

    def __init__(self, host: str, port: int, *, prefix: str, timeout_s: float) -> None:
        import torch.distributed as dist

        self._where = f"{host}:{port}"
        self._timeout_s = timeout_s

        def connect() -> Any:
            wait = timedelta(seconds=timeout_s)
            store = dist.TCPStore(host, port, is_master=False, timeout=wait)  # type: ignore[attr-defined]
            return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]

        self._store = self._within(connect, "connecting")

    def post(self, name: str, value: bytes) -> None:
        """As `Board.post`."""
        # In hexadecimal, since the store takes text.
        self._within(lambda: self._store.set(name, value.hex()), f"posting {name}")

    def read(self, name: str) -> bytes:
        """As `Board.read`."""
        return bytes.fromhex(self._within(lambda: self._store.get(name).decode(), f"reading {name}"))

    def close(self) -> None:
        """The connection goes with the object. Idempotent."""

    def _within(self, call: Callable[[], _T], doing: str) -> _T:
        result: list[_T] = []
        failure: list[Exception] = []

        def run() -> None:
            try:
                result.append(call())
            except Exception as error:  # noqa: BLE001 - raised below, in the caller's thread
                failure.append(error)

        thread = threading.Thread(target=run, name="dalipipe-board", daemon=True)
        thread.start()
        thread.join(self._timeout_s + 1.0)
        if result:
            return result[0]
        raise CoordinationError(
            f"{doing} at the job's TCPStore {self._where} did not succeed within {self._timeout_s:g} s "
            f"({failure[0] if failure else 'no answer'}): is every rank started, and is the store served (torchrun "
            "does, or call init_process_group first)? assign=static needs none"
        ) from (failure[0] if failure else None)
