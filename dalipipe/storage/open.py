"""From a URL to the store that serves it."""

from __future__ import annotations

from dalipipe.errors import ConfigError
from dalipipe.storage.budget import check_io_class, declared_rate
from dalipipe.storage.store import StorageConfig, Store
from dalipipe.storage.transport import Record, discard
from dalipipe.storage.url import FILE_SCHEMES, OBJECT_SCHEMES, file_path, scheme_of


def open_store(url: str, config: StorageConfig | None = None, *, record: Record = discard) -> Store:
    """Opens the store of a URL: a path or file:// by plain reads, s3/gs/az/http(s) by obstore, the rest by fsspec.

    Nothing is read or created yet; a missing folder or bucket shows at the first call.

    Args:
        url: a path (relative ones are made absolute) or a URL.
        config: deadlines, retries and the endpoint; the defaults without one.
        record: takes counts by name (`Recorder.add`), see `Transport`.

    Raises:
        ConfigError: unknown scheme (the known ones are named), malformed URL or endpoint, or a bad number.
        DependencyError: the package behind the scheme is missing; names the extra that brings it.
    """
    config = StorageConfig() if config is None else config
    _check(config)
    scheme = scheme_of(url)
    if scheme == "" or scheme in FILE_SCHEMES:
        from dalipipe.storage.local import LocalStore

        return LocalStore(file_path(url) if scheme else url, config)
    if scheme in OBJECT_SCHEMES:
        from dalipipe.storage.obstore_store import ObstoreStore

        return ObstoreStore(url, config, record=record)
    from dalipipe.storage.fsspec_store import FsspecStore

    return FsspecStore(url, config, record=record)


def _check(config: StorageConfig) -> None:
    if config.concurrency < 1:
        raise ConfigError(f"storage.concurrency={config.concurrency} must be at least 1")
    if config.retries < 0:
        raise ConfigError(f"storage.retries={config.retries} must be at least 0")
    if config.page_cache not in ("drop", "keep"):
        raise ConfigError(f"storage.page_cache={config.page_cache!r} is neither 'drop' nor 'keep'")
    check_io_class(config.io_class)
    declared_rate(config.bandwidth)
    for name in ("connect_timeout_s", "read_timeout_s", "request_timeout_s"):
        if not getattr(config, name) > 0:
            raise ConfigError(f"storage.{name}={getattr(config, name)} must be more than 0 seconds")
