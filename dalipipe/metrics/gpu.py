"""The GPU's activity from NVML, where there is a driver."""

from __future__ import annotations

import contextlib
import importlib
import logging
from typing import Any

_log = logging.getLogger(__name__)


class GpuSampler:
    """Activity of one GPU since the last sample: `gpu_sm_active` and others, shares in [0, 1].

    SM activity comes from GPM (Hopper and newer; older ones: the DCGM exporter's DCGM_FI_PROF_SM_ACTIVE).
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._samples: list[Any] = []
        self._metrics = {
            "gpu_sm_active": (nvml.NVML_GPM_METRIC_SM_UTIL, 0.01),
            "gpu_pcie_rx": (nvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC, 2.0**20),
        }
        try:
            self._has_gpm = bool(nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)
        except nvml.NVMLError:
            self._has_gpm = False

    def sample(self) -> dict[str, float]:
        """The figures since the last call; those that the GPU does not have are left out."""
        nvml, figures = self._nvml, {}
        try:
            figures["gpu_utilization"] = nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100
            figures["gpu_memory_used"] = float(nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
        except nvml.NVMLError as error:
            _log.debug("NVML: %s", error)
        with contextlib.suppress(nvml.NVMLError):  # GPUs before Turing have no JPEG engine
            figures["gpu_jpeg"] = nvml.nvmlDeviceGetJpgUtilization(self._handle)[0] / 100
        if self._has_gpm:
            try:
                figures |= self._gpm()
            except nvml.NVMLError as error:
                _log.debug("NVML GPM: %s", error)
        return figures

    def close(self) -> None:
        """Frees the samples. Idempotent."""
        for sample in self._samples:
            self._nvml.nvmlGpmSampleFree(sample)
        self._samples.clear()

    def _gpm(self) -> dict[str, float]:
        nvml = self._nvml
        sample = nvml.nvmlGpmSampleAlloc()
        nvml.nvmlGpmSampleGet(self._handle, sample)
        self._samples.append(sample)
        if len(self._samples) < 2:
            return {}
        request = nvml.c_nvmlGpmMetricsGet_t()
        request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(self._metrics)
        request.sample1, request.sample2 = self._samples
        for place, (metric, _) in enumerate(self._metrics.values()):
            request.metrics[place].metricId = metric
        nvml.nvmlGpmMetricsGet(request)
        nvml.nvmlGpmSampleFree(self._samples.pop(0))
        return {
            name: request.metrics[place].value * unit
            for place, (name, (_, unit)) in enumerate(self._metrics.items())
            if request.metrics[place].nvmlReturn == 0
        }


def open_gpu_sampler(pci_bus_id: str, *, nvml: Any = None) -> GpuSampler | None:
    """A sampler of the GPU with that PCI address, or None without a driver, without nvidia-ml-py or without the GPU.

    The address, not the number: NVML does not know CUDA_VISIBLE_DEVICES.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return None
    try:
        nvml.nvmlInit()
        return GpuSampler(nvml, nvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id))
    except nvml.NVMLError as error:
        _log.info("no figures of the GPU: %s", error)
        return None
