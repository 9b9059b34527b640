from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dalipipe.prefetch.depth import MAX_DEPTH, MIN_DEPTH, DepthController


def stall(controller: DepthController) -> None:
    controller.delivered(waited_s=0.5, interval_s=1.0)


def quiet(controller: DepthController, num_steps: int) -> None:
    for _ in range(num_steps):
        controller.delivered(waited_s=0.01, interval_s=1.0)


def test_it_starts_at_three_and_grows_by_half_with_each_stall_that_it_could_have_helped() -> None:
    controller = DepthController()
    depths = [controller.depth]
    for _ in range(8):
        stall(controller)
        depths.append(controller.depth)
    # 3 -> 5 at once, and again only when the three steps that were under way have passed.
    assert depths == [3, 5, 5, 5, 8, 8, 8, 8, 8]


def test_it_shrinks_only_after_a_hundred_quiet_steps() -> None:
    controller = DepthController()
    for _ in range(40):
        stall(controller)
    deep = controller.depth
    quiet(controller, 99)
    assert controller.depth == deep
    quiet(controller, 1)
    assert controller.depth == deep - (deep - MIN_DEPTH) // 4
    quiet(controller, 10_000)
    assert controller.depth == MIN_DEPTH


def test_a_wait_below_two_percent_is_no_stall() -> None:
    controller = DepthController()
    quiet(controller, 50)
    assert controller.depth == 3


def test_the_floor_covers_the_lumps_of_demand() -> None:
    controller = DepthController()
    controller.expect(period=16)
    assert controller.depth == 18
    quiet(controller, 5000)
    assert controller.depth == 18


def test_the_floor_covers_the_tail_of_the_latency() -> None:
    controller = DepthController()
    for _ in range(300):
        controller.fetched(0.5)
        controller.delivered(waited_s=0.0, interval_s=0.1)
    # 0.5 s are five steps; one more, and a bucket of the histogram.
    assert 6 <= controller.depth <= 7
    for _ in range(3000):
        controller.fetched(0.05)
        controller.delivered(waited_s=0.0, interval_s=0.1)
    assert controller.depth == MIN_DEPTH


def test_the_fast_first_steps_that_fill_the_queues_do_not_blow_it_up() -> None:
    controller = DepthController()
    for _ in range(30):
        controller.fetched(0.2)
    for _ in range(6):
        controller.delivered(waited_s=0.0, interval_s=0.0001)
    quiet(controller, 60)
    assert controller.depth <= 4


def test_a_store_that_slows_and_recovers_takes_the_depth_up_and_down() -> None:
    controller = DepthController()
    quiet(controller, 200)
    before = controller.depth
    for _ in range(40):
        controller.fetched(4.0)
        stall(controller)
    peak = controller.depth
    assert peak >= 4 * before
    for _ in range(5000):
        controller.fetched(0.1)
        quiet(controller, 1)
    assert controller.depth == before


def test_a_fixed_depth_stays() -> None:
    controller = DepthController(7)
    controller.expect(period=40)
    for _ in range(20):
        controller.fetched(9.0)
        stall(controller)
    quiet(controller, 500)
    assert controller.depth == 7


@given(waits=st.lists(st.floats(0, 10), max_size=400), fetches=st.lists(st.floats(0, 100), max_size=50))
def test_it_stays_within_its_bounds(waits: list[float], fetches: list[float]) -> None:
    controller = DepthController()
    for latency_s in fetches:
        controller.fetched(latency_s)
    for waited_s in waits:
        controller.delivered(waited_s, 1.0)
        assert MIN_DEPTH <= controller.depth <= MAX_DEPTH
