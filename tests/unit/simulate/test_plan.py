"""The answer as a whole: inputs that fit, inputs that do not, and advice."""

from __future__ import annotations

from typing import Any

import pytest

from dalipipe.cache.config import CacheConfig, TierConfig, TiersConfig
from dalipipe.errors import ConfigError
from dalipipe.loader.config import LoaderConfig
from dalipipe.order.config import ShuffleConfig
from dalipipe.prefetch.config import PrefetchConfig
from dalipipe.shards.shape import DataShape
from dalipipe.simulate.config import PlanConfig
from dalipipe.simulate.dataset import declared_shape
from dalipipe.simulate.plan import Plan, Settings, gpu_counts, make_plan, num_nodes
from dalipipe.storage.store import StorageConfig

SHAPE = DataShape(num_samples=4096, block_samples=8, num_bytes=40_960_000)
GIGA = 10**9


def plan_of(
    num_gpus: int = 1, *, shape: DataShape = SHAPE, prices: dict[str, float] | None = None, **parts: Any
) -> Plan:
    """A plan with a step of 0.1 s and batches of 8, unless said otherwise."""
    plan = {"step_s": 0.1, "latency_s": 0.0, **parts.pop("plan", {})}
    settings = Settings(plan=PlanConfig(**plan), **{"loader": LoaderConfig(batch_size=8), **parts})
    return make_plan(settings, shape, num_gpus, prices or {})


def cache(policy: str = "auto", node: object = 0.8) -> CacheConfig:
    return CacheConfig(policy=policy, tiers=TiersConfig(node=TierConfig(capacity=node)))


def test_a_plan_has_what_was_asked_for() -> None:
    made = plan_of(prices={"gpu_hour": 3.0}, plan={"cover_s": 100}, cache=cache(node=20_480_000))
    told = made.to_json()
    assert told["node_cache_bytes"] == 8 * 10_000 * 10 * 100
    assert told["cache_bytes"] == 20_480_000
    assert told["policy"] == "pin"
    assert 0.99 < told["au"] <= 1.0
    assert told["hit_ratio"] == pytest.approx(0.5, abs=0.05)
    assert 0.3 * SHAPE.num_bytes < told["lake_bytes_per_epoch"] < 0.55 * SHAPE.num_bytes
    assert told["lake_bytes_first_epoch"] == SHAPE.num_bytes
    assert told["steps_per_epoch"] == 512
    assert told["cost"]["gpu_hours"] == pytest.approx(told["epoch_s"] / 3600)
    assert told["stalls"]["per_epoch"].keys() == told["stalls"]["first_epoch"].keys()
    assert "is read from the lake once" in told["advice"][0]


def test_an_epoch_far_larger_than_all_caches_is_streamed() -> None:
    shape = DataShape(num_samples=10**8, block_samples=8, num_bytes=10**13)
    made = plan_of(shape=shape, cache=cache(node=10 * GIGA), plan={"steps": 40}, shuffle=ShuffleConfig(window="100MB"))
    assert made.job.policy == "stream"
    assert made.advice[0].endswith("stream, do not buy disks")
    assert made.outcome.later.lake_bytes == pytest.approx(10**13, rel=1e-3)
    assert made.cache_bytes == 0
    assert made.node_cache_bytes > 0


def test_money_is_stall_share_times_gpus_hours_and_price() -> None:
    rate = round(0.5 * 8 * 10_000 / 0.1)
    made = plan_of(cache=cache("stream"), plan={"lake_bandwidth": rate}, prices={"gpu_hour": 2.0, "egress_gb": 0.1})
    later, bill = made.outcome.later, made.bill
    assert bill.money_lost == pytest.approx(2.0 * (1 - later.au) * later.wall_s / 3600)
    assert bill.data_money_per_day == pytest.approx(later.lake_bytes / 1e9 * 0.1 / (later.wall_s / 86_400))
    assert any("the lake, which gives" in sentence for sentence in made.advice)


def test_shared_lanes_are_said() -> None:
    made = plan_of(
        16, shape=DataShape(num_samples=10**5, block_samples=8, num_bytes=10**9), shuffle=ShuffleConfig(lanes=4)
    )
    assert any("set shuffle.lanes=16" in sentence for sentence in made.advice)


def test_what_bounds_is_named() -> None:
    decoding = plan_of(plan={"decode_s": 0.3})
    assert any("decoding a batch takes 0.3 s" in sentence for sentence in decoding.advice)
    disk = plan_of(plan={"disk_bandwidth": 400_000}, cache=cache("pin", "1GB"))
    assert any("from its disk, which gives 400.0 kB/s" in sentence for sentence in disk.advice)
    link = plan_of(storage=StorageConfig(bandwidth=400_000), cache=cache("stream"))
    assert any("storage.bandwidth is 400.0 kB/s" in sentence for sentence in link.advice)
    late = plan_of(
        plan={"latency_s": 2.0, "latency_p99_s": 20.0}, cache=cache("stream"), prefetch=PrefetchConfig(depth=2)
    )
    assert any("raise prefetch.depth" in sentence for sentence in late.advice)
    cold = plan_of(plan={"lake_bandwidth": 400_000}, cache=cache("pin", "1GB"))
    assert any("cache warm" in sentence for sentence in cold.advice)


@pytest.mark.parametrize(
    ("gpus", "per_node", "found"), [(None, 8, [8]), (3, 8, [3]), ([8, 64, 512], 8, [8, 64, 512]), (8192, 4, [8192])]
)
def test_numbers_of_gpus(gpus: object, per_node: int, found: list[int]) -> None:
    assert gpu_counts(PlanConfig(gpus=gpus, gpus_per_node=per_node)) == found


def test_nodes_are_whole_but_for_a_single_one() -> None:
    plan = PlanConfig(gpus_per_node=8)
    assert [num_nodes(plan, gpus) for gpus in (1, 8, 16, 8192)] == [1, 1, 2, 1024]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"gpus": 0}, r"plan\.gpus=0 must be from 1"),
        ({"gpus": -8}, r"plan\.gpus=-8 must be from 1"),
        ({"gpus": 12}, r"no whole nodes of plan\.gpus_per_node=8; nearest: 8 or 16"),
        ({"gpus": [8, 20]}, r"nearest: 16 or 24"),
        ({"gpus": []}, r"plan\.gpus=\[\] names no number"),
        ({"gpus": "many"}, r"plan\.gpus='many' must be a number of GPUs, or a list"),
        ({"gpus": [8, 1.5]}, "must be a number of GPUs, or a list"),
        ({"gpus": True}, "must be a number of GPUs, or a list"),
        ({"gpus": 1 << 30}, "must be from 1 to 1,048,576"),
        ({"gpus_per_node": 0}, r"plan\.gpus_per_node=0 must be at least 1"),
    ],
)
def test_numbers_of_gpus_that_cannot_be(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        gpu_counts(PlanConfig(**keys))


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"plan": {"cover_s": -1}}, r"plan\.cover_s=-1"),
        ({"plan": {"decode_s": -0.1}}, r"plan\.decode_s=-0\.1 must be at least 0"),
        ({"plan": {"latency_s": -1}}, r"plan\.latency_s=-1"),
        ({"plan": {"latency_s": 1, "latency_p99_s": 0.5}}, r"plan\.latency_p99_s=0\.5 must be at least the median"),
        ({"plan": {"lake_bandwidth": 0}}, r"plan\.lake_bandwidth=0 must be more than 0"),
        ({"plan": {"disk_bandwidth": "slow"}}, r"plan\.disk_bandwidth='slow' is not a size"),
        ({"plan": {"steps": -1}}, r"plan\.steps=-1"),
        ({"plan": {"epochs": -1}}, r"plan\.epochs=-1"),
        ({"loader": LoaderConfig(batch_size=0)}, r"loader\.batch_size=0 must be at least 1"),
        ({"loader": LoaderConfig(batch_size=1, global_batch_size=1)}, "give one of loader.batch_size"),
        ({"loader": LoaderConfig(batch_size=5000)}, "do not fill one global batch"),
        ({"loader": LoaderConfig(batch_size=8, replicas=2)}, r"loader\.replicas=2 must divide plan\.gpus=1"),
        ({"prefetch": PrefetchConfig(depth="deep")}, r"prefetch\.depth='deep'"),
        ({"prefetch": PrefetchConfig(threads=0)}, r"prefetch\.threads=0"),
        ({"prefetch": PrefetchConfig(whole_epoch=True)}, r"prefetch\.whole_epoch=true is not simulated"),
        ({"prefetch": PrefetchConfig(memory_cap=0.5)}, r"prefetch\.memory_cap=0\.5: plan knows no host"),
        ({"prefetch": PrefetchConfig(cold_steps="some")}, r"prefetch\.cold_steps='some'"),
        ({"shuffle": ShuffleConfig(lanes=3)}, r"shuffle\.lanes=3 must divide the global batch"),
        ({"cache": cache("best")}, r"cache\.policy='best'"),
        ({"storage": StorageConfig(bandwidth=0)}, r"storage\.bandwidth=0"),
    ],
)
def test_what_cannot_be_simulated_is_refused(parts: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_of(**parts)


def test_a_global_batch_is_shared_out() -> None:
    assert plan_of(4, loader=LoaderConfig(global_batch_size=64)).job.batch_size == 16
    with pytest.raises(ConfigError, match=r"loader\.global_batch_size=66 must divide by the 4 ranks .*nearest: 64"):
        plan_of(4, loader=LoaderConfig(global_batch_size=66))


def test_a_data_set_that_is_not_packed_yet_is_cut_as_pack_would() -> None:
    shape = declared_shape(PlanConfig(samples=1_281_167, sample_bytes="110kB"))
    assert shape == DataShape(num_samples=1_281_167, block_samples=38, num_bytes=1_281_167 * 110_000)
    assert declared_shape(PlanConfig()) is None
    assert declared_shape(PlanConfig(samples=3, sample_bytes=5)) is not None
    for keys in ({"samples": 5}, {"sample_bytes": 5}, {"samples": -1, "sample_bytes": 5}):
        with pytest.raises(ConfigError, match=r"plan\.samples"):
            declared_shape(PlanConfig(**keys))
    with pytest.raises(ConfigError, match=r"plan\.shard_bytes"):
        declared_shape(PlanConfig(samples=5, sample_bytes=5, shard_bytes=0))


def test_an_unknown_field_of_the_configuration_is_refused() -> None:
    with pytest.raises(TypeError, match="no field 'gpu'"):
        PlanConfig(gpu=3)
    assert PlanConfig(**{"from": "runs/7"}).run == "runs/7"
