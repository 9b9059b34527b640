"""Keyed permutations of [0, size) that are evaluated index by index: no table, any size up to 2**62.

A Feistel network of six rounds over two halves of (nearly) equal width (Luby, Rackoff: How to construct pseudorandom
permutations, 1988), restricted to [0, size) by cycle walking (Black, Rogaway: Ciphers with arbitrary finite domains,
2002). Halves may differ by one bit, so that the domain is less than twice the size and a walk takes under two
evaluations on average. Fewer than four rounds leave measurable structure in batches; six leave none.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dalipipe.order.hashing import I64, U64, words

_ROUNDS = 6
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
_TWEAKS = [np.uint64(0xD6E8FEB86659FD93 * number % (1 << 64)) for number in range(_ROUNDS)]

_Cipher = Callable[[U64, U64, U64], U64]


def permute(index: I64, size: int | I64, key: U64) -> I64:
    """The image of `index` under the permutation of [0, size) that `key` names; all three broadcast.

    Args:
        index: int64, each in [0, size).
        size: one size for all, or one an index.
        key: uint64, one or one an index.

    Returns:
        int64 of the broadcast shape; for a fixed size and key a bijection of [0, size).
    """
    return _walk(_encipher, index, size, key)


def invert(image: I64, size: int | I64, key: U64) -> I64:
    """The index whose `permute` is `image`; arguments as there."""
    return _walk(_decipher, image, size, key)


def _walk(cipher: _Cipher, index: I64, size: int | I64, key: U64) -> I64:
    sizes = words(size)
    shape = np.broadcast_shapes(index.shape, sizes.shape, key.shape)
    bits = _bit_length(sizes)
    values = np.broadcast_to(cipher(words(index), bits, key), shape).flatten()
    outside = np.flatnonzero(values >= _flat(sizes, shape))
    while outside.size:
        around = [_at(array, shape, outside) for array in (sizes, bits, key)]
        walked = cipher(values[outside], around[1], around[2])
        values[outside] = walked
        outside = outside[walked >= around[0]]
    return values.reshape(shape).view(np.int64)


def _flat(array: U64, shape: tuple[int, ...]) -> U64:
    return array if array.size == 1 else np.broadcast_to(array, shape).reshape(-1)


def _at(array: U64, shape: tuple[int, ...], where: I64) -> U64:
    return array.reshape(1) if array.size == 1 else _flat(array, shape)[where]


def _bit_length(sizes: U64) -> U64:
    # frexp is exact to 2**53 and may answer one bit too many above: still a domain that holds [0, size).
    exponents = np.frexp((sizes - np.uint64(1)).astype(np.float64))[1]
    bits: U64 = np.maximum(exponents, 2).astype(np.uint64)
    return bits


def _halves(bits: U64) -> tuple[U64, U64, U64]:
    """The width of the right half, and the masks of the left and the right half."""
    one = np.uint64(1)
    right_bits = bits - (bits >> one)
    return right_bits, (one << (bits >> one)) - one, (one << right_bits) - one


def _scramble(half: U64, key: U64, number: int) -> U64:
    z: U64 = half + (key + _TWEAKS[number])
    z *= _GAMMA
    z ^= z >> np.uint64(29)
    z *= _MULTIPLIER
    z ^= z >> np.uint64(32)
    return z


def _encipher(x: U64, bits: U64, key: U64) -> U64:
    right_bits, left_mask, right_mask = _halves(bits)
    left, right = x >> right_bits, x & right_mask
    for number in range(_ROUNDS):
        # The halves change places every round, and so do their widths; after an even number all is as before.
        mixed = _scramble(right, key, number) ^ left
        left, right = right, mixed & (right_mask if number % 2 else left_mask)
    return (left << right_bits) | right


def _decipher(x: U64, bits: U64, key: U64) -> U64:
    right_bits, left_mask, right_mask = _halves(bits)
    left, right = x >> right_bits, x & right_mask
    for number in reversed(range(_ROUNDS)):
        mixed = _scramble(left, key, number) ^ right
        left, right = mixed & (right_mask if number % 2 else left_mask), left
    return (left << right_bits) | right
