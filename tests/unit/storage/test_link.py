"""The emulated link that other tests and the benchmarks measure against."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from dalipipe.storage import StorageConfig, open_store
from tests.support.faultproxy import FolderServer
from tests.support.link import Link

KB = 1000
RATE = 10e6


def test_a_link_is_shared_evenly_and_the_small_go_first() -> None:
    sent = {"large": 0, "other": 0, "small": 0}
    order: list[str] = []
    when_small_ended: dict[str, int] = {}

    async def carry(link: Link, name: str, num_bytes: int) -> None:
        def send(wanted: int) -> int:
            sent[name] += wanted
            return wanted

        await link.carry(num_bytes, RATE, send)
        order.append(name)
        if name == "small":
            when_small_ended.update(sent)

    async def main() -> float:
        link, began_s = Link(), time.monotonic()
        await asyncio.gather(
            carry(link, "large", 600 * KB), carry(link, "other", 600 * KB), carry(link, "small", 20 * KB)
        )
        return time.monotonic() - began_s

    took_s = asyncio.run(main())
    assert sent == {"large": 600 * KB, "other": 600 * KB, "small": 20 * KB}
    assert order[0] == "small"
    # Each of three had the same share until the small one was through (they may have sent a tick's worth more by then).
    assert abs(when_small_ended["large"] - when_small_ended["other"]) <= 1
    # What is carried is never more than the rate allows; 5 ms of idle time are given.
    assert took_s >= 1220 * KB / RATE - 0.006


def test_a_link_does_not_wait_for_one_that_takes_nothing_and_tells_the_one_that_broke() -> None:
    def stuck(_wanted: int) -> int:
        return 0

    def broken(_wanted: int) -> int:
        raise BrokenPipeError("gone")

    async def main() -> list[BaseException | None]:
        link = Link()
        waits = asyncio.ensure_future(link.carry(KB, RATE, stuck))
        found = await asyncio.gather(link.carry(50 * KB, RATE), link.carry(KB, RATE, broken), return_exceptions=True)
        assert not waits.done()
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        await link.carry(KB, RATE)
        return found

    assert [type(error) for error in asyncio.run(main())] == [type(None), BrokenPipeError]


def test_a_server_behind_a_link_sends_what_lies_in_the_file_at_no_more_than_the_rate(tmp_path: Path) -> None:
    body = bytes(range(256)) * 4000
    (tmp_path / "file").write_bytes(body)
    server = FolderServer(tmp_path, rate=5e6)
    store = open_store(server.url, StorageConfig())
    try:
        began_s = time.monotonic()
        assert bytes(store.read("file")) == body
        assert time.monotonic() - began_s >= len(body) / 5e6 - 0.006
        assert bytes(store.read("file", 100, 900_000)) == body[100:900_000]
    finally:
        store.close()
        server.stop()
