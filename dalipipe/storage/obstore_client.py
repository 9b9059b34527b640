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
        _set_endpoint(options, "base_url", config.gs_endpoint_url, "storage.gs_endpoint_url")
        return clients.GCSStore(bucket, **options, **_own_options(config, "google_"))
    if scheme in AZURE_SCHEMES:
        _set_endpoint(options, "endpoint", config.az_endpoint_url, "storage.az_endpoint_url")
        return clients.AzureStore(bucket, **options, **_own_options(config, "azure_"))
    if credentials is not None:
        options["credential_provider"] = credentials
    if config.region is not None:
        options["region"] = config.region
    if _set_endpoint(options, "endpoint", config.endpoint_url, "storage.endpoint_url"):
        options["virtual_hosted_style_request"] = False
    return clients.S3Store(bucket, **options, **_own_options(config, "aws_"))


def _set_endpoint(options: dict[str, Any], name: str, endpoint_url: str | None, key: str) -> bool:
    """Puts an endpoint of one's own into the client's options, where there is one."""
    if endpoint_url is None:
        return False
    options[name] = strip_slash(check_http_url(endpoint_url, key))
    options["client_options"]["allow_http"] = urlsplit(endpoint_url).scheme == "http"
    return True


def _own_options(config: StorageConfig, prefix: str) -> dict[str, Any]:
    """Those of `storage.options` that are this client's; the names tell, since other stores of a run have theirs."""
    given = {name: value for name, value in config.options.items() if name.startswith(prefix) and value is not None}
    return {name: str(value).lower() if isinstance(value, bool) else value for name, value in given.items()}
