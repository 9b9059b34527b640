from __future__ import annotations

import pytest

from dalipipe.storage.throughput import PeakRate

MB = 1 << 20


def test_nothing_is_known_at_first() -> None:
    assert PeakRate().bytes_per_s == 0


def test_requests_that_share_a_link_and_end_together_show_its_rate_not_a_burst() -> None:
    rate = PeakRate()
    for _ in range(16):
        rate.add(5.0, 5.64, 4 * MB)
    assert rate.bytes_per_s == pytest.approx(16 * 4 * MB / 0.64, rel=0.2)


def test_one_after_the_other_is_the_same_rate() -> None:
    rate = PeakRate()
    for number in range(100):
        rate.add(number * 0.04, (number + 1) * 0.04, 4 * MB)
    assert rate.bytes_per_s == pytest.approx(4 * MB / 0.04, rel=0.3)


def test_a_peak_fades_within_seconds_in_which_less_comes() -> None:
    rate = PeakRate()
    rate.add(0.0, 0.4, 40 * MB)
    peak = rate.bytes_per_s
    for number in range(4, 14):
        rate.add(number * 0.1, (number + 1) * 0.1, MB)
    assert 0.75 * peak <= rate.bytes_per_s <= 0.9 * peak
    for number in range(14, 400):
        rate.add(number * 0.1, (number + 1) * 0.1, MB)
    assert rate.bytes_per_s == pytest.approx(10 * MB, rel=0.5)


def test_a_request_longer_than_what_is_kept_counts_with_its_share() -> None:
    rate = PeakRate()
    rate.add(0.0, 100.0, 1000 * MB)
    assert rate.bytes_per_s == pytest.approx(10 * MB, rel=0.05)
