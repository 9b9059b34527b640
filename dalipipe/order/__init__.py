"""Which samples form which step: pure arithmetic of (manifest shape, configuration, seed, epoch, step)."""

from dalipipe.order.config import ShuffleConfig
from dalipipe.order.contract import BlockUse, Ids, Order
from dalipipe.order.epoch import EpochOrder, epoch_order
from dalipipe.order.hashing import uniforms
from dalipipe.order.signature import OrderSignature, order_signature

__all__ = [
    "BlockUse",
    "EpochOrder",
    "Ids",
    "Order",
    "OrderSignature",
    "ShuffleConfig",
    "epoch_order",
    "order_signature",
    "uniforms",
]
