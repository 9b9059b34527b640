"""What a loader must remember to go on exactly where the trainer stopped: a few integers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dalipipe.errors import StateError
from dalipipe.order.signature import OrderSignature

STATE_VERSION = 1


def pack_state(identity: str, order: OrderSignature, epoch: int, step: int) -> dict[str, Any]:
    """A JSON-able dictionary under 1 KB; `step` counts the batches of `epoch` that the trainer has got."""
    return {"version": STATE_VERSION, "epoch": epoch, "step": step, "identity": identity, **asdict(order)}


def unpack_state(state: Mapping[str, Any], identity: str, order: OrderSignature) -> tuple[int, int]:
    """Returns (epoch, step) when the state belongs to this data set (`identity`) and order.

    Raises:
        StateError: another version, data set, seed or order; both sides are printed.
    """
    if not isinstance(state, Mapping) or state.get("version") != STATE_VERSION:
        found = state.get("version") if isinstance(state, Mapping) else type(state).__name__
        raise StateError(f"loader state of version {found!r} cannot be loaded; this release reads {STATE_VERSION}")
    expected = {"identity": identity, **asdict(order)}
    differing = [
        f"  {name}: state {state.get(name)!r}, this loader {value!r}"
        for name, value in expected.items()
        if state.get(name) != value
    ]
    if differing:
        raise StateError(
            "this loader state belongs to another order, so resuming would repeat and lose samples:\n"
            + "\n".join(differing)
            + "\nload it with the configuration it was saved with, or start without it"
        )
    epoch, step = state.get("epoch"), state.get("step")
    if type(epoch) is not int or type(step) is not int or epoch < 0 or step < 0:
        raise StateError(f"loader state has no valid position: epoch={epoch!r} step={step!r}")
    return epoch, step
