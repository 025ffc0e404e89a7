# SPDX-License-Identifier: MIT
"""Passwords in URLs: used where the command line gives them, kept and shown nowhere.

A run's configuration, its checkpoints' manifests, logs, reports and error messages hold URLs
without user, password and signed query. Whoever goes on with the run gives them again: on the
command line, or, better, in the environment, where the client of the URL looks for them.
"""

from __future__ import annotations

import re
from typing import Any

# Up to the @ of a user, a URL may have signs that end it elsewhere, such as quotes around it.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)((?:[^\s/?#]*@)?[^\s'\"<>]*)")
# A URL that was taken for a path, which has lost a slash.
_FOLDED = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]+:/)[^\s/:@]*:[^\s/]*@")
# A value that is a URL and nothing else, whose password may have a space.
_USER_OF_VALUE = re.compile(r"^(\s*[A-Za-z][A-Za-z0-9+.-]*://)[^/?#]*@")
_SECRET = re.compile(
    r"(?i)([?&;#](?:[\w.-]*(?:token|secret|pass(?:w(?:or)?d|phrase)?|pwd?|signature|credential|auth"
    r"|(?:api|access|account)[_-]?key)[\w.-]*|sig|key|user|username)=)[^&;#\s]*"
)


def without_credentials(text: str) -> str:
    """Return `text` in which no URL has a user or a password, or a secret in its query."""
    if ":/" not in text:
        return text
    return _FOLDED.sub(r"\1", _URL.sub(_masked, text))


def without_credentials_in(values: Any) -> Any:
    """Return nested mappings and lists in which every text is `without_credentials`."""
    if isinstance(values, str):
        return without_credentials(_USER_OF_VALUE.sub(r"\1", values))
    if isinstance(values, dict):
        return {key: without_credentials_in(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(without_credentials_in(value) for value in values)
    return values


def _masked(match: re.Match[str]) -> str:
    scheme, rest = match.groups()
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    port = host.rpartition(":")[2] if ":" in host else "0"
    if "@" in host:
        rest = rest[host.rindex("@") + 1 :]
    elif "@" in rest and not port.isdecimal():
        # A password with a slash in it, which should have been %2F.
        rest = rest.rpartition("@")[2]
    return scheme + _SECRET.sub(r"\1***", rest)
