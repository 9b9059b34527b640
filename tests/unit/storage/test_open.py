from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalipipe.errors import ConfigError, DependencyError
from dalipipe.storage import StorageConfig, join_url, open_store
from dalipipe.storage.ranges import split_range


def test_unknown_scheme_names_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown scheme 's4'.*\bhttps\b.*\bmemory\b.*\bs3\b"):
        open_store("s4://bucket/set")


@pytest.mark.parametrize("url", ["", "s3://", "s3:///folder", "s3://a@b/c", "file://host/x", "a::b://c", "nul\0"])
def test_url_that_can_never_work_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        open_store(url)


@pytest.mark.parametrize(
    "endpoint",
    ["nohost", "http://", "http://a b", "ftp://x", " http://x", "http://x:99999999", "http://x:y", "http://x?q=1", ""],
)
def test_malformed_endpoint_is_refused_before_the_client_sees_it(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"storage\.endpoint_url"):
        open_store("s3://bucket/set", StorageConfig(endpoint_url=endpoint))


@pytest.mark.parametrize("url", ["http://", "https://a b/", "http://x:99999999/", "http://h/x?token=1"])
def test_malformed_web_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        open_store(url)


@pytest.mark.parametrize(
    "config",
    [StorageConfig(concurrency=0), StorageConfig(retries=-1), StorageConfig(request_timeout_s=0)],
)
def test_number_that_can_never_work_is_refused(config: StorageConfig) -> None:
    with pytest.raises(ConfigError, match=r"storage\.\w+=.* must be"):
        open_store("/data", config)


def test_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_store("some/set/").url == f"{tmp_path}/some/set"


def test_file_url_is_decoded_to_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "a b%"
    assert open_store(folder.as_uri()).url == str(folder)


def test_root_folder_keeps_its_slash() -> None:
    assert open_store("/").url == "/"
    assert join_url("/", "etc/hostname") == "/etc/hostname"


@pytest.mark.parametrize(
    ("base", "key", "url"),
    [
        ("s3://b/set/", "a/0 %.jpg", "s3://b/set/a/0 %.jpg"),
        ("https://h/set", "a/0 %.jpg", "https://h/set/a/0%20%25.jpg"),
        ("/data", "x", "/data/x"),
        ("/data/", "", "/data"),
        ("memory://", "x", "memory://x"),
    ],
)
def test_join_url(base: str, key: str, url: str) -> None:
    assert join_url(base, key) == url


@given(st.integers(0, 10**12), st.integers(0, 10**6), st.integers(1, 10**4))
def test_parts_cover_the_range_once(start: int, num_bytes: int, part_bytes: int) -> None:
    part_bytes = max(part_bytes, num_bytes // 500 + 1)
    parts = list(split_range(start, start + num_bytes, part_bytes))
    edges = [start, *(high for _, high in parts)]
    assert edges[-1] == start + num_bytes
    assert [low for low, _ in parts] == edges[:-1]
    assert all(0 < high - low <= part_bytes for low, high in parts)


def test_missing_client_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(DependencyError, match=r"dalipipe\[s3\]"):
        open_store("s3://bucket/set")


def test_missing_fsspec_package_is_named() -> None:
    pytest.importorskip("fsspec")
    if _importable("ossfs"):
        pytest.skip("ossfs is installed here")
    with pytest.raises(DependencyError, match="ossfs"):
        open_store("oss://bucket/folder")


def test_plain_files_need_no_client() -> None:
    program = (
        "import sys; from dalipipe.storage import open_store; open_store('/tmp');"
        "bad = {'torch', 'obstore', 'fsspec', 'numpy'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=Path(__file__).parents[3])


def _importable(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


@pytest.mark.parametrize("seconds", [1 / 3, 0.1 + 0.2, 1e-9, 7, 86400.5])
def test_any_number_of_seconds_is_a_deadline(seconds: float) -> None:
    config = StorageConfig(read_timeout_s=seconds, connect_timeout_s=seconds, request_timeout_s=seconds)
    open_store("http://127.0.0.1:9/set", config).close()
