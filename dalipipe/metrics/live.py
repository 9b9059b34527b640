"""Figures of a running job, from the metrics ports of its ranks."""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from dalipipe.errors import ConfigError, DataError
from dalipipe.metrics.exporter import parse_exposition
from dalipipe.metrics.snapshot import RankSnapshot, subtract

_TIMEOUT_S = 5.0
_MOST_ADDRESSES = 4096
_MOST_BYTES = 16 * 2**20


def addresses(text: str) -> list[str]:
    """URLs from `host:9400,host:9401`, `host:9400-9407` (a port a rank) or whole URLs.

    Raises:
        ConfigError: a part is no address.
    """
    found: list[str] = []
    for part in filter(None, (word.strip() for word in text.split(","))):
        match = re.fullmatch(r"(?:https?://)?([^\s/:]+|\[[0-9a-fA-F:]+\]):(\d+)(?:-(\d+))?(/\S*)?", part)
        if match is None:
            raise ConfigError(f"{part!r} is neither a run folder nor an address; write HOST:PORT or HOST:PORT-PORT")
        host, first, last = match[1], int(match[2]), int(match[3] or match[2])
        scheme = "https" if part.startswith("https://") else "http"
        if not first <= last <= 65535 or last - first >= _MOST_ADDRESSES:
            raise ConfigError(f"{part!r}: ports must ascend and be below 65536")
        found += [f"{scheme}://{host}:{port}{match[4] or '/metrics'}" for port in range(first, last + 1)]
    if not found:
        raise ConfigError("no address: write HOST:PORT or HOST:PORT-PORT")
    return found


def scrape(urls: Sequence[str]) -> list[RankSnapshot]:
    """The figures of all ranks just now, by rank; each address has 5 s.

    Raises:
        DataError: none of them answers. Ranks that do not answer while others do are left out.
    """

    def one(url: str) -> RankSnapshot | str:
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
                text = answer.read(_MOST_BYTES).decode("utf-8", "replace")
        except (OSError, urllib.error.URLError, ValueError) as error:
            return f"{url}: {error}"
        try:
            found = parse_exposition(text)
        except (ConfigError, ValueError, KeyError) as error:
            return f"{url}: {error}"
        return replace(found, at=time.time(), world_size=len(urls), host=url.split("/")[2])

    with ThreadPoolExecutor(min(32, len(urls))) as pool:
        answers = list(pool.map(one, urls))
    ranks = [answer for answer in answers if isinstance(answer, RankSnapshot)]
    if not ranks:
        raise DataError(f"no rank answers: {next(answer for answer in answers if isinstance(answer, str))}")
    return sorted(ranks, key=lambda rank: rank.rank)


def watch_for(
    urls: Sequence[str], seconds: float, *, sleep: Callable[[float], None] = time.sleep
) -> list[RankSnapshot]:
    """What each rank did within the next `seconds`.

    Raises:
        DataError: no rank answers.
    """
    before = {rank.rank: rank for rank in scrape(urls)}
    sleep(seconds)
    return [subtract(rank, before[rank.rank]) for rank in scrape(urls) if rank.rank in before]
