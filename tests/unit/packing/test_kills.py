"""Packs killed by SIGKILL at random moments, whatever they are doing, end in the bytes of a pack that was not."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dalipipe.errors import ManifestError
from tests.support.archives import write_tar
from tests.support.images import write_image_tree
from tests.unit.packing.reading import contents, open_manifest, run_pack
from tests.unit.packing.test_sources import samples

CHILD = """
import sys
from tests.unit.packing.reading import run_pack
if __name__ == "__main__":
    print("ready", flush=True)
    run_pack(sys.argv[1], sys.argv[2], kind=sys.argv[3], workers=int(sys.argv[4]), resize=int(sys.argv[5]))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "workers", "resize"), [("images", 2, 0), ("tars", 2, 0), ("images", 1, 64)])
def test_killed_at_twenty_random_moments(tmp_path, kind, workers, resize):
    source = tmp_path / "src"
    if kind == "images":
        write_image_tree(source, num_images=500)
    else:
        for i in range(4):
            write_tar(source / f"{i}.tar.gz", samples(250, first=250 * i), mode="w:gz")
    options = {"kind": kind, "resize": resize}
    begin = time.monotonic()
    run_pack(source, tmp_path / "whole", workers=workers, **options)
    takes_s = time.monotonic() - begin
    whole = contents(tmp_path / "whole")
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    chance = random.Random(7)
    died = 0
    for number in range(20):
        target = tmp_path / f"out{number}"
        command = [sys.executable, str(script), str(source), str(target), kind, str(workers), str(resize)]
        killed = 0
        while not killed:
            child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(chance.uniform(0, takes_s))
            child.kill()
            killed = child.wait(timeout=60) == -signal.SIGKILL
            child.stdout.close()
            if not killed:  # it was done before its moment came: begin anew, and sooner
                takes_s *= 0.7
                clear(target)
        died += killed
        published = True
        try:
            open_manifest(target)
        except ManifestError:
            published = False
        report = run_pack(source, target, **options)
        assert report.already_packed == published
        assert contents(target) == whole, f"try {number}"
        clear(target)
    assert died == 20


def clear(target: Path) -> None:
    """Empties a folder."""
    for path in sorted(target.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
