"""Data sets that many tests read. Nothing may write into them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.images import write_image_tree
from tests.support.seaweed import S3Server, s3_server

# A loaded machine is no failure: what an example may take is pytest's own timeout.
settings.register_profile("dalipipe", deadline=None)
settings.load_profile("dalipipe")

# In a shell's background SIGINT is ignored, and would be by every child that a test wants to interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

NUM_IMAGES, NUM_CLASSES = 150, 3


@pytest.fixture(scope="session")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 JPEGs in 3 class folders."""
    root = tmp_path_factory.mktemp("lake")
    write_image_tree(root, num_images=NUM_IMAGES, num_classes=NUM_CLASSES)
    return root


@pytest.fixture(scope="session")
def shared_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server for tests with objects of their own; starting one takes seconds."""
    with s3_server(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(scope="session")
def packed(lake: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lake as shards of about 1 MiB (the smallest allowed), in blocks of a few samples."""
    from dalipipe.packing.config import PackConfig
    from dalipipe.packing.run import pack
    from dalipipe.storage.store import StorageConfig

    target = tmp_path_factory.mktemp("packed") / "set"
    config = PackConfig(shard_bytes="1MiB", block_bytes="64KiB", workers=1)
    pack(str(lake), str(target), config, StorageConfig())
    return target
