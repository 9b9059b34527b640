"""`dalipipe preview URL`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dalipipe.cli.output import emit
from dalipipe.cli.schema import PreviewJob
from dalipipe.errors import ConfigError


def run(cfg: PreviewJob, *, as_json: bool) -> int:
    """Writes a contact sheet of samples as the model will see them, through the pipeline that training uses."""
    from dalipipe.build import Loader
    from dalipipe.packing.preview import contact_sheet

    wanted, columns = cfg.preview.images, cfg.preview.columns
    if wanted < 1 or columns < 1:
        raise ConfigError(f"preview.images={wanted} and preview.columns={columns} must be at least 1")
    out = Path(cfg.preview.out)
    loader = Loader(replace(cfg, loader=replace(cfg.loader, batch_size=wanted, last_batch="partial")))
    try:
        loader.set_epoch(cfg.preview.epoch)
        batch = next(iter(loader))
        images, captions = _images(batch, cfg), _captions(batch, loader.manifest.classes)
    finally:
        loader.close()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(contact_sheet(images, captions, columns))
    emit(
        {"out": str(out), "images": len(images)},
        f"{len(images)} samples as graph={cfg.graph.name} shows them: {out}",
        as_json=as_json,
    )
    return 0


def _images(batch: dict[str, Any], cfg: PreviewJob) -> list[Any]:
    """uint8 [H, W, 3] each, normalisation undone."""
    from dalipipe.packing.preview import to_pixels

    images = batch["image"]
    if isinstance(images, (list, tuple)):
        return [image.cpu().numpy() for image in images]
    return list(to_pixels(images.cpu().numpy(), mean=cfg.graph.mean, std=cfg.graph.std))


def _captions(batch: dict[str, Any], classes: tuple[str, ...]) -> list[str]:
    """The id of each sample, and the name of its class where it has one."""
    captions = [str(int(sample)) for sample in batch["id"]]
    if "label" not in batch:
        return captions
    labels = [int(label) for label in batch["label"]]
    names = [classes[label] if 0 <= label < len(classes) else str(label) for label in labels]
    return [f"{caption} {name}" for caption, name in zip(captions, names, strict=True)]
