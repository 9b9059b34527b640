"""Keys and uniforms without state: every random choice is a hash of what it is about.

The hash is SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014): value v under
key k is output number v of the stream that starts at k, so folding in one more value costs one finaliser.
All arrays have at least one dimension: numpy wraps around silently in arrays and warns for scalars.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

_WORD = (1 << 64) - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


class Purpose(IntEnum):
    """What a key is for. The numbers are part of the format: changing one changes every order and every state."""

    HOME = 1
    ROW = 2
    TRAVEL = 3
    FRAME = 4
    SAMPLE = 5
    TAIL = 6
    AUGMENT = 7
    MIX = 8
    SOURCE = 9
    REPEAT = 10


def words(value: int | I64 | U64) -> U64:
    """`value` modulo 2**64 as uint64; a plain int becomes an array of one."""
    if isinstance(value, int):
        return np.array([value & _WORD], dtype=np.uint64)
    return value.astype(np.uint64)


def fold(key: U64, value: int | I64 | U64) -> U64:
    """The key for `value` under `key`; the two broadcast. One-to-one in each argument while the other is held."""
    z: U64 = words(value) + np.uint64(1)
    z = z * _GAMMA + key
    z ^= z >> np.uint64(30)
    z *= _FIRST
    z ^= z >> np.uint64(27)
    z *= _SECOND
    z ^= z >> np.uint64(31)
    return z


def seed_key(seed: int, purpose: Purpose) -> U64:
    """uint64 [1]: the root key of `purpose` under `seed` (any int, taken modulo 2**64)."""
    return fold(fold(words(0), seed), int(purpose))


def uniforms(seed: int, epoch: int, ids: I64, num: int) -> npt.NDArray[np.float32]:
    """Uniforms for the augmentation of samples: a function of (seed, epoch, sample id) and of nothing else.

    Args:
        seed: `shuffle.seed`.
        epoch: the epoch in which the sample is delivered.
        ids: int64 [n], sample ids.
        num: uniforms a sample needs.

    Returns:
        float32 [n, num] in [0, 1), in steps of 2**-24; column c does not depend on `num`.
    """
    samples = fold(fold(seed_key(seed, Purpose.AUGMENT), epoch), ids.reshape(-1))
    draws = fold(samples[:, None], np.arange(num, dtype=np.int64)[None, :])
    values: npt.NDArray[np.float32] = (draws >> np.uint64(40)).astype(np.float32)
    values *= np.float32(2.0**-24)
    return values
