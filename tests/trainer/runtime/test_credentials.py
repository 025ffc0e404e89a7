# SPDX-License-Identifier: MIT
"""No password of a URL is kept or shown, whatever shape the URL has."""

import string
from random import Random

import pytest

from trainer.runtime.credentials import without_credentials, without_credentials_in
from trainer.runtime.printable import printable, printable_lines


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:s3cret@gateway:9091/x", "http://gateway:9091/x"),
        ("https://s3cret@host", "https://host"),
        ("s3://key:s3cret@bucket/a@b/c", "s3://bucket/a@b/c"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("http://host:9091/path@v1", "http://host:9091/path@v1"),
        ("http://me:s3c/ret@host/x", "http://host/x"),
        ("http://me:s3c@ret@host/x", "http://host/x"),
        ("http://me:s3c/r'e\"t@host/x", "http://host/x"),
        ("http://me:s3c@r/e't@host.example/x", "http://host.example/x"),
        ("http://me:12/s3cret@10.0.0.1/x", "http://10.0.0.1/x"),
        ("s3:/key:s3'cr/et@bucket/x", "s3:/bucket/x"),
        ("http://a/x,http://me:s3cret@b", "http://a/x,http://b"),
        ("http://me:s3cret@a/x@1,http://you:s3/cret@b", "http://a/x@1,http://b"),
        ("see 'https://h?token=s3'cret' or '/x'", "see 'https://h?token=***' or '/x'"),
        ("abfs://c@account/x?sig=s3cret&se=2", "abfs://account/x?sig=***&se=2"),
        ("https://h/x?a=1&X-Amz-Signature=s3cret", "https://h/x?a=1&X-Amz-Signature=***"),
        ("https://h?api_key=s3cret#top", "https://h?api_key=***#top"),
        ("https://h?Password=s3cret", "https://h?Password=***"),
        ("https://h?pass=s3cret&db_pw=s3cret&x=1", "https://h?pass=***&db_pw=***&x=1"),
        ("http://me:s3'cr\"<e>t@host/x", "http://host/x"),
        ("'s3://a/b','http://me:s3'cret@c'", "'s3://a/b','http://c'"),
        ("s3:/key:s3cret@bucket/x: not found", "s3:/bucket/x: not found"),
        ("s3:/bucket/a:b@c", "s3:/bucket/a:b@c"),
        ("memory://x/checkpoints", "memory://x/checkpoints"),
        ("/a/folder@home", "/a/folder@home"),
        ("user@host:folder", "user@host:folder"),
        ("", ""),
        (
            "cannot reach 'http://me:s3cret@a' or <https://t:s3cret@b/c>; try again",
            "cannot reach 'http://a' or <https://b/c>; try again",
        ),
    ],
)
def test_urls_lose_user_password_and_secret_parameters(text, shown):
    assert without_credentials(text) == shown
    assert without_credentials(shown) == shown, "what is shown is shown again as it is"


def test_nested_settings_lose_them_everywhere():
    values = {"a": ["http://u:p q@h", 3, None], "b": {"c": ("s3://k:s@b",)}, "d": True}
    assert without_credentials_in(values) == {
        "a": ["http://h", 3, None],
        "b": {"c": ("s3://b",)},
        "d": True,
    }


def test_what_is_made_printable_shows_no_password():
    text = "error: s3://key:s3cret@bucket/x: expected a file\nor http://me:s3cret@host"
    assert printable(text) == "error: s3://bucket/x: expected a file\\nor http://host"
    assert printable_lines(text) == "error: s3://bucket/x: expected a file\n    or http://host"


_SIGNS = string.ascii_letters + string.digits + "/?#@:'\"<>()[]{}&=;,.!$%*+-_~^|`\\é"


def test_no_random_password_is_left_in_any_sentence():
    random = Random(5)
    for case in range(20_000):
        # Signs around the secret make sure that it is long enough to be looked for.
        password = "".join(random.choices(_SIGNS, k=random.randrange(12)))
        secret = f"s3c{random.randrange(10)}{password}r3t"
        host = random.choice(("db.example.com", "10.0.0.1:90", "localhost", "h:9091"))
        url = f"{random.choice(('https', 'postgresql+x'))}://me:{secret}@{host}/x"
        sentence = random.choice(
            (
                "{}",
                "cannot open '{}': refused",
                "<{}>, or s3://b/c",
                "(see {}.)",
                '["{}"]',
                "a={};b",
            )
        )
        for shown in (
            without_credentials(sentence.format(url)),
            without_credentials_in([url])[0],
            printable(sentence.format(url)),
        ):
            assert "s3c" not in shown and "r3t" not in shown, (case, url, shown)
            assert host in shown


def test_a_password_with_a_blank_is_left_in_no_value():
    for password in ("a b", "a /b", "a'/ b", "a@ b/", " "):
        value = f"https://me:{password}@db.example.com/x"
        assert without_credentials_in({"url": value}) == {"url": "https://db.example.com/x"}
