"""What a bug report needs: versions, GPUs, driver, memory, disks, the lake, and what is wrong with them.

`collect` asks the host; what follows from the answers is decided in `findings`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from dalipipe.engines.cpus import default_workers
from dalipipe.errors import DalipipeError
from dalipipe.graphs.native import load_native
from dalipipe.masking import masked
from dalipipe.metrics.findings import Facts, Finding, judge
from dalipipe.storage.open import open_store
from dalipipe.storage.store import StorageConfig
from dalipipe.units import format_bytes

_PACKAGES = (
    "dalipipe", "torch", "nvidia-dali-cuda120", "nvidia-dali-cuda130", "nvidia-nvimgcodec-cu12",
    "nvidia-nvimgcodec-cu13", "nvidia-nvjpeg-cu12", "nvidia-nvjpeg", "cupy-cuda12x", "cupy-cuda13x", "numpy", "pyarrow",
    "hydra-core", "omegaconf", "fsspec", "obstore", "xxhash", "zstandard", "pillow", "rich", "prometheus-client",
    "nvidia-ml-py", "ray", "grpcio", "s3fs", "gcsfs", "adlfs", "alluxiofs", "webdataset", "torchdata", "lightning",
    "accelerate", "transformers",
)  # fmt: skip
_VARIABLES = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT|OMP_NUM_THREADS|LD_LIBRARY_PATH"
    r"|LD_PRELOAD|PYTHONPATH|TMPDIR|S3_ENDPOINT_URL|(CUDA|NVIDIA|NCCL|DALI|DALIPIPE|TORCH|PYTORCH|AWS|SLURM_JOB)_.*)"
)
_SECRETS = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentReport:
    """Facts by section, JSON-able, and what follows from them."""

    facts: Facts
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """No finding is an error."""
        return all(finding.level != "error" for finding in self.findings)

    def text(self) -> str:
        """The report as people paste it into a bug report."""
        lines = []
        for section, entries in self.facts.items():
            lines.append(section)
            width = max((len(name) for name in entries), default=0)
            lines += [f"  {name.ljust(width)}  {_shown(name, value)}" for name, value in entries.items()]
        lines.append("findings")
        lines += [f"  {item.level}: {item.what}; {item.remedy}" for item in self.findings] or ["  none"]
        return "\n".join(lines)


def describe_environment(
    *,
    environ: Mapping[str, str],
    cache_dir: str = "",
    url: str = "",
    storage: StorageConfig | None = None,
    probe_torch: bool = True,
) -> EnvironmentReport:
    """Asks this host and judges the answers. Never raises for what it finds: that becomes a finding.

    Args:
        environ: the process's environment; values that look secret are not repeated.
        cache_dir: the folder of the node cache; url: of a data set, whose manifest is looked up; empty: not looked at.
        probe_torch: import torch (seconds) to hear whether it can use the GPU, instead of only reading its version.
    """
    facts = collect(environ=environ, cache_dir=cache_dir, url=url, storage=storage, probe_torch=probe_torch)
    return EnvironmentReport(facts=facts, findings=tuple(judge(facts)))


def collect(
    *,
    environ: Mapping[str, str],
    cache_dir: str = "",
    url: str = "",
    storage: StorageConfig | None = None,
    probe_torch: bool = True,
    root: Path = Path("/"),
) -> Facts:
    """The facts alone. root: where /proc, /sys and /dev lie, for tests."""
    facts: Facts = {
        "host": _host(root),
        "packages": {name: version for name in _PACKAGES if (version := installed_version(name))},
        "gpu": _gpus(root),
        "torch": _torch(probe_torch),
        "graphs": _graphs(),
        "memory": _memory(root),
        "limits": _limits(root),
    }
    if cache_dir:
        facts["cache.dir"] = _disk(Path(cache_dir), root)
    if url:
        facts["data.url"] = _lake(url, storage or StorageConfig())
    facts["environment"] = {
        name: "(set, not shown)" if _SECRETS.search(name) else masked(value)
        for name, value in sorted(environ.items())
        if _VARIABLES.fullmatch(name)
    }
    return facts


def _host(root: Path) -> dict[str, Any]:
    in_container = any((root / mark).exists() for mark in (".dockerenv", "run/.containerenv"))
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "distribution": _distribution(root),
        "libc": " ".join(platform.libc_ver()),
        "python": f"{platform.python_version()} ({sys.executable})",
        "processor": _first(root / "proc/cpuinfo", r"model name\s*:\s*(.+)"),
        "cpus": default_workers(root=root),
        "cpus_of_host": os.cpu_count() or 0,
        "container": "yes" if in_container else "no sign of one",
    }


def _distribution(root: Path) -> str:
    return _first(root / "etc/os-release", r'PRETTY_NAME="?([^"\n]+)')


def installed_version(package: str) -> str:
    """The version of an installed package; empty where it is not, as dalipipe itself in a bare checkout."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _gpus(root: Path) -> dict[str, Any]:
    """Driver and devices by NVML, else the driver from the kernel's own word."""
    driver = _first(root / "proc/driver/nvidia/version", r"Kernel Module.*?\s([0-9]+\.[0-9.]+)")
    facts: dict[str, Any] = {"driver": driver, "devices": []}
    try:
        import pynvml
    except ImportError:
        return facts | ({"nvml": "nvidia-ml-py is not installed"} if driver else {})
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return facts | ({"nvml": str(error)} if driver else {})
    try:
        facts["driver"] = _string(pynvml.nvmlSystemGetDriverVersion())
        version = pynvml.nvmlSystemGetCudaDriverVersion()
        facts["cuda_of_driver"] = f"{version // 1000}.{version % 1000 // 10}"
        for number in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(number)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            name = _string(pynvml.nvmlDeviceGetName(handle))
            facts["devices"].append(f"{number}: {name}, {format_bytes(memory.total)}, {format_bytes(memory.free)} free")
    except pynvml.NVMLError as error:
        facts["nvml"] = str(error)
    finally:
        pynvml.nvmlShutdown()
    return facts


def _string(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _graphs() -> dict[str, Any]:
    """Which kernel resizes images on the CPU."""
    native = load_native()
    return {"resize_kernel": "torch" if native is None else native.name}


def _torch(probe: bool) -> dict[str, Any]:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return {}
    if not probe:
        cuda = _first(
            Path(spec.submodule_search_locations[0], "version.py"), r"^cuda(?:\s*:[^=]*)?\s*=\s*['\"](.+)['\"]"
        )
        return {"version": installed_version("torch"), "cuda": cuda}
    import torch

    facts = {
        "version": torch.__version__,
        "cuda": torch.version.cuda or "",
        "available": torch.cuda.is_available(),
        "threads": torch.get_num_threads(),
    }
    if facts["available"]:
        with contextlib.suppress(RuntimeError, AttributeError):  # builds without one of them
            facts["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        capabilities = (torch.cuda.get_device_capability(n) for n in range(torch.cuda.device_count()))
        facts["capability"] = ", ".join(f"{major}.{minor}" for major, minor in capabilities)
    return facts


def _memory(root: Path) -> dict[str, Any]:
    info = root / "proc/meminfo"
    facts: dict[str, Any] = {
        "total_bytes": 1024 * int(_first(info, r"MemTotal:\s+(\d+)") or 0),
        "available_bytes": 1024 * int(_first(info, r"MemAvailable:\s+(\d+)") or 0),
        "huge_pages": int(_first(info, r"HugePages_Total:\s+(\d+)") or 0),
    }
    limit = _first(root / "sys/fs/cgroup/memory.max", r"(\d+)")
    if limit:
        facts["group_limit_bytes"] = int(limit)
    try:
        shm = os.statvfs(root / "dev/shm")
    except OSError:
        return facts
    return facts | {"shm_bytes": shm.f_blocks * shm.f_frsize, "shm_free_bytes": shm.f_bavail * shm.f_frsize}


def _limits(root: Path) -> dict[str, Any]:
    def soft(which: int) -> int:
        value = resource.getrlimit(which)[0]
        return -1 if value == resource.RLIM_INFINITY else value

    return {
        "open_files": soft(resource.RLIMIT_NOFILE),
        "locked_memory_bytes": soft(resource.RLIMIT_MEMLOCK),
        "max_map_count": int(_first(root / "proc/sys/vm/max_map_count", r"(\d+)") or 0),
    }


def _disk(folder: Path, root: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {"path": str(folder)}
    there = folder.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        room = os.statvfs(there)
    except OSError as error:
        return facts | {"error": error.strerror or str(error)}
    facts |= {
        "file_system": _file_system(there, root),
        "total_bytes": room.f_blocks * room.f_frsize,
        "free_bytes": room.f_bavail * room.f_frsize,
    }
    if not there.is_dir():
        return facts | {"error": f"{there} is not a folder"}
    if not os.access(there, os.W_OK | os.X_OK):
        return facts | {"error": f"no permission to write in {there}"}
    try:
        os.close(os.open(there, os.O_TMPFILE | os.O_WRONLY, 0o600))
        facts["nameless_files"] = True
    except OSError as error:
        facts["nameless_files"] = False
        if not room.f_flag & os.ST_RDONLY:
            return facts
        return facts | {"error": error.strerror or str(error)}
    return facts


def _file_system(folder: Path, root: Path) -> str:
    """The type of the mount that holds `folder`: of the longest mount point above it, the last one mounted."""
    best, kind = "", "unknown"
    try:
        lines = (root / "proc/self/mounts").read_text().splitlines()
    except OSError:
        return kind
    resolved = f"{folder.resolve()}/".replace("//", "/")
    for line in lines:
        point = line.split()[1].replace("\\040", " ").rstrip("/") + "/"
        if resolved.startswith(point) and len(point) >= len(best):
            best, kind = point, line.split()[2]
    return kind


def _lake(url: str, storage: StorageConfig) -> dict[str, Any]:
    """Looks the manifest up once; secrets in the URL are not repeated."""
    facts: dict[str, Any] = {"url": masked(url)}
    try:
        store = open_store(url, storage)
        try:
            began = time.perf_counter()
            found = store.head("manifest.json")
            return facts | {"manifest_bytes": found.num_bytes, "look_up_s": round(time.perf_counter() - began, 4)}
        finally:
            store.close()
    except DalipipeError as error:
        return facts | {"error": str(error)}


def _first(path: Path, pattern: str) -> str:
    """The first group of the first match in a small text file; empty where there is none."""
    try:
        match = re.search(pattern, path.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return ""
    return match[1].strip() if match else ""


def _shown(name: str, value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "none"
    if name.endswith("_bytes"):
        return "unlimited" if value < 0 else format_bytes(value)
    return str(value) if value != "" else "none"
