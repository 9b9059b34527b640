"""Who am I: from what launchers set, and from nothing."""

from __future__ import annotations

import pytest

from dalipipe.errors import ConfigError
from dalipipe.world import World, detect_world


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, World()),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
            World(rank=5, world_size=8, local_rank=1, local_world_size=4, node=1),
        ),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"},
            World(rank=3, world_size=4, local_rank=3, local_world_size=4),
        ),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
            World(rank=5, world_size=8, local_rank=1, local_world_size=4, node=1),
        ),
        ({"RANK": "1", "WORLD_SIZE": "2"}, World(rank=1, world_size=2, node=1)),
        ({"RANK": "1", "WORLD_SIZE": "2", "GROUP_RANK": "7"}, World(rank=1, world_size=2, node=7)),
    ],
)
def test_worlds(environ: dict[str, str], expected: World) -> None:
    assert detect_world(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "4"}, "RANK='x' must be an integer"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "look at RANK and WORLD_SIZE"),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            "look at LOCAL_RANK and LOCAL_WORLD_SIZE",
        ),
    ],
)
def test_contradictions_name_the_variable(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        detect_world(environ)
