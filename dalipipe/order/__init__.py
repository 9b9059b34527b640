"""Which samples form which step: pure arithmetic of (manifest shape, configuration, seed, epoch, step)."""

from dalipipe.order.config import ShuffleConfig
from dalipipe.order.contract import BlockUse, Ids, Order
from dalipipe.order.epoch import EpochOrder, epoch_order
from dalipipe.order.hashing import uniforms
from dalipipe.order.mix import mixed_order
from dalipipe.order.repeat import Extra, Repeat, Repeats
from dalipipe.order.seating import rank_slots
from dalipipe.order.signature import OrderSignature, order_signature

__all__ = [
    "BlockUse",
    "EpochOrder",
    "Extra",
    "Ids",
    "Order",
    "OrderSignature",
    "Repeat",
    "Repeats",
    "ShuffleConfig",
    "epoch_order",
    "mixed_order",
    "order_signature",
    "rank_slots",
    "uniforms",
]
