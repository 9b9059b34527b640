"""Where many independent tasks run."""

from dalipipe.engines.cpus import default_workers
from dalipipe.engines.engine import Engine, TaskDone
from dalipipe.engines.local import LocalEngine

__all__ = ["Engine", "LocalEngine", "TaskDone", "default_workers"]
