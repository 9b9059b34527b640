"""What every store must do. A test class of an implementation inherits one of these and gives it a `store`."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dalipipe.errors import (
    ConfigError,
    DalipipeError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
)
from dalipipe.storage import Store, join_url
from dalipipe.storage.coalesce import read_each

PLAIN = "plain.bin"
EMPTY = "empty"
LARGE = "large.bin"
ODD = "class 1/über %41 & #1?.jpg"
OBJECTS: Mapping[str, bytes] = {
    PLAIN: bytes(range(256)),
    EMPTY: b"",
    # More than two parts of a split read, and not a multiple of one.
    LARGE: bytes(range(251)) * ((20 << 20) // 251),
    ODD: b"odd name",
    "class 1/deep/er/1.jpg": b"nested",
    "class 10/1.jpg": b"a longer name of a sibling",
    "1+1=2.txt": b"signs",
}


class ReadContract:
    """Reading. `store` holds exactly `OBJECTS` and is shared by all tests, which leave it as it is."""

    @pytest.fixture(scope="class")
    @classmethod
    def store(cls) -> Store:
        raise NotImplementedError("give the store that is tested")

    def test_url_has_no_trailing_slash(self, store: Store) -> None:
        assert not store.url.endswith("/")

    @pytest.mark.parametrize("key", sorted(OBJECTS))
    def test_whole_object(self, store: Store, key: str) -> None:
        assert bytes(store.read(key)) == OBJECTS[key]

    @pytest.mark.parametrize("key", sorted(OBJECTS))
    def test_head_tells_the_size(self, store: Store, key: str) -> None:
        info = store.head(key)
        assert (info.key, info.num_bytes) == (key, len(OBJECTS[key]))

    @pytest.mark.parametrize(
        ("start", "stop"),
        [(0, 256), (0, 1), (255, 256), (3, 200), (7, None), (255, None), (256, None), (0, 0), (9, 9), (256, 256)],
    )
    def test_range(self, store: Store, start: int, stop: int | None) -> None:
        assert bytes(store.read(PLAIN, start, stop)) == OBJECTS[PLAIN][start:stop]

    @pytest.mark.parametrize(("start", "stop"), [(0, None), (1, 20_000_000), (8 << 20, None), (5, (16 << 20) + 6)])
    def test_large_range(self, store: Store, start: int, stop: int | None) -> None:
        assert store.read(LARGE, start, stop) == OBJECTS[LARGE][start:stop]

    @pytest.mark.parametrize(("start", "stop"), [(0, 257), (255, 300), (256, 257), (300, 301), (257, None), (300, 300)])
    def test_range_behind_the_end_is_an_error_that_names_the_url(
        self, store: Store, start: int, stop: int | None
    ) -> None:
        with pytest.raises(StorageError) as caught:
            store.read(PLAIN, start, stop)
        assert join_url(store.url, PLAIN) in str(caught.value)

    def test_many_ranges_of_one_object(self, store: Store) -> None:
        ranges = [(0, 3), (200, 256), (3, 4), (10, 100), *((i, i + 1) for i in range(100, 130))]
        assert [bytes(piece) for piece in read_each(store, PLAIN, ranges)] == [OBJECTS[PLAIN][a:b] for a, b in ranges]

    def test_many_ranges_of_which_one_is_behind_the_end_are_an_error(self, store: Store) -> None:
        with pytest.raises(StorageError) as caught:
            read_each(store, PLAIN, [(0, 3), (250, 257)])
        assert join_url(store.url, PLAIN) in str(caught.value)
        with pytest.raises(ObjectNotFoundError):
            read_each(store, "missing", [(0, 3), (5, 7)])

    @pytest.mark.parametrize(("start", "stop"), [(-1, 3), (5, 4)])
    def test_nonsense_range_is_refused(self, store: Store, start: int, stop: int) -> None:
        with pytest.raises(ConfigError, match="is not a range"):
            store.read(PLAIN, start, stop)

    @pytest.mark.parametrize(("start", "stop"), [(0, 256), (10, 20), (4, 4)])
    def test_into_fills_the_buffer_and_nothing_behind_it(self, store: Store, start: int, stop: int) -> None:
        buffer = bytearray(b"\xee" * 300)
        filled = store.read(PLAIN, start, stop, into=memoryview(buffer))
        num_bytes = stop - start
        assert bytes(filled) == OBJECTS[PLAIN][start:stop]
        assert buffer == OBJECTS[PLAIN][start:stop] + b"\xee" * (300 - num_bytes)

    def test_into_takes_a_large_range(self, store: Store) -> None:
        buffer = bytearray(len(OBJECTS[LARGE]))
        store.read(LARGE, 0, len(buffer), into=memoryview(buffer))
        assert buffer == OBJECTS[LARGE]

    def test_into_that_cannot_take_the_range_is_refused(self, store: Store) -> None:
        with pytest.raises(ConfigError, match="into a buffer of 5 bytes"):
            store.read(PLAIN, 0, 10, into=memoryview(bytearray(5)))
        with pytest.raises(ConfigError, match="read-only"):
            store.read(PLAIN, 0, 5, into=memoryview(bytes(5)))
        with pytest.raises(ConfigError, match="without `stop`"):
            store.read(PLAIN, into=memoryview(bytearray(500)))

    @pytest.mark.parametrize("key", ["missing", "class 1/missing", "class 1", f"{PLAIN}/below"])
    def test_missing_object_is_named(self, store: Store, key: str) -> None:
        for call in (store.head, store.read, lambda key: store.read(key, 0, 5), lambda key: store.read(key, 3, 3)):
            with pytest.raises(ObjectNotFoundError) as caught:
                call(key)
            assert join_url(store.url, key) in str(caught.value)
            assert len(str(caught.value)) < 600

    @pytest.mark.parametrize("key", ["/abs", "../up", "a/../b", "a//b", "a/./b", "", ".", "a/", "nul\0"])
    def test_key_that_is_not_relative_is_refused(self, store: Store, key: str) -> None:
        with pytest.raises(ConfigError):
            store.read(key)
        with pytest.raises(ConfigError):
            store.head(key)

    def test_eight_threads_read_at_once(self, store: Store) -> None:
        def part(start: int) -> bool:
            return bytes(store.read(LARGE, start, start + 70_001)) == OBJECTS[LARGE][start : start + 70_001]

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(part, range(0, 8_000_000, 100_000)))

    def test_pickled_store_opens_again(self, store: Store) -> None:
        again: Store = pickle.loads(pickle.dumps(store))
        try:
            assert again.url == store.url
            assert bytes(again.read(PLAIN, 1, 4)) == OBJECTS[PLAIN][1:4]
        finally:
            again.close()

    def test_close_twice(self, store: Store) -> None:
        again: Store = pickle.loads(pickle.dumps(store))
        again.read(PLAIN, 0, 1)
        again.close()
        again.close()


class StoreContract(ReadContract):
    """Reading, listing and writing. `fresh` is an empty store of each test's own."""

    @pytest.fixture
    def fresh(self) -> Store:
        raise NotImplementedError("give an empty store")

    def test_list_is_recursive_and_complete(self, store: Store) -> None:
        found = {info.key: info.num_bytes for info in store.list()}
        assert found == {key: len(data) for key, data in OBJECTS.items()}

    @pytest.mark.parametrize("prefix", ["class 1", "class 1/", "class 1/deep", "nothing/here", PLAIN, "class"])
    def test_list_of_a_folder(self, store: Store, prefix: str) -> None:
        folder = prefix.rstrip("/") + "/"
        assert {info.key for info in store.list(prefix)} == {key for key in OBJECTS if key.startswith(folder)}

    @pytest.mark.parametrize("prefix", ["../up", "/abs", "a//b"])
    def test_list_of_a_nonsense_prefix_is_refused(self, store: Store, prefix: str) -> None:
        with pytest.raises(ConfigError):
            list(store.list(prefix))

    @pytest.mark.parametrize("num_bytes", [0, 1, 9 << 20])
    @pytest.mark.parametrize("kind", ["bytes", "memoryview", "path"])
    def test_put_takes_bytes_views_and_files(self, fresh: Store, tmp_path: Path, kind: str, num_bytes: int) -> None:
        content = b"\x5a" * num_bytes
        source = tmp_path / "source"
        source.write_bytes(content)
        forms: dict[str, bytes | memoryview | Path] = {"bytes": content, "path": source}
        forms["memoryview"] = memoryview(bytearray(content))
        fresh.put("new/folder/object", forms[kind])
        assert fresh.read("new/folder/object") == content
        assert source.read_bytes() == content

    def test_put_takes_views_with_gaps_and_other_items(self, fresh: Store) -> None:
        fresh.put("gaps", memoryview(b"0123456789")[::2])
        fresh.put("ints", memoryview(b"0123456789ab").cast("I"))
        assert (bytes(fresh.read("gaps")), bytes(fresh.read("ints"))) == (b"02468", b"0123456789ab")

    def test_put_of_a_missing_file_names_it(self, fresh: Store, tmp_path: Path) -> None:
        with pytest.raises(StorageError, match="no-such-source"):
            fresh.put("object", tmp_path / "no-such-source")
        with pytest.raises(ObjectNotFoundError):
            fresh.head("object")

    def test_put_replaces(self, fresh: Store) -> None:
        fresh.put(PLAIN, b"a longer first")
        fresh.put(PLAIN, b"second")
        assert bytes(fresh.read(PLAIN)) == b"second"

    def test_put_if_absent_never_replaces(self, fresh: Store, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.write_bytes(b"from a file")
        fresh.put("claim", b"first", if_absent=True)
        for data in (b"second", source):
            with pytest.raises(ObjectExistsError) as caught:
                fresh.put("claim", data, if_absent=True)
            assert join_url(fresh.url, "claim") in str(caught.value)
        assert bytes(fresh.read("claim")) == b"first"

    def test_one_of_many_claims_wins(self, fresh: Store) -> None:
        barrier = threading.Barrier(8)

        def claim(number: int) -> int | None:
            barrier.wait(10)
            try:
                fresh.put("claim", str(number).encode(), if_absent=True)
            except ObjectExistsError:
                return None
            return number

        with ThreadPoolExecutor(8) as threads:
            winners = [number for number in threads.map(claim, range(8)) if number is not None]
        assert [str(number).encode() for number in winners] == [bytes(fresh.read("claim"))]

    def test_reader_never_sees_a_partial_object(self, fresh: Store) -> None:
        versions = [bytes([number]) * (3 << 20) for number in range(3)]
        done = threading.Event()

        def write() -> None:
            try:
                for number in range(6):
                    fresh.put("changing", versions[number % 3])
            finally:
                done.set()

        torn, seen = 0, 0
        with ThreadPoolExecutor(1) as threads:
            writing = threads.submit(write)
            while not done.is_set() or not seen:
                try:
                    torn += bytes(fresh.read("changing")) not in versions
                    seen += 1
                except DalipipeError as error:
                    # Replacing while it is read may fail the read; it must never answer torn bytes.
                    assert "changing" in str(error)
            writing.result()
        assert (torn, seen > 0) == (0, True)

    def test_listing_shows_no_leftovers_of_writes(self, fresh: Store) -> None:
        fresh.put("x/y", b"1")
        fresh.put("x/y", b"2")
        assert [info.key for info in fresh.list("x")] == ["x/y"]

    def test_delete_is_idempotent(self, fresh: Store) -> None:
        fresh.put(PLAIN, b"1")
        fresh.delete(PLAIN)
        fresh.delete(PLAIN)
        fresh.delete("never/was")
        with pytest.raises(ObjectNotFoundError):
            fresh.read(PLAIN)

    @pytest.mark.parametrize("key", ["/abs", "../up", "a//b", ""])
    def test_write_to_a_key_that_is_not_relative_is_refused(self, fresh: Store, key: str) -> None:
        with pytest.raises(ConfigError):
            fresh.put(key, b"")
        with pytest.raises(ConfigError):
            fresh.delete(key)
