"""What may be done to a valid file: to its bytes, to its JSON."""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

HEADS = (
    b"PK\x03\x04\x14\x00\x00\x00\x08\x00",
    b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94",
    b"cos\nsystem\n(S'true'\ntR.",
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR",
    b"\x1f\x8b\x08\x00",
    b"\x7fELF\x02\x01\x01",
    b"\xef\xbb\xbf",
    b"\xff\xfe{\x00",
    b"#!/bin/sh\n",
    b"<html>",
    b"\x00" * 16,
)
"""Of files that are something else."""


def mutated_bytes(draw: random.Random, examples: Sequence[bytes]) -> bytes:
    """A valid file after what disks, editors and copying do to one; or something that never was one."""
    data = bytearray(draw.choice(examples))
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        size = len(data)
        at, length = draw.randrange(size + 1), min(draw.choice((1, 2, 4, 8, 64, 1000)), size)
        match draw.randrange(12):
            case 0 | 1 | 2 if at < size:
                data[at] ^= 1 << draw.randrange(8)
            case 3 if at < size:
                data[at] = draw.choice(b'\x00\xff{}[]",:0919eE+-.\\unt \n\t\x7f\x80')
            case 4:
                del data[at:]
            case 5:
                del data[at : at + length]
            case 6:
                data[at:at] = draw.randbytes(length)
            case 7:
                data[at:at] = data[at : at + length] * draw.choice((1, 2, 30))
            case 8:
                other = draw.choice(examples)
                data[at:] = other[draw.randrange(len(other)) :]
            case 9:
                data[at : at + length] = bytes(len(data[at : at + length]))
            case 10:
                data[:0] = draw.choice(HEADS)
            case 11:
                data[:] = draw.choice(HEADS) + draw.randbytes(draw.randrange(200))
    return bytes(data)


NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 7, 16, 17, 255, 2**31 - 1, 2**31, 2**53 + 1, 2**60, 2**63 - 1, 2**63, 2**64, 10**18, 10**19),
    *(10**30, -(10**30), 10**308, 10**400, 10**4000),
    *(0.0, -0.0, 0.5, -0.5, 1.0, 1e-300, 5e-324, 1e9, 1e18, 1e300, 1.7976931348623157e308, -1e300),
    *(math.nan, math.inf, -math.inf),
)
TEXTS = (
    "",
    *("a", "0", "1", "null", "cpu", "cuda", "gloo", "nccl", "float32", "bfloat16", "int8", "world", "local", "host"),
    *("all_reduce", "broadcast", "Dense", "OkTopk", "Hierarchical", "AllgatherTopk", "layer0", "layer1", "a.b"),
    *(".", ".."),
    *("\ud800", "\udfff\ud800", "a\nb", "\x00", "\x1b[2J", "\u202e", "é\u0301", "x" * 2000, "{}", "%s%n", "../../etc"),
)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [{}], {"": {}}, {"type": "Dense"}, [0], [0, 0], [1], ["a"])
KEYS = ("schema", "name", "type", "extra", "", "\ud800", "a\nb", "__proto__", "__class__", "x" * 600)


def any_value(draw: random.Random) -> Any:
    chosen = draw.random()
    if chosen < 0.45:
        return draw.choice(NUMBERS)
    return draw.choice(TEXTS) if chosen < 0.75 else draw.choice(OTHERS)


class Trees:
    """Edits of parsed JSON; what an edit does not touch is shared with the example."""

    def __init__(self, examples: Sequence[bytes]) -> None:
        self.trees = [json.loads(example) for example in examples]
        self.places = [list(_places(tree)) for tree in self.trees]

    def put(self, number: int, place: tuple[Any, ...], value: Any) -> Any:
        """An example with something else in one place."""
        return _edited(self.trees[number], place, lambda _: value)

    def mutated(self, draw: random.Random, examples: Sequence[bytes]) -> bytes:
        if draw.random() < 0.3:
            return mutated_bytes(draw, examples)
        number = draw.randrange(len(self.trees))
        tree = self.trees[number]
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            place = draw.choice(self.places[number])
            try:
                tree = _edited(tree, place, lambda value: self._edit(draw, value))
            except (LookupError, TypeError):  # an edit before this one took the place away
                continue
        text = json.dumps(tree, ensure_ascii=draw.random() < 0.8)
        if draw.random() < 0.05:
            text = _with_text(draw, text)
        return text.encode("utf-8", "surrogatepass")

    def _edit(self, draw: random.Random, value: Any) -> Any:
        kind = draw.randrange(10)
        if isinstance(value, dict) and value and kind < 6:
            return self._edited_object(draw, value, kind)
        if isinstance(value, list) and value and kind < 6:
            return _edited_list(draw, value, kind)
        if isinstance(value, int | float) and not isinstance(value, bool) and kind < 4:
            with contextlib.suppress(OverflowError):
                return draw.choice((value + 1, value - 1, -value, value * 2, float(value), value * 1e30, 0))
        if kind == 9:
            other = draw.randrange(len(self.trees))
            return _at(self.trees[other], draw.choice(self.places[other]))
        return any_value(draw)

    def _edited_object(self, draw: random.Random, value: dict[str, Any], kind: int) -> dict[str, Any]:
        key, other = draw.choice(list(value)), draw.choice(list(value))
        match kind:
            case 0:
                return {name: one for name, one in value.items() if name != key}
            case 1:
                return {**value, draw.choice(KEYS): any_value(draw)}
            case 2:
                return {**value, key: value[other], other: value[key]}
            case 3:
                return {(draw.choice(KEYS) if name == key else name): one for name, one in value.items()}
            case 4:
                return {**value, key: any_value(draw)}
            case _:
                return {name: value[name] for name in draw.sample(list(value), len(value))}


def _edited_list(draw: random.Random, value: list[Any], kind: int) -> list[Any]:
    at = draw.randrange(len(value))
    match kind:
        case 0:
            return value[:at] + value[at + 1 :]
        case 1:
            return [*value, value[at]]
        case 2:
            return draw.sample(value, len(value))
        case 3:
            return value * draw.choice((0, 2, 20))
        case 4:
            return [*value[:at], any_value(draw), *value[at + 1 :]]
        case _:
            return value[::-1]


def _with_text(draw: random.Random, text: str) -> str:
    """What no tree can say: keys twice, numbers and depths that nobody writes."""
    match draw.randrange(5):
        case 0:
            names = re.findall(r'"[a-z_]+": ', text)
            return text.replace(name := draw.choice(names), f"{name}0, {name}", 1) if names else text
        case 1:
            depth = draw.choice((3, 100, 900, 1100, 5000))
            return re.sub(r": [0-9.]+", lambda _: ": " + "[" * depth + "]" * depth, text, count=1)
        case 2:
            depth = draw.choice((3, 40, 300, 1100))
            return re.sub(
                r'"type": ', lambda _: '"across": {"type": "Hierarchical", ' * depth + '"type": ', text, count=1
            )
        case 3:
            number = draw.choice(
                ("9" * 5000, "1e99999", "-1e-99999", "0x10", "01", "1.", ".5", "+1", "1_0", "-", "Infinity")
            )
            return re.sub(r": [0-9.]+", lambda _: f": {number}", text, count=draw.randrange(1, 3))
        case _:
            keys = ", ".join(f'"{number}": 0' for number in range(draw.choice((10, 1000))))
            return text.replace("{", "{" + keys + ", ", 1)


def _places(tree: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from _places(value, (*place, key))


def _at(tree: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        tree = tree[key]
    return tree


def _edited(tree: Any, place: tuple[Any, ...], edit: Callable[[Any], Any]) -> Any:
    if not place:
        return edit(tree)
    copied = dict(tree) if isinstance(tree, dict) else list(tree)
    copied[place[0]] = _edited(tree[place[0]], place[1:], edit)
    return copied
