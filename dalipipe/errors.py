"""One tree of typed errors.

Every error is also the builtin that a caller would catch, and its message says what was being done, to which shard,
key or URL, what was found, and what to do about it. `exit_code` is what the command line returns: 2 for wrong usage
(a configuration that can never work), 1 for everything that the data or the world did.
"""

from __future__ import annotations

from dalipipe.masking import masked


class DalipipeError(Exception):
    """Base of everything that dalipipe raises on purpose. Its message shows no secret of a URL; see `masked`."""

    exit_code = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*(masked(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(DalipipeError, ValueError):
    """A configuration value or combination that can never work; names the key, the value and the valid ones."""

    exit_code = 2


class DependencyError(DalipipeError, ImportError):
    """An optional package is missing; names the extra that brings it."""

    exit_code = 2


class StorageError(DalipipeError, OSError):
    """A read or write at a URL failed for good (after retries)."""


class ObjectNotFoundError(StorageError, FileNotFoundError):
    """The object does not exist."""


class ObjectExistsError(StorageError, FileExistsError):
    """A `put(if_absent=True)` found the object already there."""


class AccessDeniedError(StorageError, PermissionError):
    """The store or the file system refused access."""


class StorageTimeoutError(StorageError, TimeoutError):
    """A request passed its deadline, retries included."""


class NoSpaceError(StorageError):
    """The target is out of space (ENOSPC or a quota)."""


class DataError(DalipipeError):
    """The data set is not what it must be."""


class ManifestError(DataError, ValueError):
    """A manifest or index is missing, torn, of another version, or contradicts itself."""


class IntegrityError(DataError, ValueError):
    """Bytes do not match the digest or size that the manifest states; names URL and byte range."""


class CorruptSampleError(DataError, ValueError):
    """A sample cannot be decoded; names key, shard and reason."""


class QuarantineError(DataError):
    """More samples were bad than `quarantine.max_fraction` allows, or the policy is `raise`."""


class SourceError(DataError):
    """The source to pack is missing, empty or unreadable."""


class TargetExistsError(DataError, FileExistsError):
    """The target of a pack already holds another data set."""


class PackError(DataError):
    """Packing failed for a reason of its own (a worker died, an input changed while it was read)."""


class CacheError(DalipipeError, OSError):
    """The cache folder cannot be used."""


class CacheTimeoutError(CacheError, TimeoutError):
    """Waiting for another process to bring a block passed its deadline."""


class PipelineError(DalipipeError, RuntimeError):
    """A thread of the pipeline died; the cause is chained with its original traceback."""


class PipelineTimeoutError(PipelineError, TimeoutError):
    """The next batch did not arrive within its deadline; says which stage it was in."""


class ClosedError(DalipipeError, RuntimeError):
    """The object was closed and is used again."""


class CoordinationError(DalipipeError, TimeoutError):
    """The ranks of a job did not agree in time; names the store they meet at and what was missing."""


class StateError(DalipipeError, ValueError):
    """A loader state belongs to another data set, seed or order; prints both sides."""
