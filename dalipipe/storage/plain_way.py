"""Which stores may be read by plain HTTP, and by which URLs."""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from dalipipe.storage.buffers import BufferPool
from dalipipe.storage.plain import Part, PlainReader
from dalipipe.storage.store import StorageConfig
from dalipipe.storage.url import HTTP_SCHEMES, S3_SCHEMES, join_url, scheme_of
from dalipipe.world import has_http_proxy

# A URL is signed for an hour and used for a quarter of one; a host's clock may be a few minutes off.
_SIGNED_FOR = timedelta(hours=1)
_USED_FOR_S = 900.0
_MOST_SIGNED = 4096

_log = logging.getLogger(__name__)


class PlainWay:
    """Reads ranges of one store past its client.

    Args:
        url: the store's.
        signs: whether a URL must be signed by the store's client, as S3's must.
    """

    def __init__(self, url: str, reader: PlainReader, *, signs: bool) -> None:
        self._url = url
        self._reader = reader
        self._signs = signs
        self._lock = threading.Lock()
        self._signed: dict[str, tuple[Any, str, float]] = {}

    def get(self, client: Any, key: str, start: int, stop: int) -> Part | int | None:
        """As `PlainReader.get`; None as well where the client cannot sign, and raises the same."""
        if not self._reader.is_of_use:
            return None
        url = self._sign(client, key) if self._signs else join_url(self._url, key)
        if url is None:
            return None
        answer = self._reader.get(url, start, stop)
        if answer is None:  # perhaps the signature is refused: the next one is made with what the client then has
            with self._lock:
                self._signed.pop(key, None)
        return answer

    def close(self) -> None:
        """Ends the connections. Idempotent."""
        self._reader.close()

    def _sign(self, client: Any, key: str) -> str | None:
        now_s = time.monotonic()
        with self._lock:
            by, url, until_s = self._signed.get(key, (None, "", 0.0))
        if by is client and now_s < until_s:
            return url
        import obstore

        try:
            url = obstore.sign(client, "GET", key, _SIGNED_FOR)
        except Exception as error:  # noqa: BLE001 - who has no keys of its own cannot sign, and reads by the client
            _log.debug("%s is read by the full client, which cannot sign: %s", key, type(error).__name__)
            url = ""
        if urlsplit(url).scheme != "http":
            self._reader.give_up()
            return None
        with self._lock:
            if len(self._signed) >= _MOST_SIGNED:
                self._signed.clear()
            self._signed[key] = (client, url, now_s + _USED_FOR_S)
        return url


def open_plain(url: str, config: StorageConfig) -> PlainWay | None:
    """The plain way to a store, or None: with TLS, a proxy, a user in the URL, or `storage.plain_http=false`."""
    scheme = scheme_of(url)
    if not config.plain_http or has_http_proxy():
        return None
    if scheme in HTTP_SCHEMES:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.username is not None or parts.query or not url.isascii():
            return None
    elif scheme not in S3_SCHEMES or not (config.endpoint_url or "").startswith("http://"):
        return None
    reader = PlainReader(
        connect_timeout_s=config.connect_timeout_s,
        read_timeout_s=config.read_timeout_s,
        request_timeout_s=config.request_timeout_s,
        buffers=BufferPool(),
    )
    return PlainWay(url, reader, signs=scheme in S3_SCHEMES)
