"""What every room records into: plain counters and spans (standard library only)."""

from dalipipe.telemetry.recorder import Recorder, Stage

__all__ = ["Recorder", "Stage"]
