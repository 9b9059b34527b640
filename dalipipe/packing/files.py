"""A manifest over image files that were never packed: they are listed, not read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dalipipe.errors import SourceError
from dalipipe.packing.ahead import in_order
from dalipipe.packing.config import IndexConfig, PackConfig
from dalipipe.packing.discover import discover
from dalipipe.packing.plan import check_config, make_plan
from dalipipe.packing.sample import Member, SourceSample
from dalipipe.packing.written import Written
from dalipipe.shards.digest import NO_DIGEST
from dalipipe.shards.index import Rows
from dalipipe.shards.virtual import ENDING, VirtualMember, lay_out, members_name
from dalipipe.storage.store import ObjectInfo, Store
from dalipipe.storage.url import link_from


def index_files(
    store: Store, place: Store, found: Sequence[ObjectInfo], config: IndexConfig
) -> tuple[list[Written], tuple[str, ...], int]:
    """Writes the tables of virtual tars at `place` over the images of `store` in class folders, flat, or with labels.

    The files make virtual tars, in the order and of the size that packing would give them; each sample is one file and
    what the listing or the table says beside it. Memory is about 600 bytes a file.

    Args:
        found: what was listed of `store`.

    Returns: the virtual tars, the class names by label and the samples of a block.

    Raises:
        SourceError: nothing to index, images beside and in class folders, or Parquet, which is packed.
        ConfigError: a value of `config` can never work.
    """
    packing = PackConfig(
        labels=config.labels,
        columns=config.columns,
        shard_bytes=config.shard_bytes,
        block_bytes=config.block_bytes,
        shuffle=config.shuffle,
        seed=config.seed,
    )
    check_config(packing, prefix="index")
    listing = discover(store, packing, found=found)
    if listing.inputs:
        raise SourceError(
            f"{store.url} holds no image and no tar, but Parquet: its images cannot be read in place; pack them with "
            "`dalipipe pack`"
        )
    samples = listing.samples
    plan = make_plan(
        [sample.name for sample in samples],
        np.asarray([sample.num_bytes for sample in samples], np.int64),
        members=np.asarray([len(sample.members) for sample in samples], np.int64),
        config=packing,
    )
    probe = "probe"
    root = link_from(place.url, f"{store.url}/{probe}").removesuffix(probe).removesuffix("/")

    def lay(number: int) -> Written:
        start, stop = int(plan.cuts[number]), int(plan.cuts[number + 1])
        chosen = [samples[i] for i in plan.order[start:stop].tolist()]
        return _virtual(place, f"files-{number:06d}{ENDING}", chosen, root)

    shards = list(in_order(lay, range(plan.num_shards)))
    return shards, listing.classes, plan.block_samples


def _virtual(place: Store, name: str, samples: Sequence[SourceSample], root: str) -> Written:
    rows = [(sample.key, [_member(member) for member in sample.members]) for sample in samples]
    extents, num_bytes, table = lay_out(rows, root)
    place.put(members_name(name), table)
    return Written(
        name=name,
        num_bytes=num_bytes,
        digest=NO_DIGEST,
        rows=Rows.of([sample.key for sample in samples], extents, np.zeros((len(samples), 2), np.int32)),
        extensions=tuple(sorted({member.extension for sample in samples for member in sample.members})),
        known={},
    )


def _member(member: Member) -> VirtualMember:
    return VirtualMember(extension=member.extension, num_bytes=member.num_bytes, path=member.path, data=member.data)
