"""NVML without a GPU: a stand-in for the library shows what is asked and what comes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dalipipe.metrics.gpu import open_gpu_sampler


class FakeNvml:
    """As much of pynvml as the sampler calls; `broken` names what raises."""

    NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRIC_PCIE_RX_PER_SEC, NVML_GPM_METRICS_GET_VERSION = 2, 71, 1

    class NVMLError(Exception):
        pass

    def __init__(self, *broken: str) -> None:
        self.broken = broken
        self.freed = 0
        self.samples = 0

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetHandleByPciBusId": lambda address: address,
            "nvmlGpmQueryDeviceSupport": lambda handle: SimpleNamespace(isSupportedDevice=1),
            "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=100),
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=2**30),
            "nvmlDeviceGetJpgUtilization": lambda handle: (40, 1000),
            "nvmlGpmSampleGet": lambda handle, sample: None,
            "nvmlGpmSampleAlloc": self._alloc,
            "nvmlGpmSampleFree": self._free,
            "nvmlGpmMetricsGet": self._metrics,
            "c_nvmlGpmMetricsGet_t": lambda: SimpleNamespace(
                metrics=[SimpleNamespace(value=0.0, nvmlReturn=1) for _ in range(4)]
            ),
        }
        if name in self.broken:
            raise_error = self.NVMLError

            def broken(*args: Any) -> None:
                raise raise_error(name)

            return broken
        return answers[name]

    def _alloc(self) -> int:
        self.samples += 1
        return self.samples

    def _free(self, sample: int) -> None:
        self.freed += 1

    def _metrics(self, request: Any) -> None:
        for entry in request.metrics[: request.numMetrics]:
            entry.nvmlReturn = 0
            entry.value = 87.5 if entry.metricId == self.NVML_GPM_METRIC_SM_UTIL else 3.0


def test_shares_and_bytes_since_the_last_sample() -> None:
    nvml = FakeNvml()
    sampler = open_gpu_sampler("0000:01:00.0", nvml=nvml)
    assert sampler is not None
    assert "gpu_sm_active" not in sampler.sample()  # GPM compares two samples
    second = sampler.sample()
    assert second == {
        "gpu_utilization": 1.0,
        "gpu_memory_used": 2**30,
        "gpu_jpeg": 0.4,
        "gpu_sm_active": 0.875,
        "gpu_pcie_rx": 3 * 2**20,
    }
    sampler.close()
    assert nvml.freed == nvml.samples


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetHandleByPciBusId"])
def test_without_a_driver_there_is_no_sampler(broken: str) -> None:
    assert open_gpu_sampler("0000:01:00.0", nvml=FakeNvml(broken)) is None


def test_a_gpu_without_gpm_gives_the_rest() -> None:
    sampler = open_gpu_sampler("x", nvml=FakeNvml("nvmlGpmQueryDeviceSupport", "nvmlDeviceGetJpgUtilization"))
    assert sampler is not None
    assert set(sampler.sample()) == {"gpu_utilization", "gpu_memory_used"}


def test_this_host_has_no_driver_or_answers() -> None:
    sampler = open_gpu_sampler("ffff:ff:ff.0")  # no such GPU anywhere
    assert sampler is None
