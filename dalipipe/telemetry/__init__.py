"""What every room records into: plain counters, spans, and the ledger of steps (standard library only)."""

from dalipipe.telemetry.causes import Causes
from dalipipe.telemetry.phases import step
from dalipipe.telemetry.recorder import LATENCY_BOUNDS_S, Recorder, Stage
from dalipipe.telemetry.steps import StepBook, StepRow

__all__ = ["LATENCY_BOUNDS_S", "Causes", "Recorder", "Stage", "StepBook", "StepRow", "step"]
