"""Shards that lie outside their data set."""

from __future__ import annotations

import pytest

from dalipipe.errors import ConfigError, ObjectNotFoundError
from dalipipe.storage.linked import LinkedStore
from dalipipe.storage.url import is_link, link_from, link_target


@pytest.mark.parametrize(
    ("base", "url", "name"),
    [
        ("/d/m", "/d/a/x.tar", "../a/x.tar"),
        ("/d/m/n", "/d/x.tar", "../../x.tar"),
        ("/d", "/d/a/x.tar", "a/x.tar"),
        ("/d/m", "/e/x.tar", "file:///e/x.tar"),
        ("s3://b/m", "s3://b/a/x.tar", "../a/x.tar"),
        ("s3://b/m", "s3://c/a/x.tar", "s3://c/a/x.tar"),
        ("s3://b", "s3://b/a/x.tar", "a/x.tar"),
        ("/d/m", "s3://c/x.tar", "s3://c/x.tar"),
        ("s3://b/m", "/d e/x.tar", "file:///d%20e/x.tar"),
    ],
)
def test_names_lead_back(base, url, name):
    assert link_from(base, url) == name
    if is_link(name):
        folder, key = link_target(base, name)
        assert f"{folder}/{key}".replace("file://", "").replace("%20", " ") == url
    else:
        assert f"{base}/{name}" == url


def test_a_link_cannot_leave_the_root():
    with pytest.raises(ConfigError, match="leads out of /a"):
        link_target("/a", "../../../x.tar")


def test_links_are_read_and_never_written(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x.tar").write_bytes(b"0123456789")
    store = LinkedStore(str(tmp_path / "m"))
    store.put("own", b"mine")
    for key in ("../a/x.tar", f"file://{tmp_path}/a/x.tar"):
        assert store.head(key).num_bytes == 10
        assert store.head(key).key == key
        assert bytes(store.read(key, 2, 5)) == b"234"
        for action in (lambda key=key: store.put(key, b"x"), lambda key=key: store.delete(key)):
            with pytest.raises(ConfigError, match="not valid"):
                action()
    assert bytes(store.read("own")) == b"mine"
    assert [info.key for info in store.list()] == ["own"]
    with pytest.raises(ObjectNotFoundError, match=r"a/y\.tar"):
        store.read("../a/y.tar")
    store.close()
    store.close()
