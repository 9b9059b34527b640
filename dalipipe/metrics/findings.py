"""What is wrong with an environment: pure rules over the facts that `environment` collects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dalipipe.units import format_bytes

Facts = dict[str, dict[str, Any]]
"""Section to name to value, JSON-able; sections: host, packages, gpu, torch, memory, limits, cache.dir, data.url."""

_CUDA13_DRIVER = 580
_CUDA12_DRIVER = 525
_NETWORK_DISKS = ("nfs", "nfs4", "cifs", "ceph", "fuse", "lustre", "glusterfs", "beegfs", "gpfs", "9p", "virtiofs")
_LOW_FREE_BYTES = 10**9
_LOW_SHM_BYTES = 2**30
_LOW_MAPS = 65_530
_LOW_FILES = 4096

_Add = Callable[[str, str, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is wrong or will be: `level` is `error` (it cannot work) or `warning`."""

    level: str
    what: str
    remedy: str


def judge(facts: Facts) -> list[Finding]:
    """What is wrong with the facts, most severe first."""
    findings: list[Finding] = []

    def add(level: str, what: str, remedy: str) -> None:
        findings.append(Finding(level=level, what=what, remedy=remedy))

    for rule in (_judge_packages, _judge_gpu, _judge_memory, _judge_disk, _judge_lake):
        rule(facts, add)
    return sorted(findings, key=lambda finding: finding.level != "error")


def _judge_packages(facts: Facts, add: _Add) -> None:
    packages = facts["packages"]
    flavours = [name for name in ("nvidia-dali-cuda120", "nvidia-dali-cuda130") if name in packages]
    if not flavours:
        add("error", "NVIDIA DALI is not installed", "pip install 'dalipipe[cpu]', [cuda12] or [cuda13]")
    if len(flavours) == 2:
        add("error", "both flavours of DALI are installed and overwrite each other", f"pip uninstall {flavours[0]}")
    if "torch" not in packages:
        add("error", "torch is not installed", "pip install torch")
    driver = int(facts["gpu"].get("driver", "0").split(".")[0] or 0)
    if driver and "nvidia-dali-cuda130" in flavours and driver < _CUDA13_DRIVER:
        add("error", f"DALI for CUDA 13 needs driver {_CUDA13_DRIVER}, this host has {driver}", "use dalipipe[cuda12]")
    if driver and "nvidia-dali-cuda120" in flavours and driver < _CUDA12_DRIVER:
        add("error", f"DALI for CUDA 12 needs driver {_CUDA12_DRIVER}, this host has {driver}", "renew the driver")
    if facts["graphs"]["resize_kernel"] == "torch":
        add(
            "warning", "the resize kernel was not built: on a CPU images are resized by torch, which takes longer",
            "install the package again where there is a C compiler (cc, gcc or clang)",
        )  # fmt: skip
    cuda = facts["torch"].get("cuda") or ""
    if (
        flavours
        and cuda
        and len(flavours) == 1
        and cuda.split(".")[0] != flavours[0].removeprefix("nvidia-dali-cuda")[:2]
    ):
        add("warning", f"torch is built for CUDA {cuda}, DALI is {flavours[0]}", "one CUDA major is the safe choice")


def _judge_gpu(facts: Facts, add: _Add) -> None:
    gpu, torch = facts["gpu"], facts["torch"]
    if not gpu.get("driver"):
        return
    if torch.get("version") and not torch.get("cuda"):
        add("error", "the host has a GPU, but torch is a CPU build", "install a CUDA build of torch, then make setup")
    elif torch.get("available") is False:
        add("error", "the host has a GPU, but torch cannot use it", "look at CUDA_VISIBLE_DEVICES and the driver")
    if "nvml" in gpu:
        add("warning", f"NVML cannot be asked: {gpu['nvml']}", "pip install 'dalipipe[metrics]', or mend the driver")


def _judge_memory(facts: Facts, add: _Add) -> None:
    memory, limits = facts["memory"], facts["limits"]
    num_gpus = len(facts["gpu"].get("devices", []))
    if num_gpus > 1 and memory.get("shm_bytes", _LOW_SHM_BYTES) < _LOW_SHM_BYTES:
        shm = format_bytes(memory["shm_bytes"])
        add("warning", f"/dev/shm has {shm}, which NCCL with {num_gpus} GPUs outgrows", "run with --shm-size=8g")
    if 0 < limits.get("max_map_count", 0) < _LOW_MAPS:
        add("warning", f"vm.max_map_count is {limits['max_map_count']}", f"sysctl vm.max_map_count={_LOW_MAPS}")
    if 0 < limits.get("open_files", 0) < _LOW_FILES:
        add("warning", f"only {limits['open_files']} open files are allowed", f"ulimit -n {_LOW_FILES}")
    if num_gpus and facts["host"]["cpus"] < 2 * num_gpus:
        add("warning", f"{facts['host']['cpus']} CPUs for {num_gpus} GPUs", "decoding wants 3 to 8 CPUs a GPU")


def _judge_disk(facts: Facts, add: _Add) -> None:
    disk = facts.get("cache.dir", {})
    if "error" in disk:
        add("error", f"cache.dir={disk['path']} cannot be used: {disk['error']}", "choose another cache.dir")
        return
    kind = disk.get("file_system", "")
    if kind.split(".")[0] in _NETWORK_DISKS:
        add("warning", f"cache.dir={disk['path']} is on {kind}, a network disk", "put it on the node's own NVMe")
    if kind == "tmpfs":
        add("warning", f"cache.dir={disk['path']} is in memory (tmpfs)", "put it on the node's own NVMe")
    if kind == "overlay":
        add("warning", f"cache.dir={disk['path']} is the container's own layer", "mount a volume there")
    if disk and disk["free_bytes"] < _LOW_FREE_BYTES:
        add("warning", f"{format_bytes(disk['free_bytes'])} are free at cache.dir={disk['path']}", "make room")


def _judge_lake(facts: Facts, add: _Add) -> None:
    lake = facts.get("data.url", {})
    if "error" in lake:
        add("error", lake["error"], "see the message; credentials and endpoint are in the section environment")
