"""Who may use the node's link to the stores: three classes of traffic, one ledger for all processes of the node.

The ledger is a small file that every process maps. It holds times and counts only, never "in flight", so a process that
is killed leaves nothing behind that could block the others. The last process that closes it takes it away, and what was
learnt with it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from dalipipe.errors import ConfigError
from dalipipe.filelocks import FileLock, alone, enter, open_file, try_lock, unlock
from dalipipe.units import parse_bytes

IO_CLASSES = ("data", "checkpoint", "eval")
"""Training data goes first; the others take what it leaves, and at least their floor."""

_FLOORS = {"checkpoint": 0.05, "eval": 0.10}
_BURST_S = 0.1
_BUSY_S = 0.5
_POLL_S = 0.05
_RATE_WINDOW_S = 1.0
_LOCK_S = 0.05
# What the bytes of the ledger's file are locked for (they need not exist): its content, and whoever uses it.
_CONTENT_AT = 0
_ALIVE_AT = 1 << 17
# Whoever could open the file could lock its content, and hold up all processes of its user.
_MODE = 0o600
_MAGIC = 0xDA11_0001
# Magic, highest rate, start and bytes of the rate window, time of the last data, then when each debt is paid: of the
# link, of data, checkpoint and eval.
_LEDGER = struct.Struct("<Qdddddddd")

_log = logging.getLogger(__name__)


class NodeBudget:
    """Paces the requests of one process by the ledger of its node. Thread-safe.

    Each request advances a theoretical arrival time by its bytes over the rate (the virtual-scheduling form of a leaky
    bucket, ITU-T I.371), one for the whole link and one a class. Data waits for data's own alone. The other classes
    wait until the link has nothing owed, or until their own floor (5 % for checkpoints, 10 % for evaluation) is due.
    Without a declared rate, data never waits; the others keep to their floor of the highest rate seen while data was
    read within the last half second.

    Args:
        path: the ledger, on a file system of this node; made when missing.
        rate: bytes a second of the node's link, or None: the highest seen.
    """

    def __init__(self, path: Path, rate: float | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._declared = rate
        self._clock = clock
        self._lock = threading.Lock()
        here = enter(path, _ALIVE_AT, mode=_MODE)
        if here is None:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        try:
            # Nobody takes the file away while the mark is held.
            self._descriptor, self._map = _open(path)
        except BaseException:
            _leave(path, here)
            raise
        # A store that nobody closed must not keep its descriptors, nor the ledger for good.
        self._end = weakref.finalize(self, _end, os.getpid(), path, here, self._descriptor, self._map)
        self._end.atexit = False

    @property
    def rate(self) -> float:
        """Bytes a second: declared, else the highest seen on this node; 0 before anything was."""
        return self._declared or float(_LEDGER.unpack_from(self._map)[1])

    def admit(self, io_class: str, num_bytes: int) -> float:
        """Returns 0 and charges the request, or the seconds after which to ask again; 0 once it is closed."""
        with self._lock, _Locked(self._descriptor, self._clock):
            if self._descriptor < 0:
                return 0.0
            state = self._read()
            wait_s = self._admit(state, io_class, num_bytes, self._clock())
            if wait_s <= 0:
                self._write(state)
            return max(0.0, wait_s)

    def moved(self, num_bytes: int) -> None:
        """Counts bytes that came or went, for the highest rate seen."""
        with self._lock, _Locked(self._descriptor, self._clock):
            if self._descriptor < 0:
                return
            state = self._read()
            now_s = self._clock()
            elapsed_s = now_s - state.window_at_s
            if elapsed_s >= _RATE_WINDOW_S or elapsed_s < 0:
                if _RATE_WINDOW_S <= elapsed_s < 2 * _RATE_WINDOW_S:
                    state.highest = max(state.highest, state.window_bytes / elapsed_s)
                state.window_at_s, state.window_bytes = now_s, 0.0
            state.window_bytes += num_bytes
            self._write(state)

    def close(self) -> None:
        """Unmaps the ledger; the last process of the node takes the file away. Idempotent."""
        with self._lock:
            self._descriptor = -1
            self._end()

    def _admit(self, state: _State, io_class: str, num_bytes: int, now_s: float) -> float:
        rate = self._declared or state.highest
        cost_s = num_bytes / rate if rate else 0.0
        if io_class == "data":
            if self._declared and state.paid_s["data"] > now_s + _BURST_S:
                return state.paid_s["data"] - now_s - _BURST_S
            state.data_at_s = now_s
            state.paid_s["data"] = max(now_s, state.paid_s["data"]) + cost_s
        else:
            own_s = state.paid_s[io_class]
            link_free = now_s - state.data_at_s > _BUSY_S or self._declared is not None
            if self._declared is not None:
                link_free = link_free and state.paid_s["link"] <= now_s
            if rate and not link_free and own_s > now_s:
                return min(own_s - now_s, _POLL_S)
            if not link_free:
                state.paid_s[io_class] = max(now_s, own_s) + cost_s / _FLOORS[io_class]
        state.paid_s["link"] = max(now_s, state.paid_s["link"]) + cost_s
        return 0.0

    def _read(self) -> _State:
        _, highest, window_at_s, window_bytes, data_at_s, *paid_s = _LEDGER.unpack_from(self._map)
        now_s = self._clock()
        # A time far in the future cannot be meant: another boot, or a rate that was declared wrong.
        names = ("link", *IO_CLASSES)
        paid = {name: value if value < now_s + 3600 else now_s for name, value in zip(names, paid_s, strict=True)}
        return _State(highest, window_at_s, window_bytes, min(data_at_s, now_s), paid)

    def _write(self, state: _State) -> None:
        _LEDGER.pack_into(
            self._map, 0, _MAGIC, state.highest, state.window_at_s, state.window_bytes, state.data_at_s,
            *(state.paid_s[name] for name in ("link", *IO_CLASSES)),
        )  # fmt: skip


class _State:
    __slots__ = ("data_at_s", "highest", "paid_s", "window_at_s", "window_bytes")

    def __init__(
        self, highest: float, window_at_s: float, window_bytes: float, data_at_s: float, paid_s: dict[str, float]
    ) -> None:
        self.highest = highest
        self.window_at_s = window_at_s
        self.window_bytes = window_bytes
        self.data_at_s = data_at_s
        self.paid_s = paid_s


class _Locked:
    """The ledger's lock among processes. Who cannot have it in time goes on without: nobody can block the others."""

    def __init__(self, descriptor: int, clock: Callable[[], float]) -> None:
        self._descriptor = descriptor
        self._clock = clock
        self._held = False

    def __enter__(self) -> None:
        if self._descriptor < 0:  # closed while a call was under way
            return
        deadline_s = self._clock() + _LOCK_S
        while not try_lock(self._descriptor, _CONTENT_AT):
            if self._clock() >= deadline_s:
                return
            time.sleep(0.0002)
        self._held = True

    def __exit__(self, *error: object) -> None:
        if self._held:
            unlock(self._descriptor, _CONTENT_AT)


def check_io_class(name: str) -> str:
    """Returns `name` when it is a class.

    Raises:
        ConfigError: it is none; names the valid ones.
    """
    if name in IO_CLASSES:
        return name
    raise ConfigError(f"storage.io_class={name!r} is not a class of traffic; use one of {', '.join(IO_CLASSES)}")


def declared_rate(bandwidth: int | float | str | None) -> float | None:
    """`storage.bandwidth` in bytes a second; None when it is left out.

    Raises:
        ConfigError: it is not a size, or 0.
    """
    if bandwidth is None:
        return None
    rate = parse_bytes(bandwidth, "storage.bandwidth")
    if rate < 1:
        raise ConfigError(f"storage.bandwidth={bandwidth!r} must be more than 0 bytes a second, or left out")
    return float(rate)


def open_budget(folder: str, rate: float | None) -> NodeBudget | None:
    """The budget of this node by a ledger in `folder`; None, said once, where there can be none."""
    path = Path(folder) / f"dalipipe-io-{os.getuid()}"
    try:
        return NodeBudget(path, rate)
    except OSError as error:
        _log.warning(
            "no I/O budget for this node: %s cannot be used (%s); name a writable folder in storage.budget_dir",
            path,
            error.strerror or error,
        )
        return None


def _end(process: int, path: Path, here: FileLock, descriptor: int, mapped: mmap.mmap) -> None:
    if os.getpid() != process:  # a forked child shares the open files, and its parent goes on
        return
    mapped.close()
    os.close(descriptor)
    _leave(path, here)


def _leave(path: Path, here: FileLock) -> None:
    here.release()
    with contextlib.suppress(OSError):
        last = alone(path, _ALIVE_AT)
        if last is not None:
            path.unlink()
            last.release()


def _open(path: Path) -> tuple[int, mmap.mmap]:
    descriptor = open_file(path, _MODE)
    try:
        if os.fstat(descriptor).st_size < _LEDGER.size:
            os.truncate(descriptor, _LEDGER.size)
        mapped = mmap.mmap(descriptor, _LEDGER.size)
        if struct.unpack_from("<Q", mapped)[0] != _MAGIC:
            mapped[:] = _LEDGER.pack(_MAGIC, *[0.0] * 8)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, mapped
