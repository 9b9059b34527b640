"""The samples of tars in these tests."""

from __future__ import annotations

from tests.support.images import jpeg_bytes

IMAGES = [jpeg_bytes(i, height=60, width=80) for i in range(12)]


def samples(count: int, first: int = 0) -> list[tuple[str, bytes]]:
    found = []
    for i in range(first, first + count):
        image = IMAGES[i % len(IMAGES)]
        found += [(f"d/k{i:03d}.jpg", image), (f"d/k{i:03d}.cls", b"%d" % (i % 3)), (f"d/k{i:03d}.txt", b"t%d" % i)]
    return found


def expected(count: int) -> dict[str, dict[str, bytes]]:
    return {
        f"d/k{i:03d}": {"image": IMAGES[i % len(IMAGES)], "label": b"%d" % (i % 3), "text": b"t%d" % i}
        for i in range(count)
    }
