"""Closing while DALI decodes a batch that takes seconds: nobody can stop it, so nothing may depend on stopping it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dalipipe.packing.config import PackConfig
from dalipipe.packing.run import pack
from dalipipe.storage.store import StorageConfig
from tests.support.images import jpeg_bytes


@pytest.fixture(scope="module")
def slow_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 photographs of 12 megapixels, one batch: decoding it takes over 1.5 s on one thread."""
    root = tmp_path_factory.mktemp("slow")
    data = jpeg_bytes(0, height=3000, width=4000, quality=97)
    for i in range(12):
        path = root / "lake" / f"class_{i % 2}" / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    pack(str(root / "lake"), str(root / "set"), PackConfig(workers=1, check="none"), StorageConfig())
    return root


@pytest.mark.parametrize(
    ("what", "code", "shown"),
    [
        pytest.param("l.close(); print('closed')", 0, "closed", marks=pytest.mark.slow),
        pytest.param("l.set_epoch(7); next(iter(l)); print('moved')", 0, "moved", marks=pytest.mark.slow),
        ("raise ValueError('a bug of the trainer')", 1, ""),
    ],
)
def test_a_batch_in_decode_never_turns_into_another_error(slow_set: Path, what: str, code: int, shown: str) -> None:
    script = (
        "import dalipipe as dp\n"
        f"l = dp.load('train', ['data.url={slow_set / 'set'}', 'cache.dir={slow_set / 'cache'}',"
        "'loader.batch_size=12', 'graph.size=32', 'graph.scale=[0.9,1.0]', 'graph.num_threads=1'])\n"
        "for batch in l:\n"
        f"    {what}\n"
        "    break\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=110)
    assert done.returncode == code, done.stderr
    assert shown in done.stdout
    assert "terminate called" not in done.stderr
    assert "PipelineTimeoutError" not in done.stderr
    assert code == 0 or "a bug of the trainer" in done.stderr
