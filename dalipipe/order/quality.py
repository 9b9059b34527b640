"""How well an order mixes, in figures that predict the variance of a gradient.

Displacement and entropy of ids barely move between a good and a poor shuffle; what training feels is how often samples
that resemble each other (same shard, same block) meet in one batch.
"""

from __future__ import annotations

import numpy as np

from dalipipe.order.hashing import I64


def collision_ratio(batches: I64, group_samples: int, num_samples: int) -> float:
    """R: pairs of a batch that come from one group, over the number that a uniform permutation gives (1 is ideal).

    Args:
        batches: int64 [steps, B], ids of whole steps; steps with an empty slot (-1) are left out.
        group_samples: samples of a group (a shard, a block), consecutive in id; divides `num_samples`.
        num_samples: N.

    Raises:
        ValueError: there is no whole step of at least 2, or groups do not divide the set into at least one pair.
    """
    observed, expected = _same_group(batches, group_samples, num_samples)
    return observed / expected


def design_effect(batches: I64, group_samples: int, num_samples: int, rho: float) -> float:
    """DEFF = 1 + (B - 1)(p - p0) rho: the variance of a batch mean over that under a uniform permutation.

    Kish's design effect (Survey Sampling, 1965) with p the observed and p0 the uniform chance that two samples of a
    batch share a group, and `rho` the correlation inside a group (of a label, an embedding, a loss; 1 at worst). Other
    arguments and errors as in `collision_ratio`.
    """
    observed, expected = _same_group(batches, group_samples, num_samples)
    return 1 + (int(batches.shape[1]) - 1) * (observed - expected) * rho


def recurrence(batches: I64, later: I64) -> float:
    """Pairs that share a batch in both of two epochs, over the number that chance gives (1 is ideal).

    Args:
        batches: int64 [steps, B], one epoch with every id of [0, N) at most once; empty slots are -1.
        later: int64 [steps', B], another epoch.

    Raises:
        ValueError: no pair of samples shares a batch in one of the epochs.
    """
    num_samples = int(max(batches.max(), later.max())) + 1
    one, other = _step_of(batches, num_samples), _step_of(later, num_samples)
    both = (one >= 0) & (other >= 0)
    one, other = one[both], other[both]
    # In Python's integers: the product of two pair counts passes 2**63 at a few million samples.
    pairs_one, pairs_other = _num_pairs(np.bincount(one)), _num_pairs(np.bincount(other))
    if pairs_one == 0 or pairs_other == 0:
        raise ValueError("no two samples share a batch: recurrence needs batches of at least 2")
    shared = _num_pairs(np.unique(one * later.shape[0] + other, return_counts=True)[1])
    all_pairs = int(one.size) * (int(one.size) - 1) // 2
    return shared * all_pairs / (pairs_one * pairs_other)


def multiset_deviation(ids: I64, num_samples: int) -> float:
    """Sum of |deliveries - 1| over all samples, over N: 0 when every id of [0, N) came exactly once.

    Args:
        ids: int64 of any shape, delivered ids; -1 (empty slots) is left out.
        num_samples: N.
    """
    counts = np.bincount(ids[ids >= 0], minlength=num_samples)
    return float(np.abs(counts - 1).sum()) / num_samples


def _same_group(batches: I64, group_samples: int, num_samples: int) -> tuple[float, float]:
    whole = batches[(batches >= 0).all(axis=1)]
    batch_size = int(batches.shape[1])
    if whole.shape[0] == 0 or batch_size < 2:
        raise ValueError(f"no whole step of at least 2 samples among {batches.shape[0]} steps of {batch_size}")
    if not 2 <= group_samples <= num_samples or num_samples % group_samples:
        raise ValueError(f"groups of {group_samples} samples do not divide {num_samples} samples, or hold no pair")
    num_groups = num_samples // group_samples
    pairs = sum(_num_pairs(np.bincount(step, minlength=num_groups)) for step in whole // group_samples)
    observed = pairs / (whole.shape[0] * batch_size * (batch_size - 1) / 2)
    return observed, (group_samples - 1) / (num_samples - 1)


def _num_pairs(counts: I64) -> int:
    return int((counts * (counts - 1) // 2).sum())


def _step_of(batches: I64, num_samples: int) -> I64:
    steps = np.full(num_samples, -1, dtype=np.int64)
    row, column = np.nonzero(batches >= 0)
    steps[batches[row, column]] = row
    return steps
