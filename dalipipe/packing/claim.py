"""Who packs into a target: a note of the plan there, made before anything else is written.

A folder is also locked for as long as its pack lives, so what a killed pack left is told from one that is still at
work; elsewhere only the note tells, and whoever wants another plan says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from pathlib import Path

from dalipipe.errors import ObjectExistsError, ObjectNotFoundError, PackError, TargetExistsError
from dalipipe.filelocks import FileLock, wait_for
from dalipipe.packing.done import FOLDER
from dalipipe.storage.store import Store
from dalipipe.storage.url import FILE_SCHEMES, file_path, scheme_of

PLAN_NAME = f"{FOLDER}/plan.json"
LOCK_NAME = f"{FOLDER}/lock"
_WAIT_S = 1.0
_TRIES = 5


class Claim:
    """The right to write one plan's shards at a target, from `take` to `release`."""

    def __init__(self, store: Store, plan: str) -> None:
        self._store = store
        self._plan = plan
        self._lock: FileLock | None = None
        scheme = scheme_of(store.url)
        self._path: Path | None = None
        if scheme == "" or scheme in FILE_SCHEMES:
            self._path = Path(file_path(store.url) if scheme else store.url) / LOCK_NAME

    def take(self, *, overwrite: bool) -> bool:
        """Whether the target was anybody else's or nobody's; False where this plan had it and may go on.

        Raises:
            TargetExistsError: another pack is at work there, or may be (unless `overwrite`).
        """
        if self._path is not None:
            self._take_lock(self._path)
        for _ in range(_TRIES):
            noted = self._noted()
            if noted == self._plan:
                return False
            note = json.dumps({"plan": self._plan}).encode()
            if noted is not None:
                if self._path is None and not overwrite:
                    raise TargetExistsError(
                        f"the target {self._store.url} is taken by a pack of another source or configuration "
                        f"({_shown(noted)}, this one is plan {self._plan}), at work or broken off; choose another "
                        f"target, or, when it no longer runs, set pack.overwrite=true or remove {PLAN_NAME} there"
                    )
                self._store.put(PLAN_NAME, note)
                return True
            with contextlib.suppress(ObjectExistsError):  # somebody was faster: whose is it?
                self._store.put(PLAN_NAME, note, if_absent=True)
                return True
        raise TargetExistsError(f"packs come and go at the target {self._store.url}; choose another target")

    def check(self) -> None:
        """Raises PackError when another pack has taken the target over."""
        noted = self._noted()
        if noted != self._plan:
            raise PackError(
                f"the target {self._store.url} was taken over by another pack ({_shown(noted)}, this one is plan "
                f"{self._plan}); choose another target for one of the two"
            )

    def give_up(self) -> None:
        """Removes the note."""
        self._store.delete(PLAN_NAME)

    def release(self) -> None:
        """Gives the lock back; the note stays for whoever goes on. Idempotent."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _take_lock(self, path: Path) -> None:
        try:
            for _ in range(_TRIES):
                self._lock = wait_for(path, 0, fcntl.F_WRLCK, _WAIT_S)
                if self._lock is None:
                    break
                if self._lock.is_of(path):
                    return
                self.release()
        except OSError:  # a folder that cannot be written: the note fails too, and says which
            return
        raise TargetExistsError(
            f"another pack is at work in the target {self._store.url} ({_shown(self._noted())}, "
            f"this one is plan {self._plan}); wait until it has ended, end it, or choose another target. "
            "pack.overwrite=true takes over only what nobody works at"
        )

    def _noted(self) -> str | None:
        """The plan that is noted; "" where the note cannot be read, None where there is none."""
        try:
            noted = json.loads(bytes(self._store.read(PLAN_NAME)))
        except ObjectNotFoundError:
            return None
        except ValueError:
            return ""
        return str(noted.get("plan", "")) if isinstance(noted, dict) else ""


def _shown(noted: str | None) -> str:
    return "its plan is not noted" if noted is None else f"plan {noted or 'unreadable'}"
