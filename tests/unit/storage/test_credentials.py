from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from dalipipe.errors import AccessDeniedError, ConfigError
from dalipipe.storage import StorageConfig, open_store
from dalipipe.storage.credentials import Credentials, file_credentials, process_credentials
from tests.support.faultproxy import Fault, Request, fault_proxy, s3_error
from tests.support.seaweed import S3Server

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


def made(expires_at: datetime | None) -> dict[str, Any]:
    return {"access_key_id": "a", "secret_access_key": "b", "token": None, "expires_at": expires_at}


class Source:
    def __init__(self, *answers: dict[str, Any] | Exception) -> None:
        self.answers = list(answers)

    def __call__(self) -> dict[str, Any]:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_stated_expiry_is_passed_on_to_the_client_which_asks_before_it() -> None:
    expires_at = NOW + timedelta(hours=1)
    assert Credentials(Source(made(expires_at)), now=lambda: NOW)()["expires_at"] == expires_at


def test_without_an_expiry_they_are_looked_at_again_within_minutes() -> None:
    again_at = Credentials(Source(made(None)), now=lambda: NOW)()["expires_at"]
    assert timedelta(minutes=5) < again_at - NOW <= timedelta(minutes=10)


def test_a_failed_refresh_keeps_valid_credentials_and_is_tried_again_soon(caplog: pytest.LogCaptureFixture) -> None:
    source = Source(made(NOW + timedelta(hours=1)), AccessDeniedError("the token server is away"))
    credentials = Credentials(source, now=lambda: NOW, uniform=lambda low, high: high)
    credentials()
    with caplog.at_level(logging.WARNING):
        kept = credentials()
    assert kept["access_key_id"] == "a"
    # The client asks when five minutes are left: in 30 s.
    assert kept["expires_at"] - NOW == timedelta(minutes=5, seconds=30)
    assert "token server is away" in caplog.text


def test_expired_or_refused_credentials_are_not_kept() -> None:
    now = [NOW]
    source = Source(made(NOW + timedelta(minutes=1)), AccessDeniedError("away"), made(None), AccessDeniedError("away"))
    credentials = Credentials(source, now=lambda: now[0])
    credentials()
    now[0] = NOW + timedelta(minutes=2)
    with pytest.raises(AccessDeniedError, match="away"):
        credentials()
    credentials()
    credentials.forget()
    with pytest.raises(AccessDeniedError, match="away"):
        credentials()


def test_a_process_prints_them() -> None:
    answer = {"Version": 1, "AccessKeyId": "k", "SecretAccessKey": "s", "SessionToken": "t"}
    answer["Expiration"] = "2026-01-01T01:00:00Z"
    fetch = process_credentials(f"{sys.executable} -c 'print({json.dumps(json.dumps(answer))})'")
    assert fetch() == {
        "access_key_id": "k",
        "secret_access_key": "s",
        "token": "t",
        "expires_at": NOW + timedelta(hours=1),
    }


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit('no ticket')", "status 1: no ticket"),
        ("print('hello')", "printed no credentials"),
        ("print('{}')", "AccessKeyId"),
    ],
)
def test_a_process_that_fails_says_how(program: str, message: str) -> None:
    with pytest.raises(AccessDeniedError, match=message):
        process_credentials(f'{sys.executable} -c "{program}"')()


def test_a_process_that_is_missing_or_unreadable_is_named() -> None:
    with pytest.raises(AccessDeniedError, match="/no/such/program"):
        process_credentials("/no/such/program --get")()
    with pytest.raises(ConfigError, match="credential_process"):
        process_credentials("a 'b")


def write_file(path: Path, key: str, secret: str, extra: str = "") -> None:
    path.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n{extra}")


def test_a_file_is_read_by_profile(tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    path.write_text("[a]\naws_access_key_id=1\naws_secret_access_key=2%%3\naws_session_token=t\n")
    assert file_credentials(str(path), "a")()["secret_access_key"] == "2%%3"
    with pytest.raises(AccessDeniedError, match="profile 'b'"):
        file_credentials(str(path), "b")()
    with pytest.raises(AccessDeniedError, match="missing-file"):
        file_credentials("/missing-file", "a")()
    path.write_text("[a]\naws_access_key_id=1\n")
    with pytest.raises(AccessDeniedError, match=r"not complete.*aws_secret_access_key"):
        file_credentials(str(path), "a")()


def test_both_sources_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"one of storage\.credential_process"):
        open_store("s3://bucket/x", StorageConfig(credential_process="x", credentials_file="y"))


def expire(num_times: int, code: str = "ExpiredToken") -> Callable[[Request], Fault | None]:
    left = [num_times]

    def rule(request: Request) -> Fault | None:
        if left[0] and request.method == "GET":
            left[0] -= 1
            return Fault(status=400 if code == "ExpiredToken" else 403, body=s3_error(code))
        return None

    return rule


def test_a_token_that_expires_early_is_renewed_and_the_read_goes_on(s3: S3Server, tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    write_file(path, s3.access_key, s3.secret_key)
    with fault_proxy(s3.endpoint_url) as proxy:
        config = StorageConfig(endpoint_url=proxy.url, credentials_file=str(path))
        store = open_store("s3://bucket/expiring", config)
        store.put("x", b"0123456789")
        proxy.rule = expire(1)
        assert bytes(store.read("x", 2, 5)) == b"234"
        proxy.rule = expire(10**6)
        with pytest.raises(AccessDeniedError, match=r"s3://bucket/expiring/x.*ExpiredToken"):
            store.read("x", 2, 5)
        store.close()


def test_rotated_keys_in_the_file_are_used_without_a_restart(s3: S3Server, tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    write_file(path, "gone", "gone")
    with fault_proxy(s3.endpoint_url) as proxy:
        good = open_store("s3://bucket/rotate", StorageConfig(endpoint_url=s3.endpoint_url))
        good.put("x", b"0123456789")
        good.close()
        store = open_store(
            "s3://bucket/rotate", StorageConfig(endpoint_url=proxy.url, credentials_file=str(path), retries=0)
        )
        with pytest.raises(AccessDeniedError):
            store.read("x", 0, 5)
        write_file(path, s3.access_key, s3.secret_key)
        proxy.rule = expire(1)
        assert bytes(store.read("x", 0, 5)) == b"01234"
        store.close()


@pytest.mark.parametrize(
    ("code", "remedy"),
    [("ExpiredToken", "storage.credential_process"), ("RequestTimeTooSkewed", "this host's clock is wrong")],
)
def test_static_credentials_that_no_longer_work_say_what_to_do(s3: S3Server, code: str, remedy: str) -> None:
    with fault_proxy(s3.endpoint_url) as proxy:
        store = open_store("s3://bucket/static", StorageConfig(endpoint_url=proxy.url))
        proxy.rule = expire(10**6, code)
        with pytest.raises(AccessDeniedError, match=f"{code}.*{remedy}"):
            store.read("x", 0, 5)
        store.close()
