"""Where a sample lies, by the bytes that are there."""

from __future__ import annotations

from dalipipe.graphs.origin import largest_image, origin_of
from tests.support.lake import image_bytes, image_set, open_folder


def test_the_offset_points_at_the_bytes_of_the_sample() -> None:
    """Every sample of three shards, those in blocks that cross a shard's end included."""
    folder = image_set(50, block_samples=8, num_shards=3)
    manifest = open_folder(folder)
    shards = set()
    for sample in range(50):
        origin = origin_of(manifest, sample)
        wanted = image_bytes(sample)
        assert folder.files[origin.shard][origin.offset : origin.offset + len(wanted)] == wanted
        assert origin.key == f"{sample:06d}"
        shards.add(origin.shard)
    assert len(shards) == 3
    assert str(origin_of(manifest, 0)) == f"key 000000 in s0.tar at byte {origin_of(manifest, 0).offset}"


def test_the_largest_image_of_the_first_shard() -> None:
    """What the index says; the test's set states i % 50 x i % 70 pixels."""
    assert largest_image(open_folder(image_set(120, num_shards=2))) == (49, 59)
