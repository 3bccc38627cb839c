"""Names of the methods that the quality study compares.

A name is the name of an exchange of gradients, such as `dense`, `int4` or `oktopk`, or several words with colons
between them. The first word is the kind of method:

- `updates:EXCHANGE`: each rank steps its own optimizer, and the exchange averages the updates, as after
  `syncline.attach(…, optimizer=…)`. EXCHANGE is `chunks` for `ChunkedTopk`, or a name in `syncline.exchange.EXCHANGES`.
- `post-local`: post-local SGD, which averages the weights of all ranks every few steps.
- `diloco`: the same, with a Nesterov step along the mean update.
- `powersgd:RANK`: PowerSGD of gradients, as PyTorch's hook computes it. Its first steps are dense.
- `1-bit-adam`: 1-bit Adam, which freezes the second moment, and exchanges the first one in 1 bit per element.

Further words, in any order:

- a number such as `0.01`: the density. `int2`, `bf16`, …: the format of the values. `mean-ranks`: divide by all ranks.
- `everyN`: exchange every N steps. `delayN`: apply the result N steps later.
- `warmN`: begin with N % of the steps, instead of `--warmup-share`, that exchange gradients in 4 bits.
- `once`: exchange all weights in the same step, instead of fragments that take turns. `fine`: take turns also if that
  makes fragments smaller than a megabyte, as in a small model.
- `reset-own`, `reset-any`, `reset-none`: set the first moments to zero where this rank's own update was applied, where
  any rank's was, or nowhere. Syncline's choice is `reset-own` if updates are exchanged in every step.

Examples: `updates:oktopk:0.01`, `updates:chunks:0.03:int2:every15:delay1`, `diloco:every20`, `powersgd:4`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import syncline.exchange
from peers import PowerSGD
from syncline.errors import UsageError
from syncline.exchange import EXCHANGES, Dense, Exchange, settings
from syncline.updates.policy import Nesterov, UpdatePolicy, checked_policy

RESETS = ("own", "any", "none")
_MEANINGS = {
    r"0?\.\d+": "density",
    r"bf16|fp16|fp32|int\d": "values",
    r"every(\d+)": "every",
    r"delay(\d+)": "delay",
    r"warm(\d+)": "warm",
    r"once|fine": "turns",
    rf"reset-({'|'.join(RESETS)})": "resets",
    r"mean-(ranks|contributors)": "mean",
}
PEERS = {"1-bit-adam": "1-bit Adam", "powersgd": "PowerSGD", "post-local": "post-local SGD", "diloco": "DiLoCo"}
"""Kinds of methods that are not Syncline's."""
_NUMBERS = {"density": float, "every": int, "delay": int, "warm": int}


@dataclass(frozen=True)
class Method:
    """A method of the study."""

    kind: str
    """`gradients`, `updates` or `1-bit-adam`."""
    exchange: Exchange
    every: int = 1
    delay: int = 0
    outer: Nesterov | None = None
    turns: str = ""
    resets: str = ""
    """One of `RESETS`; empty for Syncline's choice."""
    warms: bool = False
    """True if the method begins with a warm-up."""
    share: float | None = None
    """The warm-up's share of the steps; None for that of the study."""

    def warmup(self, steps: int, share: float) -> int:
        """Return the number of steps of the warm-up."""
        return round(steps * (share if self.share is None else self.share)) if self.warms else 0

    def policy(self, warmup: int) -> UpdatePolicy:
        """Return the settings of an exchange of updates, as `attach` makes them."""
        return checked_policy(self.exchange, 1, self.every, warmup, self.delay, self.outer)

    def settings(self) -> dict[str, Any]:
        """Return all settings, as JSON."""
        if self.kind != "updates":
            return {"kind": self.kind, **settings(self.exchange)}
        policy = self.policy(0).settings()
        return {"kind": self.kind, **policy, "turns": self.turns, "resets": self.resets, "warmup": self.share}


def method_named(name: str) -> Method:
    """Return the method of a name.

    Raises:
        UsageError: A word of the name is not known, or its settings do not fit.
    """
    kind, *words = name.split(":")
    if name in EXCHANGES:
        return Method("gradients", EXCHANGES[name]())
    if kind == "1-bit-adam":
        return _changed(Method(kind, Dense(), warms=True), words, name)
    if kind == "powersgd" and words and words[0].isdigit():
        return _changed(Method("gradients", PowerSGD(int(words[0])), warms=True), words[1:], name)
    if kind in ("post-local", "diloco"):
        outer = Nesterov() if kind == "diloco" else None
        return _changed(Method("updates", Dense(), outer=outer, turns="once", warms=True), words, name)
    if kind == "updates" and words and words[0] in (*EXCHANGES, "chunks"):
        exchange = _chunks(name) if words[0] == "chunks" else EXCHANGES[words[0]]()
        return _changed(Method("updates", exchange, warms=True), words[1:], name)
    others = "updates:EXCHANGE, post-local, diloco, powersgd:RANK, 1-bit-adam"
    raise UsageError(f"no method is called {name}; known: {', '.join(EXCHANGES)}, {others}")


def in_words(name: str) -> str:
    """Return the name of a method as a reader of a picture expects it."""
    kind, *words = name.split(":")
    method = method_named(name)
    said = []
    if kind in PEERS:
        said.append(PEERS[kind] + (f", rank {words[0]}" if kind == "powersgd" else ""))
    elif method.kind == "updates":
        density = getattr(method.exchange, "density", None)
        share = "" if density is None else f"{100 * density:.3g} % of "
        said.append(f"{share}updates ({type(method.exchange).__name__})")
    else:
        said.append({"dense": "dense gradients", "oktopk": "1 % of gradients (OkTopk)"}.get(name, f"gradients, {name}"))
    said += [f"every {method.every} steps"] if method.every > 1 else []
    said += [f"{method.delay} step late"] if method.delay else []
    return ", ".join(said)


def _chunks(name: str) -> Exchange:
    kind: Any = getattr(syncline.exchange, "ChunkedTopk", None)
    if kind is None:
        raise UsageError(f"{name}: this version of Syncline has no ChunkedTopk")
    exchange: Exchange = kind()
    return exchange


def _changed(method: Method, words: list[str], name: str) -> Method:
    """Return the method with the settings that these words stand for."""
    of_exchange: dict[str, Any] = {}
    for word in words:
        found = next((m for pattern in _MEANINGS if (m := re.fullmatch(pattern, word))), None)
        if found is None:
            raise UsageError(f"{name}: the word {word!r} is not known; see benchmarks/quality_methods.py")
        meaning = _MEANINGS[found.re.pattern]
        value: Any = _NUMBERS.get(meaning, str)(found[found.re.groups])
        if meaning in ("density", "values", "mean"):
            of_exchange[meaning] = value
        elif meaning == "warm":
            method = replace(method, share=value / 100)
        else:
            method = replace(method, **{meaning: value})
    if of_exchange:
        try:
            method = replace(method, exchange=replace(method.exchange, **of_exchange))  # type: ignore[type-var]
        except TypeError as error:
            raise UsageError(f"{name}: {error}") from error
    if method.kind == "updates":
        method.policy(0)  # raises if the settings do not fit
    elif method != replace(method, every=1, delay=0, turns="", resets=""):
        raise UsageError(f"{name}: every, delay, once, fine and reset are for updates")
    return method
