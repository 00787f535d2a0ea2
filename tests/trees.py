"""Trees of dicts, lists and values, with something odd put somewhere: what files of others may hold."""

from __future__ import annotations

import copy
import json
import math
import random
from typing import Any

#: Whatever stands where something else should.
ODD: list[Any] = [
    None, True, False, -1, 0, 1, 3, 255, 2**31, 2**62, 2**63, 10**30, 10**400, 0.5, -0.5, 1e-320, 1e100, 1e308, -1e308,
    math.nan, math.inf, -math.inf, "", "0", "nan", "x" * 5000, "\x00", "\x1b[2J", "é\u202e", "../..", "a\nb", [], [0], [[]],
    [None, "a"], [1e308, -1e308], [0] * 1000, {}, {"": None}, {"a": {"b": []}}, {"0": 1}, [{"a": 1}],
]  # fmt: skip


def a_place(tree: Any, chance: random.Random) -> tuple[Any, ...]:
    """Somewhere in a tree, as the keys that lead there; whatever is nested in little is as likely as what is in much."""
    place: list[Any] = []
    while isinstance(tree, dict | list | tuple) and len(tree) and (not place or chance.random() < 0.8):
        place.append(chance.choice(list(tree)) if isinstance(tree, dict) else chance.randrange(len(tree)))
        tree = tree[place[-1]]
    return tuple(place) if chance.random() < 0.98 else ()


def replaced(tree: Any, place: tuple[Any, ...], value: Any, *, deleted: bool = False, renamed: Any = None) -> Any:
    """A copy with ``value`` at a place; or without the place; or with the place under another key."""
    if not place:
        return value
    key, *rest = place
    if isinstance(tree, dict):
        found = dict(tree)
        if rest:
            found[key] = replaced(tree[key], tuple(rest), value, deleted=deleted, renamed=renamed)
        elif renamed is not None:
            found[renamed] = found.pop(key)
        elif deleted:
            del found[key]
        else:
            found[key] = value
        return found
    items = list(tree)
    if rest:
        items[key] = replaced(tree[key], tuple(rest), value, deleted=deleted, renamed=renamed)
    elif deleted:
        del items[key]
    elif renamed is not None:
        items.insert(key, copy.deepcopy(items[key]))
    else:
        items[key] = value
    return tuple(items) if isinstance(tree, tuple) else items


_INSERTED = ["\x00", "{", "}", "[", "]", '"', ":", ",", "\n", "9" * 400, "é", "&a", "*a", "- "]


def damaged_text(text: str, chance: random.Random) -> str:
    """Text that is cut, or in which something is exchanged, doubled, or nested without end."""
    at, length = chance.randrange(len(text) + 1), chance.randrange(1, 40)
    ways = [
        text[:at],
        text[:at] + text[at + length :],
        text[:at] + text[at : at + length] * 3 + text[at + length :],
        text[:at] + chance.choice(_INSERTED) + text[at:],
        text[:at] + "[" * 100_000 + text[at:],
        json.dumps(chance.choice(ODD)),
    ]
    return chance.choice(ways)
