"""Compiles the resize kernel into wheels and editable installs, with the C compiler of the host.

    python hatch_build.py [TARGET]     the library alone, beside its source

Without a compiler, or where it fails, the wheel is a pure one: everything works, the resize through torch.
CC names another compiler, CFLAGS adds to the flags, DALIPIPE_NATIVE=0 leaves the kernel out.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

_SOURCE = Path(__file__).parent / "dalipipe/graphs/resize.c"
_LIBRARY = "libresize.so"
# No -march=native: the wheel runs elsewhere, the kernel chooses its instructions when it is called. No contraction into
# fused multiply-adds, no -ffast-math: the weights are the same on every processor.
_FLAGS = ["-std=c99", "-O3", "-Wall", "-Wextra", "-ffp-contract=off", "-fPIC", "-shared"]
_TIMEOUT_S = 120


def build_library(target: Path) -> str:
    """Compiles into `target`, at once whole under its name. Returns why not, empty when it was built.

    Where it was not, nothing lies there: not the library of an earlier state of the source either.
    """
    reason = _compile(target)
    if reason:
        with contextlib.suppress(OSError):
            target.unlink(missing_ok=True)
    return reason


def _compile(target: Path) -> str:
    if os.environ.get("DALIPIPE_NATIVE") == "0":
        return "DALIPIPE_NATIVE=0"
    wanted = shlex.split(os.environ.get("CC", ""))
    compiler = wanted or next(([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), [])
    if not compiler:
        return "no C compiler (cc, gcc or clang) on the PATH"
    command = [*compiler, *_FLAGS, *shlex.split(os.environ.get("CFLAGS", "")), str(_SOURCE), "-o"]
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".resize-") as scratch:
            made = Path(scratch, _LIBRARY)
            words = [*command, str(made)]
            done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=_TIMEOUT_S)
            if done.returncode != 0:
                return f"{shlex.join(words)} failed: {done.stderr.strip()[:500]}"
            made.replace(target)  # a process that has the old one mapped keeps it
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{shlex.join([*command, str(target)])}: {error}"
    return ""


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # as a script it needs nothing
    BuildHookInterface = object


class NativeBuildHook(BuildHookInterface):  # type: ignore[misc]
    """Puts the library into the wheel, beside its source for an editable install, and the platform into the tag."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds. version: `standard` or `editable`."""
        if self.target_name != "wheel":
            return
        self._scratch = tempfile.TemporaryDirectory(prefix="dalipipe-build-")
        editable = version == "editable"
        target = _SOURCE.with_name(_LIBRARY) if editable else Path(self._scratch.name, _LIBRARY)
        reason = build_library(target)
        if reason:
            self.app.display_warning(f"dalipipe: the resize kernel was not built, torch's takes its place: {reason}")
            return
        if not editable:
            build_data["force_include"][str(target)] = f"dalipipe/graphs/{_LIBRARY}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Called by hatchling after it has built."""
        if self.target_name == "wheel":
            self._scratch.cleanup()


if __name__ == "__main__":
    problem = build_library(Path(sys.argv[1]) if len(sys.argv) > 1 else _SOURCE.with_name(_LIBRARY))
    sys.exit(f"hatch_build: {problem}" if problem else 0)
