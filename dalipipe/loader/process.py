"""Where a loader may be iterated: in the process that opened it, and in no worker of a DataLoader."""

from __future__ import annotations

import os

from dalipipe.errors import ConfigError


def check_process(opened_by: int) -> None:
    """Refuses a process that would deliver the batches a second time, or decode after a fork.

    Args:
        opened_by: the process that opened the loader.

    Raises:
        ConfigError: this is a worker of a `torch.utils.data.DataLoader`, or a forked copy of the loader's process.
    """
    from torch.utils.data import get_worker_info

    worker = get_worker_info()
    if worker is not None:
        raise ConfigError(
            f"the loader is iterated in worker {worker.id} of {worker.num_workers} of a DataLoader: each worker would "
            "deliver every batch again, and a rank's share is already its own. Iterate over the loader itself, without "
            "a DataLoader (or with num_workers=0)"
        )
    if os.getpid() != opened_by:
        raise ConfigError(
            f"the loader was opened by process {opened_by} and is iterated by its fork {os.getpid()}, which has none "
            "of its threads: open it in the process that trains"
        )
