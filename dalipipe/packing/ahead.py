"""Small reads and writes of many objects, some at once, their results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_THREADS = 16


def in_order(function: Callable[[T], R], items: Iterable[T], *, threads: int = _THREADS) -> Iterator[R]:
    """What `function` gives for each item, in the order of the items, `threads` of them worked on at once.

    Items are taken as results are asked for, so that `2 * threads` are held at most. The first exception is raised
    here; what was begun is waited for.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="pack-objects") as pool:
        pending: deque[Future[R]] = deque()
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) >= 2 * threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
