"""The capacity rule, the choice of the policy, and rates as people write them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalipipe.cache.config import CacheConfig, MemoryConfig, PoolConfig, TierConfig, TiersConfig
from dalipipe.errors import ConfigError
from dalipipe.simulate.capacity import choose_policy, rule_bytes, step_time, tier_budgets
from dalipipe.simulate.config import PlanConfig


def test_the_node_cache_is_read_bandwidth_times_cover_time() -> None:
    plan = PlanConfig(gpu_read_rate="1.5GB", cover_s=180)
    assert rule_bytes(plan, 1.5e9, 8) == 8 * 1_500_000_000 * 180


@pytest.mark.parametrize(
    ("rate", "step_s"),
    [
        ("1MB", 256 * 100 / 1e6),
        ("1MB/s", 256 * 100 / 1e6),
        (1e6, 256 * 100 / 1e6),
        ("1e6", 256 * 100 / 1e6),
        ("2560 samples", 0.1),
        ("2560 samples/s", 0.1),
        ("1 sample", 256.0),
    ],
)
def test_a_read_rate_is_bytes_or_samples_a_second(rate: object, step_s: float) -> None:
    plan = PlanConfig(gpu_read_rate=rate)
    assert step_time(plan, batch_size=256, sample_bytes=100.0) == pytest.approx(step_s)


@pytest.mark.parametrize("told", [{"step_s": 1e-300}, {"gpu_read_rate": 1e300}])
def test_a_step_that_is_too_short_to_be_one_is_refused(told: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="shorter than any; check the unit"):
        step_time(PlanConfig(**told), batch_size=256, sample_bytes=100.0)


@pytest.mark.parametrize("rate", ["fast", "-1", 0, "0 samples", float("nan"), float("inf"), ""])
def test_what_is_no_read_rate_is_refused(rate: object) -> None:
    with pytest.raises(ConfigError, match=r"plan\.gpu_read_rate"):
        step_time(PlanConfig(gpu_read_rate=rate), batch_size=1, sample_bytes=1.0)


@pytest.mark.parametrize("step_s", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_step_time_is_refused(step_s: float) -> None:
    with pytest.raises(ConfigError, match=r"plan\.step_s"):
        step_time(PlanConfig(step_s=step_s), batch_size=1, sample_bytes=1.0)


def test_one_figure_of_speed_is_needed_and_one_is_enough() -> None:
    with pytest.raises(ConfigError, match=r"give plan\.step_s .*plan\.gpu_read_rate .*plan\.from"):
        step_time(PlanConfig(), batch_size=1, sample_bytes=1.0)
    with pytest.raises(ConfigError, match="give one of them"):
        step_time(PlanConfig(step_s=1.0, gpu_read_rate=5), batch_size=1, sample_bytes=1.0)
    assert step_time(PlanConfig(), batch_size=1, sample_bytes=1.0, measured_step_s=0.3) == 0.3
    assert step_time(PlanConfig(step_s=0.2), batch_size=1, sample_bytes=1.0, measured_step_s=0.3) == 0.2


def test_budgets_come_from_the_configuration_or_the_rule() -> None:
    def budgets(node: object, **how: object) -> dict[str, int]:
        tiers = TiersConfig(node=TierConfig(capacity=node), memory=MemoryConfig(capacity=how.get("memory", 0)))
        return tier_budgets(CacheConfig(tiers=tiers), PlanConfig(disk_bytes=how.get("disk", 0)), 1234)

    assert budgets(0.8) == {"node": 1234}
    assert budgets(0.8, disk="10TB") == {"node": 8 * 10**12}
    assert budgets("5GB", disk="10TB") == {"node": 5 * 10**9}
    assert budgets(0, memory="1GB") == {"memory": 10**9}
    assert list(budgets("2GB", memory="1GB")) == ["memory", "node"]
    with pytest.raises(ConfigError, match=r"memory\.capacity=0\.5: plan knows no host"):
        budgets(0.8, memory=0.5)
    with pytest.raises(ConfigError, match="does not simulate the pool"):
        tier_budgets(CacheConfig(tiers=TiersConfig(pool=PoolConfig(url="s3://near/pool"))), PlanConfig(), 1)


@pytest.mark.parametrize(
    ("cluster", "epochs", "policy", "says"),
    [
        (99, 0, "stream", "stream, do not buy disks"),
        (101, 0, "pin", "10% is read from the lake once, the rest in every epoch"),
        (2000, 0, "pin", "the lake is read once"),
        (2000, 1, "stream", "the data are read once: stream"),
    ],
)
def test_auto_streams_where_an_epoch_is_far_larger_than_all_caches(
    cluster: int, epochs: int, policy: str, says: str
) -> None:
    chosen, why = choose_policy("auto", cluster_bytes=cluster, dataset_bytes=1000, epochs=epochs)
    assert chosen == policy
    assert says in why


@given(share=st.floats(0.01, 0.99))
def test_what_lru_finds_is_said_beside_what_pin_finds(share: float) -> None:
    policy, why = choose_policy("lru", cluster_bytes=int(share * 10**9), dataset_bytes=10**9, epochs=0)
    assert policy == "lru"
    assert f"pin would find {share:.1%}" in why or abs(share * 1000 % 1 - 0.5) < 1e-3
    bound = share + (1 - share) * math.log(1 - share)
    assert f"lru {bound:.1%}" in why or abs(bound * 1000 % 1 - 0.5) < 1e-3


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cache\.policy='mru' is not available"):
        choose_policy("mru", cluster_bytes=1, dataset_bytes=1, epochs=0)
