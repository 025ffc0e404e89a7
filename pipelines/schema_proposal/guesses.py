# SPDX-License-Identifier: MIT
"""Guesses of the meaning of columns, from their names and values.

The words of the name are tried first, then the values. Codes fill their range or do not begin at
zero. Counts are dense near zero and sparse towards the largest value.
"""

from __future__ import annotations

import re

from pipelines.schema_proposal.column_profile import Profile

_LABELS = (
    *("label", "labels", "target", "y", "click", "clicks", "clicked", "conversion", "converted"),
    *("purchase", "purchased", "buy", "bought", "order", "ordered", "like", "liked", "install"),
    *("favorite", "follow", "forward", "share", "comment", "response", "cart"),
)
_USERS = ("user", "uid", "userid", "member", "customer", "visitor", "viewer", "account", "client")
_TIMES = ("timestamp", "ts", "time", "datetime", "date", "at")
_ITEMS = (
    *("item", "iid", "itemid", "article", "ad", "adgroup", "product", "video", "movie", "doc"),
    *("news", "song", "track", "creative", "campaign", "brand", "category", "cat", "author"),
    *("publisher", "seller", "sku", "poi", "genre", "genres", "title", "release", "price"),
    *("content", "post", "photo", "book", "app", "advertiser", "merchant", "shop", "topic"),
)
_PASSING = ("session", "request", "impression", "trace", "event", "row", "log", "uuid", "index")
_ORDERED = (
    *("hist", "history", "past", "seq", "sequence", "clicked", "viewed", "recent", "last", "prev"),
    *("previous", "browsed", "bought", "visited", "watched", "behavior", "behaviors", "behaviour"),
)
_NUMBERS = (
    *("count", "cnt", "counts", "price", "amount", "seconds", "sec", "secs", "duration", "score"),
    *("rate", "ratio", "ctr", "cvr", "views", "qty", "quantity", "total", "avg", "mean", "sum"),
    *("std", "ms", "pct", "percent", "days", "hours", "minutes", "length", "size", "s", "h"),
    *("rating", "balance", "revenue", "weight", "freq", "frequency", "clicks", "num"),
)
_CODES = ("id", "ids", "uid", "iid", "code", "type", "kind", "class", "key", "hash", "zip", "idx")
# Names of things: their numbers are names, however few or small they are.
_THINGS = {
    *(set(_ITEMS) - {"price", "release", "title"}),
    *("os", "device", "channel", "ip", "browser", "carrier", "network", "platform", "model"),
    *("site", "domain", "page", "slot", "banner", "placement", "store", "department", "host"),
    *("country", "region", "state", "city", "province", "zone", "district", "language", "lang"),
    *("segment", "cluster", "occupation", "profession", "version"),
}
_MARKERS = {"fold", "split", "subset", "istrain", "istest", "train", "test", "valid", "validation"}
_PROPENSITIES = {"propensity", "propensities", "pscore", "ips", "propscore"}
# Words that say nothing of what the values are names of.
_GENERIC = {*_CODES, *_ORDERED, "list", "items", "array", "value", "values", "is", "the", "of"}
_SECONDS = {"s": (6.3e8, 4.1e9), "ms": (6.3e11, 4.1e12), "us": (6.3e14, 4.1e15)}
_SECONDS["ns"] = (6.3e17, 4.1e18)


def words(name: str) -> tuple[str, ...]:
    """Return the words of a name, in lower case: clickedItem_ids -> clicked, item, ids."""
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    return tuple(word for word in re.split(r"[^A-Za-z0-9]+", spaced.lower()) if word)


def stems(name: str) -> set[str]:
    """Return the words that say what values name: clicked_items -> item."""
    found = {word for word in words(name) if word not in _GENERIC - {"items"}}
    return {word.removesuffix("s") if len(word) > 3 else word for word in found}


def is_label(one: Profile) -> bool:
    """Return whether a column is a label by its name and its values."""
    parts = [word for word in words(one.name) if word not in ("is", "has", "did", "label")]
    return (
        one.is_binary
        and (not parts or len(parts) == 1)
        and any(word in _LABELS for word in words(one.name))
    )


def is_user(one: Profile) -> bool:
    """Return whether a column names the user."""
    known = set(words(one.name))
    return (
        not one.is_list
        and one.kind in ("integer", "text")
        and one.distinct > 1
        and bool(known & set(_USERS))
        and not known - {*_USERS, *_CODES, "hash", "hashed", "no", "number"}
    )


def is_item(one: Profile) -> bool:
    """Return whether a column describes what is ranked."""
    return bool(set(words(one.name)) & set(_ITEMS)) and not is_ordered(one)


def is_ordered(one: Profile) -> bool:
    """Return whether a list column is a history, in order, and not a set."""
    return bool(set(words(one.name)) & set(_ORDERED)) or one.lengths[0] >= 8


def is_passing(one: Profile) -> bool:
    """Return whether a column names a request, a session or a row: nothing that comes back."""
    known = words(one.name)
    return (known == ("id",) and one.distinct > 0.95 * one.values) or (
        bool(set(known) & set(_PASSING))
        and bool(set(known) & {"id", "uuid", "key", "index"})
        and one.cardinality > 1_000
    )


def is_actions(one: Profile, num_labels: int) -> bool:
    """Return whether a list column holds what the user did with each event, a bit a label."""
    named = bool({"action", "actions"} & set(words(one.name)))
    return named and one.is_number and one.low >= 0 and one.high < 2**num_labels


def time_unit(one: Profile) -> str:
    """Return the unit in which a column's values would be times since 1970, or nothing.

    It is `s`, `ms`, `us` or `ns`. The column's name is not asked.
    """
    if one.is_list or one.kind != "integer":
        return ""
    for unit, (low, high) in _SECONDS.items():
        if low <= one.low and one.high <= high:
            return unit
    return ""


def is_time(one: Profile, asked: str) -> bool:
    """Return whether a column may be the rows' time: by name and values, or values if `asked`."""
    known = {*_TIMES} if one.name == asked else {*words(one.name)}
    dated = one.kind == "timestamp" or (one.is_date_text and bool(known & {*_TIMES}))
    numbered = bool(known & {*_TIMES, "hour"}) and bool(time_unit(one))
    return not one.is_list and (dated or numbered)


def is_measure(one: Profile) -> bool:
    """Return whether a column's numbers are sizes, not names of things."""
    if not one.is_number:
        return False
    known = set(words(one.name))
    if known & set(_CODES):
        return False
    if one.kind == "integer" and known & _THINGS and not known & set(_NUMBERS):
        return False
    if one.kind != "integer" or known & set(_NUMBERS):
        return True
    if one.distinct <= 32 or one.low < -3 or one.low > 1 or one.high > 2.0**53:
        return False
    # Counts are dense where they begin, and thin out towards a far largest one.
    begins = int((one.hashes < one.low + 10).sum()) >= 7
    thin = one.middle - one.low < 0.1 * (one.high - one.low)
    return begins and thin and one.coverage < 0.5


def is_thing(one: Profile) -> bool:
    """Return whether a column's name says that its values are names of things."""
    return bool(set(words(one.name)) & _THINGS)


def is_marker(one: Profile) -> bool:
    """Return whether a column says which rows train and test."""
    known = set(words(one.name))
    return (
        not one.is_list
        and one.distinct <= 32
        and bool(known & _MARKERS)
        and not known - {*_MARKERS, "is", "set", "id", "index", "no", "number", "data"}
    )


def logging_policy(one: Profile) -> str:
    """Return what of the policy that chose the item a column holds, or nothing."""
    known = set(words(one.name))
    if known & _PROPENSITIES or {"action", "prob"} <= known or {"logging", "prob"} <= known:
        return "a propensity"
    return "the name of a policy" if "policy" in known and one.distinct <= 100 else ""


def is_far(one: Profile) -> bool:
    """Return whether numbers span so much that their logarithm says more."""
    return one.high > 100 and (one.high - one.low) > 20 * max(abs(one.middle), 1.0)
