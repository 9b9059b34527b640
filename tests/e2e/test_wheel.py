"""The package as users get it: a wheel in an environment of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import NUM_IMAGES

ROOT = Path(__file__).resolve().parents[2]


def _build(kind: str, target: Path, **environ: str) -> tuple[Path, str]:
    """The file that was built, and what was said."""
    words = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(target), str(ROOT)]
    environ = os.environ | environ
    done = subprocess.run(words, check=True, env=environ, capture_output=True, text=True, timeout=100)
    return next(path for path in target.iterdir() if path.suffix in (".whl", ".gz")), done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build("wheel", tmp_path_factory.mktemp("wheel"))[0]


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
        "    print(*l.stats()['resized_by'])\n"
    )
    done = subprocess.run([python, "-c", code], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines()[0] == f"{NUM_IMAGES // 8} (8, 3, 224, 224)", done.stderr
    if shutil.which("cc"):
        assert done.stdout.splitlines()[1].startswith("native ")


def test_the_wheel_brings_the_command_and_its_types(python: Path, tmp_path: Path) -> None:
    command = python.with_name("dalipipe")
    done = subprocess.run([command, "pack", "--cfg", "job"], check=False, capture_output=True, text=True, timeout=100)
    assert "shard_bytes: 512MiB" in done.stdout, done.stderr
    assert list(python.parent.parent.glob("lib/*/site-packages/dalipipe/py.typed"))


def test_the_wheel_of_a_host_with_a_compiler_is_of_its_platform(wheel: Path) -> None:
    """One binary for all Python versions, without its source."""
    if not shutil.which("cc"):
        pytest.skip("no C compiler here")
    assert wheel.stem.endswith("-py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_"))
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.endswith((".so", ".c"))] == ["dalipipe/graphs/libresize.so"]


def test_without_a_compiler_the_wheel_is_pure_and_says_so(tmp_path: Path) -> None:
    """Whatever lies in the tree from an editable install."""
    pure, said = _build("wheel", tmp_path, CC="no-such-compiler")
    assert pure.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(pure).namelist() if name.endswith((".so", ".c"))]
    assert said.count("the resize kernel was not built, torch's takes its place: no-such-compiler") == 1


def test_the_source_distribution_can_build_the_kernel(tmp_path: Path) -> None:
    """It holds the source and what compiles it, no binary."""
    with tarfile.open(_build("sdist", tmp_path)[0]) as packed:
        names = [name.partition("/")[2] for name in packed.getnames()]
    assert {name for name in names if name.endswith((".c", ".so"))} == {"dalipipe/graphs/resize.c"}
    assert "hatch_build.py" in names
