"""Standings, which replicas send with each request for a quorum, and the conclusions that replicas draw from them.

All members of a quorum get the same standings from the lighthouse, so they conclude the same without communication.

An exchange is committed in two phases. When a replica has the result, it is *prepared*; when it has seen that all
contributors are prepared, it *commits* the result. A failure between the two leaves some replicas committed and others
prepared. The next quorum resolves this: a result that one of its members has committed, or that all of its members that
took part are prepared for, is committed by all of them. If a contributor is there that has no result, nobody can have
committed it, and it is dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

Commit = tuple[int, int, str]
"""Weights that replicas agreed on: the round, the number of exchanges so far, and a digest of the round."""


class Standing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A replica's description of its own state, sent with each request for a quorum."""

    settings: str
    """A digest of everything that must be equal on all replicas."""
    round: int = 0
    """The last round in which this replica took part. Every quorum begins a new one."""
    committed: Commit | None = None
    """The weights that this replica has. None if it has just started."""
    prepared: Commit | None = None
    """The result that it has, but has not committed."""
    attempted: Commit | None = None
    """The last exchange to which it contributed."""
    session: str = ""
    """The connections that it has to other replicas."""


class Member(msgspec.Struct, frozen=True):
    """A member of a quorum."""

    replica: str
    """Its identity, which no later process has: the name that the user gave it, a colon, and random digits."""
    store: str
    """The address of its store, as ADDRESS/PORT."""
    standing: Standing

    @property
    def name(self) -> str:
        return self.replica.rpartition(":")[0]


class Resolution(msgspec.Struct, frozen=True):
    """The conclusion that all members of a quorum draw from their standings."""

    round: int
    key: str
    """A digest of the round. No other round has the same."""
    agreed: Commit | None
    """The weights from which training continues. None if nobody has any: then the first member's are used."""
    contributors: tuple[Member, ...]
    """Members that have these weights, or are prepared for them, in the order of their identities."""
    joining: tuple[Member, ...]
    """Members that must get them."""
    refused: tuple[Member, ...]
    """Members with other settings. They take no part."""


def resolve(members: Sequence[Member]) -> Resolution:
    """Return what the members of a quorum conclude. The order of the members does not matter."""
    members = sorted(members, key=lambda member: member.replica)
    trained = [member for member in members if member.standing.committed is not None]
    settings = _commonest(trained or members)
    taking_part = [member for member in members if member.standing.settings == settings]
    refused = tuple(member for member in members if member.standing.settings != settings)
    round_ = 1 + max(member.standing.round for member in taking_part)
    text = "\n".join([str(round_), *(f"{m.replica} {m.standing.round} {m.standing.session}" for m in taking_part)])
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    agreed = _agreed([member.standing for member in taking_part])
    current = [m for m in taking_part if agreed in (m.standing.committed, m.standing.prepared)] if agreed else []
    joining = tuple(member for member in taking_part if member not in current)
    return Resolution(round_, key, agreed, tuple(current), joining, refused)


def _agreed(standings: Sequence[Standing]) -> Commit | None:
    """Return the weights from which training continues."""
    newest = max((s.committed for s in standings if s.committed is not None), default=None)
    prepared = {s.prepared for s in standings if s.prepared is not None}
    for candidate in sorted(prepared, reverse=True):
        if newest is not None and candidate <= newest:
            break  # committed by a member, or superseded
        if all(s.prepared == candidate for s in standings if s.attempted == candidate):
            return candidate
    return newest


def _commonest(members: Sequence[Member]) -> str:
    """Return the settings of most members. With equal numbers, those of the first."""
    counts: Mapping[str, int] = {m.standing.settings: 0 for m in members}
    return max(counts, key=lambda settings: sum(m.standing.settings == settings for m in members))
