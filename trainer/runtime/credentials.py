# SPDX-License-Identifier: MIT
"""Passwords in URLs: used where the command line gives them, kept and shown nowhere.

A run's configuration, its checkpoints' manifests, logs, reports and error messages hold URLs
without user, password and signed query. Whoever goes on with the run gives them again: on the
command line, or, better, in the environment, where the client of the URL looks for them.
"""

from __future__ import annotations

import re
from typing import Any

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}:/(?:/|(?<=..:/))")
_UNBROKEN = re.compile(r"\S+")
_END_OF_HOST = re.compile(r"[/?#]")
# A value that is a URL and nothing else: its password may have a blank.
_VALUE = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]{0,30}://")
# What surely is a host: where an @ may as well be a part of a path, only this makes it a user's.
_HOST = re.compile(
    r"localhost\b|[\w-]{1,63}(?:\.[\w-]{1,63}){0,9}?\.[A-Za-z]{2,63}\b|[\w.-]{1,253}:\d{1,5}\b"
    r"|\d{1,3}(?:\.\d{1,3}){3}\b|\["
)
_SECRET = re.compile(
    r"(?i)([?&;#](?:[\w.-]*(?:token|secret|pass(?:w(?:or)?d|phrase)?|pwd?|signature|credential|auth"
    r"|(?:api|access|account)[_-]?key)[\w.-]*|sig|key|user|username)=)([^&;#\s]*)"
)

_CLOSING = "'\"<>()[]{},.:"


def without_credentials(text: str) -> str:
    """Return `text` in which no URL has a user or a password, or a secret in its query.

    A password may have any sign but a blank in it, also / and quotes, which end a host or a URL
    elsewhere: up to the last @ before a blank all is taken for the password. With an @ before the
    first / as well (`s3://key:secret@bucket/a@b`), or with a port, that holds only where what
    follows is surely a host: a name with a dot, one with a port, localhost, an address.
    """
    return _UNBROKEN.sub(lambda match: _masked(match[0]), text) if ":/" in text else text


def without_credentials_in(values: Any) -> Any:
    """Return nested mappings and lists in which every text is `without_credentials`."""
    if isinstance(values, str):
        value = _VALUE.match(values)
        if value is not None:
            return without_credentials(_masked(values, value.end()))
        return without_credentials(values)
    if isinstance(values, dict):
        return {key: without_credentials_in(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(without_credentials_in(value) for value in values)
    return values


def _masked(text: str, stop: int | None = None) -> str:
    """Return a text, unbroken by blanks, in which no URL that begins before `stop` has a user."""
    done, place, last = [], 0, text.rfind("@")
    for scheme in _SCHEME.finditer(text, 0, len(text) if stop is None else stop):
        start = scheme.end()
        if start > last:
            break
        if start < place:
            continue
        host = _END_OF_HOST.search(text, start)
        end = host.start() if host else len(text)
        is_folded = not scheme[0].endswith("//")  # a path made of a URL, which has lost a slash
        at = -1 if is_folded and ":" not in text[start:end] else _user(text, start, end, last)
        if at >= 0:
            done.append(text[place:start])
            place = at + 1
    done.append(text[place:])
    found = "".join(done)
    return _SECRET.sub(_starred, found) if "://" in text else found


def _starred(match: re.Match[str]) -> str:
    """Return a parameter without its value, but with what ends the URL in a sentence."""
    name, value = match.groups()
    return f"{name}***{value[len(value.rstrip(_CLOSING)) :]}"


def _user(text: str, start: int, end: int, last: int) -> int:
    """Return the place of the @ that ends a URL's user and password, or -1.

    start, end: of what stands before the first sign that ends a host.
    last: the place of the last @.
    """
    first = text.rfind("@", start, end)
    if first == last or (last > end and _HOST.match(text, last + 1) and ":" in text[start:end]):
        return last
    if first >= 0 or ":" not in text[start:end]:
        return first
    # A password with a slash in it, which should have been %2F.
    return -1 if text[start:end].rpartition(":")[2].isdecimal() else last
