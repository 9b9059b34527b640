"""Several stores read as one."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from dalipipe.errors import ObjectNotFoundError, StorageError
from dalipipe.storage.open import open_store
from dalipipe.storage.union import UnionStore


@pytest.fixture
def union(tmp_path: Path) -> UnionStore:
    """Two sets, of which one's name begins with the other's."""
    stores = {name: open_store(str(tmp_path / str(number))) for number, name in enumerate(("a", "a/b"))}
    for name, store in stores.items():
        for key in ("x.bin", "deep/y.bin"):
            store.put(key, f"{name}:{key}".encode())
    return UnionStore(stores)


def test_keys_lead_to_the_store_with_the_longest_name(union: UnionStore) -> None:
    assert bytes(union.read("a/x.bin")) == b"a:x.bin"
    assert bytes(union.read("a/b/x.bin")) == b"a/b:x.bin"
    assert bytes(union.read("a/deep/y.bin", 2, 6)) == b"deep"
    into = bytearray(3)
    assert bytes(union.read("a/b/x.bin", 0, 3, into=memoryview(into))) == b"a/b"
    assert union.head("a/b/x.bin").key == "a/b/x.bin"
    assert union.head("a/b/x.bin").num_bytes == 9


def test_listing_names_keys_as_they_are_read(union: UnionStore) -> None:
    everything = ["a/b/deep/y.bin", "a/b/x.bin", "a/deep/y.bin", "a/x.bin"]
    assert sorted(info.key for info in union.list()) == everything
    assert [info.key for info in union.list("a/b/deep/")] == ["a/b/deep/y.bin"]
    assert sorted(info.key for info in union.list("a/b")) == everything[:2]


def test_writing_and_deleting_go_to_the_same_place(union: UnionStore) -> None:
    union.put("a/new", b"1", if_absent=True)
    assert bytes(union.read("a/new")) == b"1"
    union.delete("a/new")
    with pytest.raises(ObjectNotFoundError):
        union.head("a/new")


def test_errors_name_the_real_place_or_all_stores(union: UnionStore, tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match=str(tmp_path / "0" / "missing")):
        union.read("a/missing")
    with pytest.raises(StorageError, match=r"c/x\.bin is in none of mix\[a/b=.*, a=.*\]"):
        union.read("c/x.bin")


def test_it_travels_to_other_processes_and_closes_twice(union: UnionStore) -> None:
    other = pickle.loads(pickle.dumps(union))
    assert bytes(other.read("a/x.bin")) == b"a:x.bin"
    for store in (other, union, union):
        store.close()
