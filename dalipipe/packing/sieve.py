"""Which members of a foreign tar can be part of a sample, and what becomes of all others: none goes uncounted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from dalipipe.shards.tar import BEHIND_THE_END, Passed, TarMember
from dalipipe.shards.webdataset import split_name, why_no_part

LEADS_OUT = "leads out of its folder (absolute, or '..')"


class Sieve:
    """Passes on the members of one tar that belong to samples.

    Attributes:
        counts: members that are no part of the data, by reason.
        lost: (name, reason) of members that would be data, but whose content cannot be had.
        ended: whether the tar has an end; where it has none it may have been cut between two members.
    """

    def __init__(self, dots: str, *, in_place: bool) -> None:
        """in_place: a hard link is lost, since it has no content beside the rest of its sample."""
        self._dots = dots
        self._in_place = in_place
        self._by_name: dict[str, TarMember] = {}
        self.counts: Counter[str] = Counter()
        self.lost: list[tuple[str, str]] = []
        self.ended = True

    def __call__(self, entries: Iterable[TarMember | Passed]) -> Iterator[TarMember]:
        """The members that belong to samples, hard links with the content of the member that they name.

        Raises:
            IntegrityError: a name leads out of its folder, and it is to be read in place.
        """
        for entry in entries:
            if isinstance(entry, Passed) and entry.kind == "no end":
                self.ended = False
                continue
            member = entry if isinstance(entry, TarMember) else self._passed(entry)
            if member is None:
                continue
            if not self._in_place:
                if _leads_out(member.name):
                    self.lost.append((member.name, LEADS_OUT))
                    continue
                self._by_name[_plain(member.name)] = member
            if split_name(member.name, self._dots) is None:
                self.counts[why_no_part(member.name)] += 1
            else:
                yield member

    def _passed(self, entry: Passed) -> TarMember | None:
        if entry.kind not in ("hard link", "sparse") or (
            not _leads_out(entry.name) and split_name(entry.name, self._dots) is None
        ):
            self.counts[entry.kind] += 1
            return None
        if entry.kind == "sparse":
            self.lost.append((entry.name, "is stored sparse (with holes left out), which is not read"))
        elif self._in_place:
            self.lost.append((entry.name, f"is a hard link to {entry.link!r} and holds nothing itself"))
        elif _plain(entry.link) not in self._by_name:
            self.lost.append((entry.name, f"is a hard link to {entry.link!r}, which no member before it is"))
        else:
            return replace(self._by_name[_plain(entry.link)], name=entry.name)
        return None


def behind_the_end(url: str, counts: Mapping[str, Mapping[str, int]]) -> str:
    """What to say about tars that hold more behind their end; nothing where none does.

    Args:
        counts: by tar, its members that are no data, by reason.
    """
    found = {key: reasons[BEHIND_THE_END] for key, reasons in counts.items() if reasons.get(BEHIND_THE_END)}
    if not found:
        return ""
    key = next(iter(found))
    return (
        f"{sum(found.values())} members of {len(found)} tars of {url} ({found[key]} of {key}) stand behind the zeros "
        "that end a tar, as in tars that were joined by `cat`: they are left out, as by other readers; join tars by "
        "`tar --concatenate`, or unpack these with `tar --ignore-zeros` and pack the files"
    )


def no_end(url: str, keys: Sequence[str]) -> str:
    """What to say about tars under `url` that have no end."""
    return (
        f"{len(keys)} tars of {url} (such as {keys[0]}) stop without the zeros that end a tar: some tools write none, "
        "but a copy that was cut between two members looks the same; compare their sizes with where they come from"
    )


def _leads_out(name: str) -> bool:
    return name.startswith("/") or ".." in name.split("/")


def _plain(name: str) -> str:
    return "/".join(part for part in name.split("/") if part not in ("", "."))
