"""From a URL and a configuration to a client of obstore."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from dalipipe.errors import ConfigError, DependencyError
from dalipipe.storage.credentials import Credentials, file_credentials, process_credentials
from dalipipe.storage.failures import is_panic, presentable, reason
from dalipipe.storage.store import StorageConfig
from dalipipe.storage.url import (
    AZURE_SCHEMES,
    GCS_SCHEMES,
    HTTP_SCHEMES,
    check_http_url,
    check_prefix,
    scheme_of,
    strip_slash,
)


def open_credentials(config: StorageConfig) -> Credentials | None:
    """The configured source of S3 credentials; None leaves them to the client.

    Raises:
        ConfigError: two sources are named, or the command cannot be split into words.
    """
    if config.credential_process is not None and config.credentials_file is not None:
        raise ConfigError("give one of storage.credential_process and storage.credentials_file, not both")
    if config.credential_process is not None:
        return Credentials(process_credentials(config.credential_process))
    if config.credentials_file is not None:
        return Credentials(file_credentials(config.credentials_file, config.profile))
    return None


def open_client(url: str, config: StorageConfig, credentials: Credentials | None, *, retries: int) -> Any:
    """A client for the URL that retries by itself so many times.

    Raises:
        ConfigError: the URL or the endpoint is malformed.
        DependencyError: obstore is missing.
    """
    try:
        from obstore import store as clients
    except ImportError as error:
        raise DependencyError(
            f"{url} needs the package obstore; install it with: pip install 'dalipipe[s3]'"
        ) from error
    scheme = scheme_of(url)
    options: dict[str, Any] = {
        "client_options": {
            "timeout": _duration(config.request_timeout_s),
            "read_timeout": _duration(config.read_timeout_s),
            "connect_timeout": _duration(config.connect_timeout_s),
        },
        "retry_config": {
            "max_retries": retries,
            "retry_timeout": timedelta(seconds=config.request_timeout_s),
            "backoff": {
                "init_backoff": timedelta(milliseconds=50),
                "max_backoff": timedelta(seconds=1),
                "base": 2,
            },
        },
    }
    try:
        if scheme in HTTP_SCHEMES:
            check_http_url(url, "url")
            options["client_options"]["allow_http"] = scheme == "http"
            return clients.HTTPStore.from_url(url, **options)
        return _open_bucket(clients, url, config, options, credentials)
    except ConfigError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or is_panic(error):
            raise ConfigError(
                f"cannot open {url}: {reason(error)}; check the URL, endpoint and region"
            ) from presentable(error)
        raise


def _duration(seconds: float) -> str:
    """As the client reads it: it takes no more than a few decimals."""
    return f"{max(1, round(seconds * 1000))}ms"


def _open_bucket(
    clients: Any, url: str, config: StorageConfig, options: dict[str, Any], credentials: Credentials | None
) -> Any:
    bucket, _, prefix = url.partition("://")[2].partition("/")
    if not bucket or any(character in bucket for character in " @?#:"):
        raise ConfigError(f"{url} names no valid bucket; write it as {scheme_of(url)}://bucket/folder")
    options["prefix"] = check_prefix(prefix) or None
    scheme = scheme_of(url)
    if scheme in GCS_SCHEMES:
        return clients.GCSStore(bucket, **options)
    if scheme in AZURE_SCHEMES:
        return clients.AzureStore(bucket, **options)
    if credentials is not None:
        options["credential_provider"] = credentials
    if config.region is not None:
        options["region"] = config.region
    if config.endpoint_url is not None:
        endpoint = check_http_url(config.endpoint_url, "storage.endpoint_url")
        options["client_options"]["allow_http"] = urlsplit(endpoint).scheme == "http"
        options["endpoint"] = strip_slash(endpoint)
        options["virtual_hosted_style_request"] = False
    return clients.S3Store(bucket, **options)
