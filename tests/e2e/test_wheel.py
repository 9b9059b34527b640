"""The package as users get it: a wheel in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.conftest import NUM_IMAGES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(ROOT)]
    subprocess.run(words, check=True, capture_output=True, timeout=100)
    return next(target.glob("*.whl"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty environment with the wheel; its dependencies are lent by the one that runs the tests."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=True)
    executable = home / "bin/python"
    words = [str(executable), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(words, check=True, capture_output=True, timeout=100)
    site = next((home / "lib").glob("python*/site-packages"))
    # A path in a .pth file is searched last and its own .pth files (an editable install) are not read.
    (site / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return executable


def test_the_wheel_loads_a_config_from_any_folder(python: Path, tmp_path: Path) -> None:
    code = (
        "import dalipipe, dalipipe.cli.compose as c\n"
        f"assert {str(ROOT)!r} not in dalipipe.__file__, dalipipe.__file__\n"
        "print(c.compose('train', ['data.url=s3://bucket/set', 'graph=image_eval']).graph.name)\n"
    )
    done = subprocess.run([python, "-c", code], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.stdout == "image_eval\n", done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_wheel_loads_a_data_set_from_any_folder(python: Path, packed: Path, tmp_path: Path) -> None:
    code = (
        "import dalipipe as dp\n"
        f"with dp.load('train', ['data.url={packed}', 'cache.dir={tmp_path / 'cache'}', 'loader.batch_size=8']) as l:\n"
        "    print(len(l), tuple(next(iter(l))['image'].shape))\n"
    )
    done = subprocess.run([python, "-c", code], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.stdout == f"{NUM_IMAGES // 8} (8, 3, 224, 224)\n", done.stderr


def test_the_wheel_brings_the_command_and_its_types(python: Path, tmp_path: Path) -> None:
    command = python.with_name("dalipipe")
    done = subprocess.run([command, "pack", "--cfg", "job"], check=False, capture_output=True, text=True, timeout=100)
    assert "shard_bytes: 512MiB" in done.stdout, done.stderr
    assert list(python.parent.parent.glob("lib/*/site-packages/dalipipe/py.typed"))
