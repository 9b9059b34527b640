"""What a diagnosis says: the verdict, its kinds, and how its figures are written."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`kind` is one of KINDS; `sentence` says it, `evidence` why, `knob` what to do next."""

    kind: str
    sentence: str
    evidence: list[str] = field(default_factory=list)
    knob: str = ""


KINDS = (
    "healthy",
    "lake-bound",
    "pool-bound",
    "nvme-bound",
    "decode-bound",
    "hand-over-bound",
    "trainer-bound",
    "collective-bound",
    "straggler",
    "cache-thrash",
    "quarantine-storm",
    "double-caching",
    "num-threads",
    "queue-depth",
)


def percent(share: float) -> str:
    """A share for people."""
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds == float("inf"):
        return "more than 30 s"
    return f"{1000 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"
