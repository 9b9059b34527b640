"""Adding checksums to a data set that was indexed without them; it stays the same data set."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np

from dalipipe.cache.firstread import FirstReads, first_reads_path
from dalipipe.errors import ConfigError
from dalipipe.shards.checksums import NOTE, Digests, checksums_name, encode_checksums
from dalipipe.shards.digest import NO_DIGEST
from dalipipe.shards.header import HEADER_NAME, encode_header
from dalipipe.shards.manifest import Manifest, Shard
from dalipipe.shards.virtual import DatasetStore
from dalipipe.storage.open import open_store
from dalipipe.storage.store import StorageConfig, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksumsReport:
    """added: parts of blocks whose checksum the manifest knows from now on. unknown: those that still have none."""

    samples: int
    shards: int
    added: int
    unknown: int


def write_checksums(store: Store, shard: Shard, digests: Digests) -> None:
    """Writes the digests of the parts of a shard (uint64 [p], NO_DIGEST where unknown) beside its index."""
    store.put(checksums_name(shard.index_name), encode_checksums(shard.index_digest, digests))


def note_checksums(store: Store) -> None:
    """Says in the manifest that shards have checksums beside their indices. Written last, and no part of the identity.

    Raises:
        ManifestError: the manifest was replaced or removed meanwhile.
    """
    header, _ = Manifest.open(store.read).files
    if NOTE not in header.made_by:
        store.put(HEADER_NAME, encode_header(replace(header, made_by={**header.made_by, NOTE: "added"})))


def add_first_reads(url: str, storage: StorageConfig, cache_dir: str) -> ChecksumsReport:
    """Puts the checksums of what this node read first into the manifest of the data set at `url`; reads no shard.

    Raises:
        ConfigError: no cache is named. ManifestError: there is no data set, or it is damaged.
        StorageError: the data set cannot be written to.
    """
    if not cache_dir:
        raise ConfigError("checksums=kept takes what this node's cache kept: name it with cache.dir")
    added = unknown = 0
    with closing(DatasetStore(url, lambda at: open_store(at, storage))) as store:
        manifest = Manifest.open(store.read)
        with closing(FirstReads(first_reads_path(cache_dir, manifest.identity))) as first:
            for number in range(manifest.num_shards):
                digests = manifest.index(number).parts.digests
                missing = np.flatnonzero(digests == NO_DIGEST)
                if not len(missing):
                    continue
                found = [first.get(manifest.first_part(number) + part) for part in missing.tolist()]
                filled = digests.copy()
                filled[missing] = found
                num_found = sum(digest != NO_DIGEST for digest in found)
                added, unknown = added + num_found, unknown + len(found) - num_found
                if num_found:
                    write_checksums(store, manifest.shard(number), filled)
        if added:
            note_checksums(store)
    return ChecksumsReport(samples=manifest.num_samples, shards=manifest.num_shards, added=added, unknown=unknown)
