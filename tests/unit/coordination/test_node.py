"""Seating by what nodes hold, agreed over a board."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist

from dalipipe.coordination.board import TcpBoard
from dalipipe.coordination.node import NodeCoordinator, lane_nearness
from dalipipe.coordination.static import StaticCoordinator
from dalipipe.errors import ConfigError, CoordinationError
from dalipipe.order import ShuffleConfig, epoch_order
from dalipipe.shards.shape import DataShape
from dalipipe.world import World
from tests.contracts.coordinator import CoordinatorContract
from tests.support.waiting import wait_until

LANES = 4


class SharedBoard:
    """A board in memory, on which every node has already said that it holds nothing."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def post(self, name: str, value: bytes) -> None:
        self.values[name] = value

    def read(self, name: str) -> bytes:
        return self.values.get(name, np.zeros(1, "<i4").tobytes())

    def close(self) -> None:
        pass


class TestNode(CoordinatorContract):
    board = SharedBoard()

    def make(self, world: World) -> NodeCoordinator:
        if world.rank == 0:
            type(self).board = SharedBoard()
        return NodeCoordinator(world, self.board, lambda: np.zeros(1, dtype=np.int64))


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a store that is served while the test runs."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    yield server.port
    del server


def world(rank: int, world_size: int = 8, per_node: int = 2) -> World:
    return World(rank=rank, world_size=world_size, local_rank=rank % per_node, local_world_size=per_node)


def agree(port: int, prefix: str, near: Callable[[int], list[int]], batch_size: int = 32) -> list[list[int]]:
    """What eight ranks on four nodes agree on, each in a thread with a connection of its own."""

    def rank_slots(rank: int) -> list[int]:
        board = TcpBoard("127.0.0.1", port, prefix=prefix, timeout_s=20)
        coordinator = NodeCoordinator(world(rank), board, lambda: np.array(near(rank // 2), dtype=np.int64))
        try:
            return coordinator.slots(batch_size).tolist()
        finally:
            coordinator.close()

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(rank_slots, range(8)))


def test_ranks_agree_over_a_real_store(port: int) -> None:
    by_number = [StaticCoordinator(world(rank)).slots(32).tolist() for rank in range(8)]
    assert agree(port, "none", lambda node: [0] * LANES) == by_number
    # Node n holds the lane of node 3 - n: they change seats.
    swapped = agree(port, "swapped", lambda node: [int(lane == 3 - node) for lane in range(LANES)])
    assert swapped == [by_number[rank] for rank in (6, 7, 4, 5, 2, 3, 0, 1)]


def test_a_rank_that_never_comes_is_an_error_within_the_deadline(port: int) -> None:
    board = TcpBoard("127.0.0.1", port, prefix="alone", timeout_s=1)
    begin = time.perf_counter()
    with pytest.raises(CoordinationError, match=r"reading near/1 .*127\.0\.0\.1.* 1 s .*assign=static"):
        NodeCoordinator(world(0), board, lambda: np.zeros(LANES, dtype=np.int64)).slots(32)
    assert time.perf_counter() - begin < 20


def test_a_server_that_hangs_is_an_error_within_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        begin = time.perf_counter()
        with pytest.raises(CoordinationError, match="connecting"):
            TcpBoard("127.0.0.1", deaf.getsockname()[1], prefix="x", timeout_s=1)
        assert time.perf_counter() - begin < 20
    wait_until(
        lambda: all(thread.name != "dalipipe-board" for thread in threading.enumerate()),
        "the end of the call that was given up on",
    )


def test_what_is_near_is_counted_by_lane() -> None:
    shape = DataShape(num_samples=4000, block_samples=5, num_bytes=4000)
    order = epoch_order(shape, epoch=0, batch_size=16, shuffle=ShuffleConfig(lanes=LANES), last_batch="partial")
    held = set(order.blocks(0, order.num_steps, np.arange(4, 8)).blocks.tolist())
    near = lane_nearness(order, LANES, lambda ids: ids // 5, held.__contains__)
    assert near.tolist()[1] == near.max() >= 60
    assert near[[0, 2, 3]].max() <= 2  # the tail reads blocks of any lane


def test_ranks_that_are_no_whole_nodes_are_refused() -> None:
    for odd, replicas in ((world(0, world_size=7), 1), (world(0), 4)):
        with pytest.raises(ConfigError, match=r"assign=node seats whole nodes: .* use assign=static"):
            NodeCoordinator(odd, SharedBoard(), lambda: np.zeros(1, dtype=np.int64), replicas=replicas)
