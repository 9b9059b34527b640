"""How a lake becomes shards (`source`, `target`, `pack.*`), and what is done to data sets that exist."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnsConfig:
    """`pack.columns.*`: columns of a table of labels, or of Parquet with images; empty: found by their usual names."""

    file: str = ""
    """The path of the image within the source (`file_name`, `file`, `filename`, `path`, `image`)."""
    image: str = ""
    """Parquet: the encoded image, as binary or as a struct with `bytes` (`image`, `img`, `jpg`, `png`, `bytes`)."""
    label: str = ""
    """A class number or name (`label`, `class`, `cls`, `target`)."""
    caption: str = ""
    """Text (`caption`, `text`, `txt`, `prompt`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackConfig:
    """`pack.*`; the group `pack=` chooses the kind of source."""

    kind: str = "images"
    """`images` (files in class folders or flat, or Parquet with images) or `tars` (WebDataset tars)."""
    labels: str = ""
    """A CSV, JSONL or Parquet file within a flat source that gives labels and captions."""
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    dots: str = "first"
    """Tars: the extension of a member starts at the `first` dot of its name (as WebDataset has it) or the `last`."""
    shard_bytes: int | float | str = "512MiB"
    """Target size of a shard, 1 MiB to 4 GiB."""
    block_bytes: int | float | str = "auto"
    """Target size of a block, the unit of fetch and cache; `auto` is at most 4 MiB and at most a 32nd of a shard's
    samples."""
    groups: int = 0
    """Folders of shards, `group-000/` and so on, each an equal share of a shuffled data set, so that a node or rack
    can hold one; 0 = none."""
    workers: int = 0
    """Tasks at once; 0 = one per CPU (engine=ray: of the cluster), 1 = in this process."""
    check: str = "decode"
    """`decode` (every image is decoded once), `header` (magic, size and end marker only) or `none`."""
    drop_corrupt: bool = False
    """Leave corrupt samples out and list them in `quarantine.jsonl` beside the shards, instead of stopping."""
    dedup: bool = False
    """Keep only the first of images with the same bytes; the others are listed in `duplicates.jsonl`."""
    shuffle: bool = True
    """Order the samples by a seeded permutation, so that shards are not sorted by class."""
    passes: str = "auto"
    """Tars: `1` reads samples where they lie, `2` scatters each tar into a run in shuffled order first, so that each
    byte of the source is read once and in sequence; `auto` = 2 where the source is not on a local disk. Compressed
    tars and Parquet always take 2."""
    seed: int = 0
    resize: int = 0
    """The short side in pixels that larger images are shrunk to (Lanczos, re-encoded); 0 = keep the bytes."""
    reencode: str = ""
    """The format that images are encoded in again: `jpeg`, `webp` or `png`; empty = as they are."""
    quality: int = 92
    """JPEG and WebP quality of images that are encoded again, 1 to 100."""
    device: str = "cpu"
    """Where images are encoded again: `cpu`, or `cuda:N` (JPEG by nvJPEG)."""
    overwrite: bool = False
    """Replace another data set at the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """`index.*`; `labels` to `seed` are for image files, which make virtual shards, `dots` to `dali` for tars."""

    labels: str = ""
    """As `pack.labels`."""
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    """As `pack.columns`."""
    shard_bytes: int | float | str = "512MiB"
    """As `pack.shard_bytes`."""
    shuffle: bool = True
    """As `pack.shuffle`."""
    seed: int = 0
    """As `pack.seed`."""
    dots: str = "first"
    """As `pack.dots`."""
    block_bytes: int | float | str = "auto"
    """As `pack.block_bytes`."""
    checksums: bool = False
    """Read every byte once for checksums of shards and blocks; without it they are unknown until `verify` with
    `checksums=all` has read them, or with `checksums=kept` taken them from what a node read first."""
    window_bytes: int | float | str = "16KiB"
    """What one request for headers fetches; members smaller than this cost none of their own."""
    dali: bool = False
    """Also write DALI's own index of each tar (`NAME.idx.txt`, wds2idx v1.2) beside the manifest."""
    overwrite: bool = False
    """Replace a manifest at the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewConfig:
    """`preview.*`."""

    out: str = "preview.png"
    """The PNG that is written."""
    images: int = 48
    """How many samples are shown, the first of the epoch in the order that training sees them."""
    columns: int = 8
    epoch: int = 0
    """The epoch that is shown; another one is augmented differently."""
