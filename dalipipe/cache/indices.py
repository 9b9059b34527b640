"""Shard indices, kept on the node: they are read once per node, not once per process and job."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from dalipipe.cache.blockstore import TRAILER_BYTES, is_whole, trailer
from dalipipe.cache.mapping import map_path
from dalipipe.cache.publish import publish
from dalipipe.shards.checksums import ENDING as CHECKSUMS_ENDING
from dalipipe.storage.store import Store
from dalipipe.telemetry import Recorder, Stage


class NodeIndices:
    """Copies of `NAME.idx` in `<cache.dir>/<identity>/indices`, mapped read-only.

    A copy carries its digest; one that does not match (a power cut, a flipped bit) is fetched again. A folder that
    cannot be written costs a read from the lake each time and is no error: the cache itself reports it.
    """

    def __init__(self, directory: Path, store: Store, recorder: Recorder) -> None:
        self._directory = directory
        self._store = store
        self._recorder = recorder

    def read(self, name: str) -> bytes | memoryview:
        """The bytes of the index `name`. Checksums that were added later are never kept: they may grow."""
        if name.endswith(CHECKSUMS_ENDING):
            return self._store.read(name)
        path = self._directory / name
        kept = self._kept(path)
        if kept is not None:
            return kept
        with self._recorder.span(Stage.INDEX):
            data = self._store.read(name)
        self._recorder.add("bytes_read.index", len(data))
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            publish(path, (data, trailer(data)), mtime_ns=time.time_ns(), probe=lambda _point: None)
        return data

    def _kept(self, path: Path) -> memoryview | None:
        with contextlib.suppress(OSError):
            file = map_path(path)
            if is_whole(file):
                return file[:-TRAILER_BYTES]
        return None
