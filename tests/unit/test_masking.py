"""What counts as a secret in a text, and that errors never show one."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from dalipipe.errors import DalipipeError, ObjectNotFoundError, StorageError
from dalipipe.masking import masked, masked_settings, secrets_in
from tests.support.host import within


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("sftp://me:secret@host:22/x", "sftp://me:***@host:22/x"),
        ("sftp://me:pa@ss:w@host/x", "sftp://me:***@host/x"),
        ("cannot read 'sftp://me:pa/s?s#@host/x@y': no", "cannot read 'sftp://me:***@host/x@y': no"),
        ("HTTPS://a-token@host/x", "HTTPS://***@host/x"),
        ("https://me:secret@host/x", "https://***@host/x"),
        ("a sftp://me:one@h and http://two@h", "a sftp://me:***@h and http://***@h"),
        ("/c/k?sv=2025&sig=ab%2Bc&se=9 (status 403)", "/c/k?sv=2025&sig=***&se=9 (status 403)"),
        (
            "https://b/k?X-Amz-Credential=AK%2F1&X-Amz-Date=2&X-Amz-Security-Token=t&x-amz-signature=f",
            "https://b/k?X-Amz-Credential=***&X-Amz-Date=2&X-Amz-Security-Token=***&x-amz-signature=***",
        ),
        ("/webhdfs/v1/x?op=OPEN&delegation=abc&user.name=me", "/webhdfs/v1/x?op=OPEN&delegation=***&user.name=me"),
        ("<a href='?token=abc'>", "<a href='?token=***'>"),
        ("run +storage.options.password=my secret retries=2", "run +storage.options.password=*** retries=2"),
        ("storage.options.client_kwargs.token='a b',x=1", "storage.options.client_kwargs.token=***,x=1"),
        ("- +storage.options={client_kwargs: {token: a b}}", "- +storage.options=***"),
        ("https://h/x?sas=abc&a=1;jwt=def#access_token=ghi", "https://h/x?sas=***&a=1;jwt=***#access_token=***"),
    ],
)
def test_secrets_are_taken_out(text: str, shown: str) -> None:
    assert masked(text) == shown
    assert masked(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "sftp://me@host/x",
        "abfs://container@account.dfs.core.windows.net/x",
        "http://host:8080/user@mail/x:y@z",
        "sftp://[::1]:22/a@b",
        "s3://bucket/a:b@c?",
        "storage.credentials_file=/home/me/.aws/credentials lacks the profile",
        "1+1=2.txt",
        "storage.options.key_filename=/home/me/id is no file; name the private key",
        "+storage.options.host_key_policy=auto_add, storage.options.port=22 secret=1",
        "options:\n  port: 22\npassword: not one of a client's options",
        "/data/class 1/a&b.jpg",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert masked(text) == text


@given(st.text(st.characters(exclude_categories=["Cs", "Z", "C"], exclude_characters="/?#"), min_size=4))
def test_no_password_without_a_slash_survives(password: str) -> None:
    assert masked(f"at sftp://someone:{password}@host/folder now") == "at sftp://someone:***@host/folder now"


def test_known_secrets_are_hidden_wherever_they_stand() -> None:
    known = secrets_in("sftp://me:a%2Fsecret@h/x", {"password": "other", "token": None, "port": 22, "pin_key": "123"})
    assert known == ("a%2Fsecret", "a/secret", "other")
    assert masked("login with a/secret and other failed", known) == "login with *** and *** failed"
    assert secrets_in("https://a-token@h/x?sv=1&sig=some%2Bthing", {}) == ("some%2Bthing", "some+thing", "a-token")
    assert secrets_in("s3://bucket/x", {}) == ()
    nested = {"client_kwargs": {"headers": {"Authorization": "Bearer one"}, "auth": {"name": "me", "pw": "fore"}}}
    assert secrets_in("s3://bucket/x", {**nested, "num": {"retries": 3}}) == ("Bearer one", "fore")


def test_settings_lose_the_secret_options_of_a_client_by_name() -> None:
    settings = {
        "data": {"url": "sftp://me:secret@host/set", "mix": ["http://secret@host"], "num": 3},
        "storage": {"options": {"password": "secret", "sas_key": "secret", "port": 22, "passphrase": None}},
        "tokens": {"tokenizer": "mine"},
    }
    assert masked_settings(settings) == {
        "data": {"url": "sftp://me:***@host/set", "mix": ["http://***@host"], "num": 3},
        "storage": {"options": {"password": "***", "sas_key": "***", "port": 22, "passphrase": None}},
        "tokens": {"tokenizer": "mine"},
    }


_SECRET_NAMES = ("password", "sas_key", "token", "headers.Authorization")
_NAMES = st.sampled_from([*_SECRET_NAMES, "user", "timeout", "key_filename"])
_TEXTS = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "Zs"]), max_size=120)
_VALUES = st.recursive(
    st.none() | st.integers(-1, 9) | _TEXTS | st.just("two\n\nlines"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(_NAMES, _VALUES, max_size=4), _VALUES)
def test_yaml_of_settings_loses_what_the_settings_lose(options: dict[str, Any], beside: Any) -> None:
    settings = {"before": {"token": beside}, "list": [{"options": options, "next": 1}], "after": {"password": beside}}
    shown = masked(OmegaConf.to_yaml(OmegaConf.create(settings)))
    assert yaml.safe_load(shown) == masked_settings(settings)
    assert masked(shown) == shown


def test_yaml_of_a_package_is_masked_from_its_first_line() -> None:
    shown = masked("# @package storage.options\nuser: me\npassword: secret\ntokens:\n- a\n- b\nport: 22\n")
    assert shown == "# @package storage.options\nuser: me\npassword: '***'\ntokens: '***'\nport: 22\n"
    overrides = "task:\n- +storage.options.password=a secret\n    that is folded\n- +storage.options.port=22\n"
    assert masked(overrides) == "task:\n- +storage.options.password=***\n- +storage.options.port=22\n"


@pytest.mark.parametrize(
    "text",
    [
        "options\n- " + "a.b" * 20_000,
        "={options" * 5_000,
        "options:\n" + "- a.b=c\n" * 10_000,
        "storage.options.password=" + "a, " * 20_000,
        "options" + ".a" * 20_000,
    ],
    ids=lambda text: text[:12],
)
def test_no_text_takes_long(text: str) -> None:
    with within(2):
        masked(text)


@pytest.mark.parametrize("kind", [DalipipeError, StorageError, ObjectNotFoundError])
def test_an_error_shows_no_secret_wherever_it_was_raised(kind: type[DalipipeError]) -> None:
    error = kind("cannot read sftp://me:secret@host/x")
    for shown in (error, pickle.loads(pickle.dumps(error))):
        assert str(shown) == "cannot read sftp://me:***@host/x"
        assert "secret" not in repr(shown)


def test_settings_of_a_client_are_hidden_at_any_depth_and_urls_as_names_too() -> None:
    settings = {
        "options": {"client_kwargs": {"headers": [{"Authorization": "Bearer secret"}], "timeout": 3}},
        "mix": {"sftp://me:secret@host/set": 1.0},
    }
    assert masked_settings(settings) == {
        "options": {"client_kwargs": {"headers": [{"Authorization": "***"}], "timeout": 3}},
        "mix": {"sftp://me:***@host/set": 1.0},
    }
