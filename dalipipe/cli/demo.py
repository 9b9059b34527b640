"""`dalipipe demo`: the main job on a small lake of real JPEGs, start to end."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dalipipe.build import LoadConfig, Loader
from dalipipe.cache.config import CacheConfig
from dalipipe.cli.output import emit, progress, table
from dalipipe.cli.schema import DemoJob
from dalipipe.errors import ConfigError, NoSpaceError
from dalipipe.graphs.config import GraphConfig
from dalipipe.loader.config import LoaderConfig
from dalipipe.metrics.ledger import LedgerReport, StepLedger
from dalipipe.packing.config import PackConfig
from dalipipe.shards.config import DataConfig
from dalipipe.storage.store import StorageConfig
from dalipipe.units import format_bytes
from dalipipe.wiring.ranks import choose_device
from dalipipe.world import detect_world

if TYPE_CHECKING:
    from dalipipe.demo.model import Trainer

_MARK = "dalipipe-demo.txt"
_SPIN_BATCHES = 8
_SHOWN_S = 50e-6  # a row that is less in every column would be printed as 0.0 ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """One trained epoch: mean loss of its first and last quarter, its ledger, and where its blocks came from."""

    loss_first: float
    loss_last: float
    ledger: LedgerReport
    near_blocks: int
    far_blocks: int
    lake_bytes: int


def run(cfg: DemoJob, *, as_json: bool) -> int:
    """Makes the lake, packs it, trains on it through the whole pipeline, and says where the time went."""
    from dalipipe.demo.model import Trainer

    _check(cfg)
    began = time.perf_counter()

    def say(text: str) -> None:
        if not as_json:
            print(text, flush=True)

    root = _fresh_folder(Path(cfg.dir).absolute())
    try:
        _make_lake(cfg, root / "lake")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(
                f"no space left for the demo's lake in {root}; free some, or choose another dir="
            ) from error
        raise
    lake_s = time.perf_counter() - began
    say(f"lake    {cfg.images} JPEGs in class folders of {root / 'lake'} ({lake_s:.1f} s)")
    packed = _pack(cfg, root)
    say(f"pack    {packed.shards} shards, {format_bytes(packed.bytes)}, manifest and index ({packed.seconds:.1f} s)")
    with Loader(_load_config(cfg, root)) as loader:
        trainer = Trainer(len(loader.manifest.classes), loader.device, cfg.seed)
        epochs = [_train(trainer, loader, number, say) for number in range(cfg.epochs)]
        spun = _spin(trainer, loader)
        quarantined = loader.stats()["quarantined"]
    say(_summary(epochs, spun))
    result = {
        "images": cfg.images,
        "shards": packed.shards,
        "samples": packed.samples,
        "epochs": [_as_json(epoch) for epoch in epochs],
        "spin": {"images_per_s": spun.samples_per_s, "rows": spun.rows},
        "quarantined": quarantined,
        "wall_s": time.perf_counter() - began,
    }
    emit(result, f"done in {result['wall_s']:.1f} s; look around: dalipipe info {root / 'shards'}", as_json=as_json)
    return 0


def _check(cfg: DemoJob) -> None:
    """Refuses at once what would fail after the lake is made.

    Raises:
        ConfigError: names the key and what is valid.
    """
    for key, value, least in (
        ("images", cfg.images, 64), ("epochs", cfg.epochs, 1), ("size", cfg.size, 8), ("batch_size", cfg.batch_size, 2),
    ):  # fmt: skip
        if value < least:
            raise ConfigError(f"{key}={value} must be at least {least} for the demo")
    if cfg.batch_size > cfg.images:
        raise ConfigError(
            f"batch_size={cfg.batch_size} must be at most images={cfg.images}: an epoch has whole batches"
        )
    choose_device(cfg.device, detect_world())


def _fresh_folder(root: Path) -> Path:
    """Empties the demo's own folder; refuses to touch anybody else's."""
    try:
        if root.is_symlink() or (root.exists() and not root.is_dir()):
            raise ConfigError(f"dir={root} is a file or a link; choose another dir=")
        if root.exists() and any(root.iterdir()) and not (root / _MARK).is_file():
            raise ConfigError(f"dir={root} is not empty and was not made by the demo; choose another dir=")
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True, exist_ok=True)
        (root / _MARK).write_text("Made by `dalipipe demo`, which deletes and makes this folder anew each time.\n")
    except OSError as error:
        raise ConfigError(f"dir={root} cannot be used: {error.strerror or error}; choose another dir=") from error
    return root


def _make_lake(cfg: DemoJob, target: Path) -> None:
    from dalipipe.demo.lake import make_lake, photos_in, shipped_photos

    photos = photos_in(Path(cfg.photos)) if cfg.photos else shipped_photos()
    with progress("lake") as report:
        make_lake(photos, target, images=cfg.images, seed=cfg.seed, progress=report)


def _pack(cfg: DemoJob, root: Path) -> Any:
    from dalipipe.engines.local import LocalEngine
    from dalipipe.packing.run import pack

    engine = LocalEngine(1)  # a few seconds of work: starting processes would cost as much
    # Small shards, so that a lake of some megabytes still becomes at least four of them.
    lake_bytes = sum(path.stat().st_size for path in (root / "lake").rglob("*.jpg"))
    config = PackConfig(shard_bytes=max(2**20, lake_bytes // 6), seed=cfg.seed, workers=1)
    try:
        with progress("packing") as report:
            return pack(
                str(root / "lake"), str(root / "shards"), config, StorageConfig(), engine=engine, progress=report
            )
    finally:
        engine.close()


def _load_config(cfg: DemoJob, root: Path) -> LoadConfig:
    return LoadConfig(
        data=DataConfig(url=str(root / "shards")),
        cache=CacheConfig(dir=str(root / "cache")),
        graph=GraphConfig(size=cfg.size, scale=[0.35, 1.0]),
        loader=LoaderConfig(global_batch_size=cfg.batch_size),
        device=cfg.device,
        run_dir=str(root / "run"),
    )


def _train(trainer: Trainer, loader: Loader, number: int, say: Callable[[str], None]) -> Epoch:
    ledger = StepLedger(loader.stats)
    before = loader.stats()
    ledger.start()
    losses = []
    for batch in loader:
        losses.append(trainer.step(batch, ledger))
        ledger.step_done(len(batch["id"]))
    values = [float(loss) for loss in losses]
    report = ledger.stop()
    after = loader.stats()
    quarter = max(1, len(values) // 4)
    epoch = Epoch(
        loss_first=sum(values[:quarter]) / quarter,
        loss_last=sum(values[-quarter:]) / quarter,
        ledger=report,
        near_blocks=after["blocks"]["near"] - before["blocks"]["near"],
        far_blocks=after["blocks"]["far"] - before["blocks"]["far"],
        lake_bytes=after["bytes_read"]["lake"] - before["bytes_read"]["lake"],
    )
    say(
        f"epoch {number + 1} loss {epoch.loss_first:.2f} -> {epoch.loss_last:.2f}, "
        f"{report.samples_per_s:.0f} images/s, cache hits {_hit_percent(epoch):.0f} %, "
        f"{format_bytes(epoch.lake_bytes)} from the lake"
    )
    return epoch


def _spin(trainer: Trainer, loader: Loader) -> LedgerReport:
    """The same step on batches held in memory: the loader does nothing meanwhile, and no loader can be faster."""
    import itertools

    held = list(itertools.islice(iter(loader), _SPIN_BATCHES))
    loader.rest()
    ledger = StepLedger()
    trainer.step(held[0], ledger)
    ledger.start()
    for batch in itertools.islice(itertools.cycle(held), len(loader)):
        trainer.step(batch, ledger)
        ledger.step_done(len(batch["id"]))
    return ledger.stop()


def _summary(epochs: list[Epoch], spun: LedgerReport) -> str:
    columns = [*(epoch.ledger for epoch in epochs), spun]
    names = list(
        dict.fromkeys(
            name
            for report in columns
            for name, seconds in report.rows.items()
            if name != "other" and seconds >= _SHOWN_S * report.steps
        )
    )
    head = ("ms a step", *(f"epoch {number + 1}" for number in range(len(epochs))), "idle spin")
    rows: list[tuple[object, ...]] = [head]
    rows += [
        (name, *(f"{1000 * report.rows.get(name, 0) / report.steps:.1f}" for report in columns))
        for name in [*names, "other"]
    ]
    rows.append(("step", *(f"{1000 * report.wall_s / report.steps:.1f}" for report in columns)))
    rows.append(("images/s", *(f"{report.samples_per_s:.0f}" for report in columns)))
    rows.append(("cache hits", *(f"{_hit_percent(epoch):.0f} %" for epoch in epochs), ""))
    return f"\nwhere the time of a step went\n{table(rows)}\n"


def _hit_percent(epoch: Epoch) -> float:
    asked = epoch.near_blocks + epoch.far_blocks
    return 100 * epoch.near_blocks / asked if asked else 100.0


def _as_json(epoch: Epoch) -> dict[str, Any]:
    return {
        "loss_first": epoch.loss_first,
        "loss_last": epoch.loss_last,
        "images_per_s": epoch.ledger.samples_per_s,
        "wall_s": epoch.ledger.wall_s,
        "rows": epoch.ledger.rows,
        "cache_hit": _hit_percent(epoch) / 100,
        "lake_bytes": epoch.lake_bytes,
    }
