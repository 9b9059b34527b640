"""Trying again: full jitter, a bounded number of times, inside one deadline."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from dalipipe.storage.failures import is_transient

R = TypeVar("R")

_FIRST_DELAY_S = 0.05
_MAX_DELAY_S = 2.0


def call_with_retries(
    attempt: Callable[[float], R],
    *,
    retries: int,
    timeout_s: float,
    retryable: Callable[[BaseException], bool] = is_transient,
    on_retry: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    uniform: Callable[[], float] = random.random,
) -> R:
    """Calls `attempt(remaining_s)` until it returns, fails for good, or the deadline or the retries are used up.

    The delay before retry i is uniform in [0, min(2 s, 50 ms * 2**i)): exponential backoff with full jitter
    (M. Brooker, "Exponential Backoff And Jitter", 2015), so that clients that failed together do not return together.

    Args:
        attempt: one try; gets the seconds that are left of `timeout_s`.
        retries: tries after the first one.
        retryable: whether trying again may help.
        uniform: draws from [0, 1).

    Raises:
        Exception: the last error of `attempt`, as it is.
    """
    deadline = clock() + timeout_s
    for retry in range(retries + 1):
        try:
            return attempt(max(deadline - clock(), 0.0))
        except Exception as error:
            delay_s = uniform() * min(_MAX_DELAY_S, _FIRST_DELAY_S * 2**retry)
            if retry == retries or not retryable(error) or clock() + delay_s >= deadline:
                raise
        if on_retry is not None:
            on_retry()
        sleep(delay_s)
    raise AssertionError("unreachable: the last try returns or raises")
