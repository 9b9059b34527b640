"""The loader's state on shared storage: always one whole copy, whatever happens to the writer or the store."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dalipipe.errors import StateError, StorageError
from dalipipe.loader.publish import (
    STATE_NAMES,
    Published,
    StatePublisher,
    decode_published,
    encode_published,
    next_number,
    read_published,
)
from dalipipe.storage.local import LocalStore
from dalipipe.storage.open import open_store
from dalipipe.storage.store import StorageConfig
from dalipipe.telemetry import Recorder
from tests.support.waiting import wait_until


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "state", StorageConfig())


def state(step: int) -> dict[str, Any]:
    return {"version": 1, "epoch": 3, "step": step, "identity": "a" * 32}


def publisher(store: Any, recorder: Recorder | None = None, **changes: Any) -> StatePublisher:
    arguments: dict[str, Any] = {"every_s": 0.0, "first_number": 0, "recorder": recorder or Recorder()}
    return StatePublisher(store, **(arguments | changes))


def step_at(store: LocalStore) -> int:
    found = read_published(store)
    return -1 if found is None else int(found.state["step"])


def test_nothing_was_published_yet(store: LocalStore) -> None:
    assert read_published(store) is None
    assert next_number(store) == 0


def test_the_newest_state_is_found_and_two_objects_take_turns(store: LocalStore) -> None:
    recorder = Recorder()
    mine = publisher(store, recorder)
    for step in range(5):
        mine.offer(state(step))
        wait_until(lambda step=step: step_at(store) == step)
    mine.close()
    mine.close()
    assert sorted(info.key for info in store.list()) == list(STATE_NAMES)
    steps = {decode_published(store.read(name), name).state["step"] for name in STATE_NAMES}
    assert steps == {3, 4}
    assert recorder.snapshot()["state_published"] == 5
    assert next_number(store) == 5


def test_states_are_published_when_due_and_the_last_one_at_the_end(store: LocalStore) -> None:
    now_s = [0.0]
    mine = publisher(store, every_s=10.0, clock=lambda: now_s[0])
    for step in range(30):
        now_s[0] = step
        mine.offer(state(step))
        if step in (10, 20):
            wait_until(lambda step=step: step_at(store) == step)
    assert step_at(store) == 20
    mine.close()
    assert step_at(store) == 29


def test_a_torn_object_is_recognised_at_every_length(store: LocalStore) -> None:
    whole = encode_published(Published(state=state(7), number=4, saved_at=time.time()))
    assert decode_published(whole, "it").state == state(7)
    for length in range(len(whole)):
        with pytest.raises(StateError, match="it"):
            decode_published(whole[:length], "it")
    for at in range(0, len(whole), 3):
        changed = bytearray(whole)
        changed[at] ^= 1
        try:
            found = decode_published(changed, "it")
        except StateError:
            continue
        assert found.state == state(7), "a flipped bit in white space only"


def test_a_torn_newest_state_gives_way_to_the_one_before(store: LocalStore, caplog: pytest.LogCaptureFixture) -> None:
    for number in (4, 5):
        data = encode_published(Published(state=state(number), number=number, saved_at=0.0))
        store.put(STATE_NAMES[number % 2], data if number == 4 else data[: len(data) // 2])
    with caplog.at_level(logging.WARNING):
        assert step_at(store) == 4
    assert STATE_NAMES[1] in caplog.text
    assert next_number(store) == 5  # the torn one is written over, the whole one stays
    store.put(STATE_NAMES[0], b"")
    with pytest.raises(StateError, match=r"no whole loader state at .*resume=none"):
        read_published(store)


def test_another_format_is_refused_by_name(store: LocalStore) -> None:
    content = json.loads(encode_published(Published(state=state(0), number=0, saved_at=0.0)))
    with pytest.raises(StateError, match="format 'other'; this release reads dalipipe-loader-state-1"):
        decode_published(json.dumps(content | {"format": "other"}).encode(), "it")


class Failing(LocalStore):
    """Fails or hangs on demand."""

    failing = False
    gate: threading.Event | None = None
    entered = threading.Event()

    def put(self, key: str, data: Any, *, if_absent: bool = False) -> None:
        self.entered.set()
        if self.gate is not None:
            self.gate.wait(30)
        if self.failing:
            raise StorageError(f"writing {self.url}/{key} failed: no such bucket")
        super().put(key, data, if_absent=if_absent)


def test_a_failing_store_is_said_once_counted_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, recorder = Failing(tmp_path, StorageConfig()), Recorder()
    store.failing = True
    mine = publisher(store, recorder)
    for step in range(3):
        mine.offer(state(step))
        wait_until(lambda step=step: recorder.snapshot().get("state_failures", 0) == step + 1)
    warnings = [record for record in caplog.records if "no such bucket" in record.getMessage()]
    assert len(warnings) == 1
    assert "state.url" in warnings[0].getMessage()
    store.failing = False
    mine.offer(state(9))
    mine.close()
    assert step_at(store) == 9


def test_a_hung_store_stalls_neither_offer_nor_close(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Failing(tmp_path, StorageConfig())
    store.gate = threading.Event()
    store.entered.clear()
    mine = publisher(store)
    mine.offer(state(0))
    assert store.entered.wait(10)
    begin = time.perf_counter()
    for step in range(1, 2000):
        mine.offer(state(step))
    mine.close()
    assert time.perf_counter() - begin < 10
    assert "did not reach" in caplog.text
    store.gate.set()
    wait_until(lambda: not any(thread.name == "dalipipe-state" for thread in threading.enumerate()))


_WRITER = """
import sys
from dalipipe.loader.publish import StatePublisher, next_number
from dalipipe.storage.open import open_store
from dalipipe.telemetry import Recorder
store = open_store(sys.argv[1])
mine = StatePublisher(store, every_s=0.0, first_number=next_number(store), recorder=Recorder())
step = int(sys.argv[2])
while True:
    mine.offer({"step": step, "filling": "x" * 600})
    step += 1
"""


def test_a_writer_killed_at_any_moment_leaves_a_whole_state_that_never_goes_back(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    reached, number = -1, -1
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path), str(reached + 1)])
        try:
            wait_until(lambda seen=number: (found := read_published(store)) is not None and found.number > seen + 3)
        finally:
            os.kill(writer.pid, signal.SIGKILL)
            writer.wait(10)
        found = read_published(store)
        assert found is not None
        assert found.number > number
        assert found.state["step"] > reached
        reached, number = int(found.state["step"]), found.number
