"""Small data sets in memory, written by the real writer."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dalipipe.shards import Manifest
from dalipipe.shards.assembly import ManifestBuilder
from dalipipe.shards.index import Rows, part_rows
from dalipipe.shards.tar import SampleExtent, TarWriter

Samples = Sequence[tuple[str, Mapping[str, bytes]]]


@dataclass
class Folder:
    """The files of a data set by name."""

    files: dict[str, bytes] = field(default_factory=dict)

    def read(self, name: str) -> bytes:
        if name not in self.files:
            raise FileNotFoundError(f"no {name} in the test's folder")
        return self.files[name]

    def block(self, manifest: Manifest, block: int) -> bytes:
        return b"".join(self.files[e.shard][e.start : e.stop] for e in manifest.extents(block))


def write_dataset(
    shards: Sequence[Samples],
    *,
    block_samples: int,
    classes: Sequence[str] = (),
    made_by: Mapping[str, str] | None = None,
) -> Folder:
    """Writes shards `s0.tar`, `s1.tar`, … and their manifest. Sample i is said to be i % 50 x i % 70 pixels."""
    folder = Folder()
    builder = ManifestBuilder(kind="images", classes=classes, block_samples=block_samples)
    for number, samples in enumerate(shards):
        stream = io.BytesIO()
        writer = TarWriter(stream)
        extents: list[SampleExtent] = []
        digests = []
        for start, stop in part_rows(builder.num_samples, len(samples), block_samples):
            extents.extend(writer.add(key, members) for key, members in samples[start:stop])
            digests.append(writer.cut())
        writer.finish()
        name = f"s{number}.tar"
        folder.files[name] = stream.getvalue()
        extensions = {extension for _, members in samples for extension in members}
        ids = np.arange(builder.num_samples, builder.num_samples + len(samples))
        folder.files[f"{name}.idx"] = builder.add(
            name=name,
            num_bytes=writer.offset,
            digest=writer.digest,
            rows=Rows.of([key for key, _ in samples], extents, np.stack([ids % 50, ids % 70], axis=1)),
            part_digests=digests,
            extensions=extensions,
        )
    files = builder.finish(made_by)
    folder.files |= {"shards.arrow": files.shards, "manifest.json": files.header}
    return folder
