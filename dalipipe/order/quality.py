"""How well an order mixes, in figures that predict the variance of a gradient.

Displacement and entropy of ids barely move between a good and a poor shuffle; what training feels is how often samples
that resemble each other (same shard, same block) meet in one batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dalipipe.order.contract import Order
from dalipipe.order.hashing import I64

_MAX_IDS = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """How an order mixes, over `num_steps` steps of an epoch. None: it cannot be told (no pairs, too many samples)."""

    collision_ratio: float | None
    block_collision_ratio: float | None
    design_effect: float | None
    recurrence: float | None
    multiset_deviation: float | None
    num_steps: int


def measure(
    orders: Callable[[int], Order], shard_starts: I64, block_samples: int, *, rho: float, max_ids: int = _MAX_IDS
) -> Quality:
    """All figures for the first two epochs of a data set.

    Up to `max_ids` samples an epoch the figures are exact; beyond, the ratios are taken over evenly spread steps and
    what needs whole epochs is None.

    Args:
        orders: gives the order of an epoch.
        shard_starts: int64 [shards + 1], the first sample of each shard, and N.
        block_samples: K.
        rho: correlation inside a shard, for the design effect; 1 is the worst there can be.
    """
    first, second = orders(0), orders(1)
    num_samples = int(shard_starts[-1])
    whole = first.num_steps * first.batch_size <= max_ids
    chosen = np.unique(np.linspace(0, first.num_steps - 1, max(1, max_ids // first.batch_size)).astype(np.int64))
    batches = first.ids(0, first.num_steps) if whole else np.concatenate([first.ids(int(s), 1) for s in chosen])
    later = second.ids(0, second.num_steps) if whole else None
    return Quality(
        collision_ratio=_or_none(lambda: collision_ratio(batches, shard_starts, num_samples)),
        block_collision_ratio=_or_none(
            lambda: collision_ratio(
                batches, np.append(np.arange(0, num_samples, block_samples), num_samples), num_samples
            )
        ),
        design_effect=_or_none(lambda: design_effect(batches, shard_starts, num_samples, rho)),
        recurrence=None if later is None else _or_none(lambda: recurrence(batches, later)),
        multiset_deviation=multiset_deviation(batches, num_samples) if whole else None,
        num_steps=len(batches),
    )


def _or_none(figure: Callable[[], float]) -> float | None:
    try:
        return figure()
    except ValueError:
        return None


def group_correlation(labels: I64, groups: I64) -> float | None:
    """rho: the correlation of labels inside a group (a shard), from 1 (a group has one label) to about 0 (no relation).

    (p_in - p_out) / (1 - p_out), with p_in the share of pairs of one group that agree and p_out that of pairs of two
    groups: the intraclass correlation of the labels' indicator variables, as Fleiss' kappa is for raters (Fleiss:
    Measuring nominal scale agreement among many raters, 1971).

    Args:
        labels: int64 [n], labels of a sample of the data set.
        groups: int64 [n], the group of each.

    Returns:
        None when there are no two groups, no pair inside one, or no two labels.
    """
    label = np.unique(labels, return_inverse=True)[1]
    group = np.unique(groups, return_inverse=True)[1]
    size = np.bincount(group)
    cells = np.unique(group * (int(label.max(initial=0)) + 1) + label, return_counts=True)[1]
    pairs_in, agree_in = _num_pairs(size), _num_pairs(cells)
    pairs_out = _num_pairs(np.array([len(labels)])) - pairs_in
    agree_out = _num_pairs(np.bincount(label)) - agree_in
    if pairs_in == 0 or pairs_out in (0, agree_out):
        return None
    in_share, out_share = agree_in / pairs_in, agree_out / pairs_out
    return (in_share - out_share) / (1 - out_share)


def collision_ratio(batches: I64, groups: int | I64, num_samples: int) -> float:
    """R: pairs of a batch that come from one group, over the number that a uniform permutation gives (1 is ideal).

    Args:
        batches: int64 [steps, B], ids of whole steps; steps with an empty slot (-1) are left out.
        groups: groups (shards, blocks) are consecutive in id: the size of all, which divides `num_samples`, or int64
            [g + 1], where each begins, and N.
        num_samples: N.

    Raises:
        ValueError: there is no whole step of at least 2, or the groups hold no pair.
    """
    observed, expected = _same_group(batches, groups, num_samples)
    return observed / expected


def design_effect(batches: I64, groups: int | I64, num_samples: int, rho: float) -> float:
    """DEFF = 1 + (B - 1)(p - p0) rho: the variance of a batch mean over that under a uniform permutation.

    Kish's design effect (Survey Sampling, 1965) with p the observed and p0 the uniform chance that two samples of a
    batch share a group, and `rho` the correlation inside a group (of a label, an embedding, a loss; 1 at worst). Other
    arguments and errors as in `collision_ratio`.
    """
    observed, expected = _same_group(batches, groups, num_samples)
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


def _same_group(batches: I64, groups: int | I64, num_samples: int) -> tuple[float, float]:
    whole = batches[(batches >= 0).all(axis=1)]
    batch_size = int(batches.shape[1])
    if whole.shape[0] == 0 or batch_size < 2:
        raise ValueError(f"no whole step of at least 2 samples among {batches.shape[0]} steps of {batch_size}")
    if isinstance(groups, int):
        if not 2 <= groups <= num_samples or num_samples % groups:
            raise ValueError(f"groups of {groups} samples do not divide {num_samples} samples, or hold no pair")
        starts = np.arange(0, num_samples + 1, groups)
    else:
        starts = groups
    possible = _num_pairs(np.diff(starts))
    if possible == 0:
        raise ValueError(f"{len(starts) - 1} groups of {num_samples} samples hold no pair")
    pairs = 0
    for step in whole:
        pairs += _num_pairs(np.unique(np.searchsorted(starts, step, side="right"), return_counts=True)[1])
    observed = pairs / (whole.shape[0] * batch_size * (batch_size - 1) / 2)
    return observed, possible / (num_samples * (num_samples - 1) / 2)


def _num_pairs(counts: I64) -> int:
    return int((counts * (counts - 1) // 2).sum())


def _step_of(batches: I64, num_samples: int) -> I64:
    steps = np.full(num_samples, -1, dtype=np.int64)
    row, column = np.nonzero(batches >= 0)
    steps[batches[row, column]] = row
    return steps
