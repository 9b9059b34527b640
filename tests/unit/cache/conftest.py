"""A data set of small blocks and its lake."""

from __future__ import annotations

import pytest

from dalipipe.shards.manifest import Manifest
from tests.support.lake import MemoryLake, image_set, open_folder
from tests.unit.cache.tiers import NUM_SAMPLES


@pytest.fixture
def manifest() -> Manifest:
    return open_folder(image_set(NUM_SAMPLES, num_bytes=60))


@pytest.fixture
def lake() -> MemoryLake:
    return MemoryLake(image_set(NUM_SAMPLES, num_bytes=60))
