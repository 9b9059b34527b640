"""Where the position of a run is read from and published to."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from dalipipe.errors import ConfigError, StateError
from dalipipe.telemetry import Recorder
from dalipipe.world import World

if TYPE_CHECKING:
    from dalipipe.loader.publish import Published, StatePublisher
    from dalipipe.wiring.config import LoadConfig


def find_state(cfg: LoadConfig) -> Published | None:
    """The published state that `resume` asks for; None when it asks for none, or `auto` finds none.

    Raises:
        ConfigError: `resume=auto` without a `state.url`.
        StateError: there are states and none is whole, or `resume` names a URL without one.
        StorageError: the URL cannot be read; beginning anew instead would lose the position.
    """
    from dalipipe.loader.publish import read_published
    from dalipipe.storage.open import open_store

    if cfg.resume in ("none", ""):
        return None
    url = cfg.state.url if cfg.resume == "auto" else cfg.resume
    if not url:
        raise ConfigError("resume=auto goes on from the state at state.url, which is empty; name a shared folder there")
    with closing(open_store(url, cfg.storage)) as store:
        found = read_published(store)
    if found is None and cfg.resume != "auto":
        raise StateError(f"resume={cfg.resume}: no loader state there; give the state.url of an earlier run, or 'auto'")
    return found


def open_publisher(cfg: LoadConfig, world: World, recorder: Recorder) -> StatePublisher | None:
    """What publishes the state to `state.url`: on rank 0, when there is one.

    Raises:
        ConfigError: a period that can never work.
        StorageError: the URL cannot be read or written.
    """
    from dalipipe.loader.publish import StatePublisher, next_number
    from dalipipe.storage.open import open_store

    if not cfg.state.every_s >= 0:
        raise ConfigError(f"state.every_s={cfg.state.every_s} must be at least 0 seconds")
    if not cfg.state.url or world.rank != 0:
        return None
    store = open_store(cfg.state.url, cfg.storage)
    return StatePublisher(store, every_s=cfg.state.every_s, first_number=next_number(store), recorder=recorder)
