"""What a target holds before, while and after it is packed into."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass

from dalipipe.errors import ManifestError, ObjectNotFoundError, TargetExistsError
from dalipipe.packing.claim import LOCK_NAME, PLAN_NAME, Claim
from dalipipe.packing.done import FOLDER, ShardDone, decode_done, record_name
from dalipipe.shards.header import HEADER_NAME, SHARDS_NAME
from dalipipe.shards.manifest import Manifest
from dalipipe.storage.store import Store

QUARANTINE_NAME = "quarantine.jsonl"
DUPLICATES_NAME = "duplicates.jsonl"

_OURS = re.compile(
    rf"(group-\d{{3,}}/)?shard-\d{{6,}}\.tar(\.idx)?|{re.escape(SHARDS_NAME)}|{re.escape(QUARANTINE_NAME)}|"
    rf"{re.escape(DUPLICATES_NAME)}|{re.escape(FOLDER)}/.+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBefore:
    """A whole data set that the same plan made earlier."""

    manifest: Manifest
    num_quarantined: int


class Target:
    """The place that is packed into. Touches only names that packing writes itself, never other files."""

    def __init__(self, store: Store, plan: str, *, drop_corrupt: bool) -> None:
        self.store = store
        self._plan = plan
        self._drop_corrupt = drop_corrupt
        self._claim = Claim(store, plan)
        self._look()

    def _look(self) -> None:
        self._found: dict[str, int] = {}
        # A bucket that appears with its first object is empty until then; one that must be made is missed at the write.
        with contextlib.suppress(ObjectNotFoundError):
            self._found = {info.key: info.num_bytes for info in self.store.list()}

    def packed_before(self, *, overwrite: bool) -> PackedBefore | None:
        """The data set that lies there, if this plan made it and all its files have their sizes.

        Raises:
            TargetExistsError: another data set, or tars that dalipipe did not write, lie there (unless `overwrite`).
        """
        if HEADER_NAME not in self._found:
            foreign = (
                []
                if PLAN_NAME in self._found
                else [key for key in self._found if re.match(r"(group-\d+/)?shard-\d+\.tar$", key)]
            )
            if foreign and not overwrite:
                raise TargetExistsError(
                    f"the target {self.store.url} holds {len(foreign)} tars without a manifest (such as {foreign[0]}) "
                    "that packing would replace; choose another target, or set pack.overwrite=true"
                )
            return None
        try:
            manifest = Manifest.open(self.store.read)
        except ManifestError as error:
            if overwrite:
                return None
            raise TargetExistsError(
                f"the target {self.store.url} holds a damaged data set ({error}); choose another target, "
                "or set pack.overwrite=true to replace it"
            ) from error
        num_quarantined = int(manifest.made_by.get("quarantined", "0"))
        same = manifest.made_by.get("plan") == self._plan and (self._drop_corrupt or not num_quarantined)
        if same:
            return PackedBefore(manifest=manifest, num_quarantined=num_quarantined) if self._whole(manifest) else None
        if not overwrite:
            raise TargetExistsError(
                f"the target {self.store.url} already holds a data set ({manifest.num_samples} samples, identity "
                f"{manifest.identity}) of another source or configuration; choose another target, or set "
                "pack.overwrite=true to replace it"
            )
        return None

    def begin(self, *, overwrite: bool) -> None:
        """Makes the target ready: taken by this plan, no manifest, and nothing of another plan.

        Raises:
            TargetExistsError: another pack is at work there, or has just ended.
        """
        fresh = self._claim.take(overwrite=overwrite)
        had_manifest = HEADER_NAME in self._found
        self._look()
        if not had_manifest and HEADER_NAME in self._found:
            try:
                self.packed_before(overwrite=overwrite)
            except TargetExistsError:
                if fresh:
                    self._claim.give_up()
                raise
        self.store.delete(HEADER_NAME)
        if fresh:
            for key in self._found:
                if _OURS.fullmatch(key) and key not in (PLAN_NAME, LOCK_NAME):
                    self.store.delete(key)
            self._found = {}

    def check(self) -> None:
        """Raises PackError when another pack has taken the target over."""
        self._claim.check()

    def close(self) -> None:
        """Lets others pack into the target. Idempotent."""
        self._claim.release()

    def done(self, shard: str) -> ShardDone | None:
        """The record of a shard that is written already and belongs to this plan."""
        if record_name(shard) not in self._found:
            return None
        done = decode_done(self.store.read(record_name(shard)))
        if done is None or done.plan != self._plan or (done.quarantined and not self._drop_corrupt):
            return None
        whole = not done.rows.num_samples or self._found.get(shard) == done.num_bytes
        return done if whole else None

    def finish(self, shards: set[str]) -> None:
        """Removes what is of no more use once the manifest of `shards` is written; also after a kill just then."""
        keep = {
            HEADER_NAME,
            SHARDS_NAME,
            QUARANTINE_NAME,
            DUPLICATES_NAME,
            *shards,
            *(f"{name}.idx" for name in shards),
        }
        found = [info.key for info in self.store.list()]
        for key in sorted(found, key=lambda name: (name == LOCK_NAME, name == PLAN_NAME)):
            if key not in keep and _OURS.fullmatch(key):
                self.store.delete(key)

    def _whole(self, manifest: Manifest) -> bool:
        shards = map(manifest.shard, range(manifest.num_shards))
        return all(self._found.get(s.name) == s.num_bytes and s.index_name in self._found for s in shards)
