"""S3 credentials that expire: fetched again before they do, and kept when fetching fails.

Sources are those that people have already: a command that prints JSON (the `credential_process` of AWS's tools) and a
shared credentials file that something else rewrites. Everything else (instance metadata, web identity, static
variables) is the client's own affair.
"""

from __future__ import annotations

import configparser
import json
import logging
import random
import shlex
import subprocess
import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from dalipipe.errors import AccessDeniedError, ConfigError

_PROCESS_TIMEOUT_S = 30.0
# The client asks again when less than five minutes are left.
_CLIENT_MARGIN = timedelta(minutes=5)
# A file that states no expiry is looked at again after this time.
_REREAD = timedelta(minutes=5)
_RETRY_S = 30.0

_log = logging.getLogger(__name__)


class Credentials:
    """What obstore calls for credentials: a dict with `access_key_id`, `secret_access_key`, `token`, `expires_at`.

    A fetch that fails while the last credentials are still valid keeps those and is tried again about every 30 s, with
    jitter, so that the ranks of a job do not ask together.
    """

    def __init__(
        self,
        fetch: Callable[[], dict[str, Any]],
        *,
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._fetch = fetch
        self._now = now
        self._uniform = uniform
        self._lock = threading.Lock()
        self._last: dict[str, Any] | None = None

    def __call__(self) -> dict[str, Any]:
        """Fetches credentials.

        Raises:
            AccessDeniedError: there are none, and the last ones have expired.
        """
        with self._lock:
            try:
                self._last = self._fetch()
            except AccessDeniedError as error:
                return self._keep(error)
            return self._answer(self._last["expires_at"])

    def forget(self) -> None:
        """The store refused the last ones: whatever their expiry says, they are not used again."""
        with self._lock:
            self._last = None

    def _keep(self, error: AccessDeniedError) -> dict[str, Any]:
        expires_at = self._last["expires_at"] if self._last else None
        if self._last is None or (expires_at is not None and expires_at <= self._now()):
            raise error
        _log.warning("%s; the credentials in use are valid until %s and stay", error, expires_at or "revoked")
        again_at = self._now() + _CLIENT_MARGIN + timedelta(seconds=self._uniform(_RETRY_S / 2, _RETRY_S))
        return self._answer(again_at)

    def _answer(self, ask_again_at: datetime | None) -> dict[str, Any]:
        assert self._last is not None
        latest = self._now() + _CLIENT_MARGIN + _REREAD
        return {**self._last, "expires_at": latest if ask_again_at is None else ask_again_at}


def process_credentials(command: str) -> Callable[[], dict[str, Any]]:
    """Fetches by running `command` (split as a shell would, but run without one) and reading the JSON that it prints.

    Raises (when called):
        AccessDeniedError: the command fails, hangs, or prints something else.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"storage.credential_process cannot be split into words: {error}; close its quotes") from None
    if not words:
        raise ConfigError("storage.credential_process is empty; name a command or leave the key out")

    def fetch() -> dict[str, Any]:
        about = f"the storage.credential_process {words[0]!r}"
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=_PROCESS_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            # Not chained: it repeats the whole command, which may hold a secret.
            raise AccessDeniedError(
                f"{about} gave no credentials within {_PROCESS_TIMEOUT_S:g} s; run it by hand to see what it waits for"
            ) from None
        except OSError as error:
            raise AccessDeniedError(f"{about} gave no credentials: {error}") from error
        if done.returncode != 0:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise AccessDeniedError(f"{about} ended with status {done.returncode}: {last[0][:200]}")
        try:
            found = json.loads(done.stdout)
            return _credentials(
                found["AccessKeyId"], found["SecretAccessKey"], found.get("SessionToken"), found.get("Expiration")
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            raise AccessDeniedError(
                f"{about} printed no credentials; it must print JSON with AccessKeyId, SecretAccessKey, and, where "
                "they expire, SessionToken and Expiration (ISO 8601)"
            ) from None

    return fetch


def file_credentials(path: str, profile: str) -> Callable[[], dict[str, Any]]:
    """Fetches by reading the section `profile` of an INI file as AWS's tools write it.

    Raises (when called):
        AccessDeniedError: the file or the profile is missing or incomplete.
    """

    def fetch() -> dict[str, Any]:
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(Path(path).expanduser().read_text())
            section = dict(parser.items(profile))
        except (OSError, UnicodeDecodeError, configparser.Error) as error:
            raise AccessDeniedError(
                f"storage.credentials_file={path} has no readable profile {profile!r}: {str(error).splitlines()[0]}"
            ) from error
        expiry = section.get("expiration") or section.get("aws_expiration") or section.get("x_security_token_expires")
        try:
            key, secret = section["aws_access_key_id"], section["aws_secret_access_key"]
            return _credentials(key, secret, section.get("aws_session_token"), expiry)
        except (KeyError, ValueError) as error:
            raise AccessDeniedError(
                f"storage.credentials_file={path} profile {profile!r} is not complete: {error}; it needs "
                "aws_access_key_id and aws_secret_access_key"
            ) from error

    return fetch


def _credentials(key: str, secret: str, token: str | None, expiry: str | None) -> dict[str, Any]:
    expires_at = None
    if expiry:
        expires_at = datetime.fromisoformat(expiry.replace("Z", "+00:00"))
        expires_at = expires_at if expires_at.tzinfo else expires_at.replace(tzinfo=timezone.utc)
    return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": expires_at}
