"""Statistics of a replica that trains with others that come and go."""

from __future__ import annotations

from dataclasses import dataclass

from syncline.runtime.stats import Stats


@dataclass(frozen=True)
class ElasticStats(Stats):
    """Statistics of an exchange with a manager, as `Handle.stats` returns them.

    Example:
        >>> while handle.stats().exchanges < 500:
        ...     step()
    """

    exchanges: int
    """Number of exchanges whose result was applied, since the training began. Equal on all replicas."""
    replicas: tuple[str, ...]
    """The names of the replicas in the last exchange."""
    failed: int
    """Number of times that an exchange of this replica failed. Each was repeated, or skipped."""
    skipped: int
    """Number of times that this replica has continued without an exchange, because the others could not be reached."""
    joins: int
    """Number of replicas that have joined or come back while this one was there."""
    leaves: int
    """Number of replicas that have left while this one was there."""
    rejoins: int
    """Number of times that this replica was left out, and has come back with the state of another one."""
    longest_stop_s: float
    """The longest time for which an exchange has stopped this replica, without the time in which it joined."""
