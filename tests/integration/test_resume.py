"""Going on exactly where a trainer stopped: positions, worlds and places a state may come from."""

from __future__ import annotations

import json
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import dalipipe as dp
from dalipipe.errors import ConfigError, StateError, StorageError
from dalipipe.loader.publish import STATE_NAMES
from tests.conftest import NUM_IMAGES

BATCH_SIZE = 12
NUM_STEPS = -(-NUM_IMAGES // BATCH_SIZE)


def load(packed: Path, cache: Path, *overrides: str, world: dp.World | None = None) -> dp.Loader:
    options = [
        f"data.url={packed}",
        f"cache.dir={cache}",
        "graph=image_raw",
        "prefetch.threads=2",
        f"loader.global_batch_size={BATCH_SIZE}",
        "loader.last_batch=partial",
    ]
    return dp.load("train", [*options, *overrides], world=world)


def ids_of(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def plan(packed: Path, cache: Path) -> list[list[int]]:
    """Two epochs without a stop."""
    with load(packed, cache) as loader:
        return ids_of(loader) + ids_of(loader)


def state_at(packed: Path, cache: Path, num_batches: int) -> dict[str, Any]:
    """The state of a trainer that broke out of its loop after so many batches."""
    with load(packed, cache) as loader:
        for _ in range(num_batches // NUM_STEPS):
            assert len(ids_of(loader)) == NUM_STEPS
        assert len(ids_of(islice(loader, num_batches % NUM_STEPS))) == num_batches % NUM_STEPS
        state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    return state


@pytest.mark.parametrize("num_batches", [0, 1, 5, NUM_STEPS - 1, NUM_STEPS, NUM_STEPS + 2])
def test_at_any_position(packed: Path, cache: Path, plan: list[list[int]], num_batches: int) -> None:
    state = state_at(packed, cache, num_batches)
    with load(packed, cache, "prefetch.depth=2", "prefetch.queue_depth=1", "prefetch.device_batches=1") as loader:
        loader.load_state_dict(state)
        rest = ids_of(loader)
        while len(rest) < 2 * NUM_STEPS - num_batches:
            rest += ids_of(loader)
    assert plan[:num_batches] + rest == plan


def test_twice_in_one_epoch_with_other_worlds_and_ranks_in_another_order(
    packed: Path, cache: Path, plan: list[list[int]]
) -> None:
    state = state_at(packed, cache, 3)
    got = plan[:3]
    # Two nodes of two ranks, then three nodes of one rank; the processes start in any order.
    for local_size, world_size, num_steps in ((2, 4, 4), (1, 3, NUM_STEPS - 7)):
        batches: dict[int, list[list[int]]] = {}
        states = []
        for rank in reversed(range(world_size)):
            world = dp.World(
                rank=rank,
                world_size=world_size,
                local_rank=rank % local_size,
                local_world_size=local_size,
                node=rank // local_size,
            )
            with load(packed, cache, world=world) as loader:
                loader.load_state_dict(state)
                batches[rank] = ids_of(islice(loader, num_steps))
                states.append(loader.state_dict())
        assert all(other == states[0] for other in states), "the state is that of the job, not of a rank"
        state = states[0]
        for step in range(num_steps):
            got.append([sample for rank in range(world_size) for sample in batches[rank][step]])
    assert got == plan[:NUM_STEPS]


def test_a_state_on_shared_storage_is_picked_up(
    packed: Path, cache: Path, plan: list[list[int]], tmp_path: Path
) -> None:
    options = (f"state.url={tmp_path / 'state'}", "state.every_s=0")
    with load(packed, cache, *options, "resume=auto") as loader:  # nothing there yet: begins
        batches = iter(loader)
        seen = ids_of(islice(batches, 4))
        # The fourth batch may not have been trained on: only three are known to be done with.
    with load(packed, cache, *options, "resume=auto") as loader:
        assert (loader.epoch, loader.state_dict()["step"]) == (0, 3)
        rest = ids_of(loader)
        assert loader.stats()["state"]["failed"] == 0
    assert seen[:3] + rest == plan[:NUM_STEPS]
    with load(packed, cache, *options, "resume=auto") as loader:
        assert ids_of(loader) == plan[NUM_STEPS:]
    # From another run's place, without publishing; and anew when nothing is asked for.
    with load(packed, cache, f"resume={tmp_path / 'state'}") as loader:
        assert loader.epoch == 2
    with load(packed, cache, *options) as loader:
        assert (loader.epoch, loader.state_dict()["step"]) == (0, 0)
    assert {path.name for path in (tmp_path / "state").iterdir()} == set(STATE_NAMES)


def test_only_rank_0_publishes(packed: Path, cache: Path, tmp_path: Path) -> None:
    world = dp.World(rank=1, world_size=2, local_rank=1, local_world_size=2)
    with load(packed, cache, f"state.url={tmp_path / 'state'}", "state.every_s=0", world=world) as loader:
        ids_of(islice(loader, 2))
    assert not (tmp_path / "state").exists()


def test_a_state_of_another_order_is_refused_with_both_sides_and_nothing_is_left_running(
    packed: Path, cache: Path, tmp_path: Path
) -> None:
    options = (f"state.url={tmp_path}", "state.every_s=0", "resume=auto")
    with load(packed, cache, *options) as loader:
        ids_of(islice(loader, 2))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(StateError) as caught:
        load(packed, cache, *options, "shuffle.seed=9", "shuffle.lanes=2")
    message = str(caught.value)
    assert "seed: state 0, this loader 9" in message
    assert "lanes: state 4, this loader 2" in message
    assert not [thread for thread in threading.enumerate() if thread.name == "dalipipe-state"]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("overrides", "refusal"),
    [
        (("resume=auto",), (ConfigError, "state.url, which is empty")),
        (("resume=HERE",), (StateError, "no loader state there")),
        (("state.url=HERE", "state.every_s=-1"), (ConfigError, "state.every_s=-1")),
        (("state.url=HERE/file/below",), (StorageError, "file/below")),
        (("state.url=HERE/torn", "resume=auto"), (StateError, "resume=none")),
    ],
)
def test_what_cannot_work_is_refused_at_start(
    packed: Path, cache: Path, tmp_path: Path, overrides: tuple[str, ...], refusal: tuple[type[Exception], str]
) -> None:
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / STATE_NAMES[1]).write_text('{"format": "dali')
    error, message = refusal
    with pytest.raises(error) as caught:
        load(packed, cache, *(word.replace("HERE", str(tmp_path)) for word in overrides))
    assert message in str(caught.value)
