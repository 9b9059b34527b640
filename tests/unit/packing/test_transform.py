"""Images that are shrunk and encoded again while they are packed, compared with what PIL sees."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps

from dalipipe.errors import CorruptSampleError
from dalipipe.packing.config import PackConfig
from dalipipe.packing.transform import Transform
from dalipipe.packing.verify import verify
from dalipipe.storage.store import StorageConfig
from tests.support.images import jpeg_bytes, textured_image, write_image_tree
from tests.unit.packing.reading import contents, open_manifest, read_back, run_pack


def apply(data: bytes, extension: str = "jpg", **changed) -> tuple[Image.Image, bytes, str, tuple[int, int]]:
    transform = Transform.of(PackConfig(**changed))
    assert transform is not None
    encoded, found, height, width = transform.apply(memoryview(data), extension)
    return Image.open(io.BytesIO(encoded)), bytes(encoded), found, (height, width)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_large_images_are_shrunk_upright(orientation):
    data = jpeg_bytes(3, height=900, width=1300, quality=95, orientation=orientation)
    image, _, extension, size = apply(data, resize=128)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    wide = orientation < 5
    assert (extension, image.format, size) == ("jpg", "JPEG", (128, 185) if wide else (185, 128))
    assert (image.height, image.width) == size
    assert not image.getexif().get(0x0112)
    expected = np.asarray(upright.resize(image.size, Image.Resampling.LANCZOS), np.float32)
    assert np.abs(np.asarray(image, np.float32) - expected).mean() < 3


def test_what_needs_no_change_keeps_its_bytes():
    small = jpeg_bytes(1, height=100, width=120)
    assert apply(small, resize=128)[1] == small
    assert apply(small, resize=100)[1] == small
    assert apply(small, reencode="jpeg")[1] == small
    assert Transform.of(PackConfig()) is None


@pytest.mark.parametrize(
    ("reencode", "extension", "form"), [("jpg", "jpg", "JPEG"), ("webp", "webp", "WEBP"), ("png", "png", "PNG")]
)
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "CMYK", "I;16"])
def test_formats_and_modes(reencode, extension, form, mode):
    sink = io.BytesIO()
    source = textured_image(1, height=200, width=260)
    plain = source if mode == "RGB" else source.convert("L" if mode == "I;16" else mode)
    if mode == "I;16":
        plain = Image.fromarray(np.asarray(plain).astype(np.uint16) * 256)
    plain.save(sink, "TIFF")
    image, _, found, size = apply(sink.getvalue(), "tif", reencode=reencode, resize=100)
    assert (found, image.format, size) == (extension, form, (100, 130))
    assert image.mode in ("RGB", "L")


def test_quality_and_colour_profile():
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    sink = io.BytesIO()
    textured_image(1, height=300, width=300).save(sink, "JPEG", quality=98, icc_profile=profile, exif=b"Exif\0\0MM")
    fine, coarse = (apply(sink.getvalue(), resize=200, quality=quality) for quality in (95, 40))
    assert len(coarse[1]) < len(fine[1]) / 2
    assert fine[0].info["icc_profile"] == profile
    assert "exif" not in fine[0].info


def test_what_pillow_cannot_decode_is_corrupt():
    sink = io.BytesIO()
    textured_image(1, height=300, width=300).save(sink, "PNG")
    with pytest.raises(CorruptSampleError, match="Pillow cannot decode it"):
        apply(sink.getvalue()[:30000], "png", resize=64)


def test_a_pack_that_shrinks(tmp_path):
    write_image_tree(tmp_path / "src", num_images=240, height=240, width=320)
    source_bytes = sum(p.stat().st_size for p in (tmp_path / "src").rglob("*.jpg"))
    report = run_pack(tmp_path / "src", tmp_path / "one", resize=96, quality=80, check="none")
    assert report.bytes < source_bytes / 2
    manifest = open_manifest(tmp_path / "one")
    sizes = manifest.locate(np.arange(240)).sizes
    assert sizes.min(axis=1).tolist() == [96] * 240
    largest = max(manifest.shard(i).num_bytes for i in range(manifest.num_shards))
    assert largest < 1.3 * 2**20
    assert manifest.num_shards <= -(-report.bytes // 2**20) + 1, "shards get their size after shrinking"
    assert verify(str(tmp_path / "one"), StorageConfig(), decode="all").errors == []
    run_pack(tmp_path / "src", tmp_path / "two", resize=96, quality=80, check="none", workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_an_image_that_cannot_be_shrunk_is_quarantined(tmp_path):
    write_image_tree(tmp_path / "src", num_images=5, num_classes=0)
    sink = io.BytesIO()
    textured_image(1, height=300, width=300).save(sink, "PNG")
    (tmp_path / "src/bad.png").write_bytes(sink.getvalue()[:30000])
    with pytest.raises(CorruptSampleError, match=r"bad\.png is corrupt: Pillow cannot decode it"):
        run_pack(tmp_path / "src", tmp_path / "out", resize=64)
    assert run_pack(tmp_path / "src", tmp_path / "out", resize=64, drop_corrupt=True).samples == 5
    assert json.loads((tmp_path / "out/quarantine.jsonl").read_text())["path"] == "bad.png"
    assert len(read_back(tmp_path / "out")) == 5
