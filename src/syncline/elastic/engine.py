"""Exchange the updates of a replica with those that are there, every few steps.

The optimizer's step calls `Engine.after_step`. When an exchange is due, the replica asks the lighthouse for a quorum,
connects to its members if they have changed, exchanges, and commits the result when all contributors have it. If any of
this fails, nothing is applied: the update stays in the replica's weights, the residual is what it was, and the replica
asks for the next quorum. After `_LIMIT_S` it trains on, and takes part when the quorum is there. It never raises.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYetError
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from syncline.dist.agreement import flatten
from syncline.dist.comm import gather_bytes
from syncline.elastic.groups import Connections, connect, run_within
from syncline.elastic.manager import Manager, Quorum
from syncline.elastic.standing import Commit, Member, Resolution, Standing, resolve
from syncline.elastic.stats import ElasticStats
from syncline.elastic.transfer import receive, send
from syncline.elastic.weights import Result, Weights
from syncline.errors import MismatchError, UsageError, first_line, warn
from syncline.updates.policy import UpdatePolicy

_log = logging.getLogger("syncline.elastic")

_LIMIT_S = 13.0
"""Time after which a replica trains on without having exchanged."""
_CONNECT_S, _JOIN_CONNECT_S = 5.0, 7.0
"""Time in which members of a quorum must connect. The source of a state connects to the contributors first."""
_JOIN_TIMEOUT_S = 60.0
"""Time for which a joining replica waits for the next part of its state."""
_REPORT_S = 60.0
"""Time after which a joining replica logs that it still waits."""


class Vote(msgspec.Struct, frozen=True):
    """A contributor's message to the others when it has a result."""

    digest: str
    residual_norm: float


class Engine:
    """The exchange of updates that is attached to a replica's model."""

    def __init__(
        self, weights: Weights, policy: UpdatePolicy, manager: Manager, timeout_s: float, settings: dict[str, Any]
    ) -> None:
        self.policy, self.manager = policy, manager
        self._weights, self._timeout_s = weights, timeout_s
        digest = hashlib.sha256(msgspec.json.encode(flatten(settings), order="deterministic")).hexdigest()
        self._standing = Standing(digest[:16])
        self.connections: Connections | None = None
        """The connections with the replicas of the last exchange."""
        self._result: Result | None = None  # prepared, and not committed or dropped yet
        self._pending: Future[Quorum] | None = None
        self._own: list[Tensor] | None = None  # this replica's weights, inside `synced`
        self._names: dict[str, str] = {}  # of the replicas in the last exchange, by identity
        self._residual_norms: dict[str, float] = {}
        self._since = 0  # steps since the last commit
        self._sent_before: dict[str, int] = {}
        self.stats = ElasticStats(0, {}, {}, (), 0, (), 0, 0, 0, 0, 0, 0.0)
        self.hooks: list[RemovableHandle] = []  # of the optimizer, which call this engine
        self.is_closed = False

    # --- when ---------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Wait until this replica has the weights of the others, or begins with them."""
        reported_s = time.monotonic()
        while self._standing.committed is None:
            self._pending = self._pending or self.manager.ask(self._standing)
            try:
                quorum = self._pending.result(1.0)
            except CancelledError:
                raise UsageError("the manager was shut down before this replica had joined the others") from None
            except NotYetError:
                if time.monotonic() - reported_s > _REPORT_S:
                    reported_s = time.monotonic()
                    _log.warning("%s still waits for the other replicas", self.manager.name)
                continue
            self._pending = None
            self._take_part(quorum)

    def after_step(self) -> None:
        """Exchange, if it is time to. Called after each step of the optimizer."""
        self._since += 1
        self._count(steps=1)
        if self.manager.is_shut_down:
            return
        late = self._pending is not None  # the limit was exceeded, and the quorum may have come since
        if self._since < self.policy.every and not late:
            return
        if late and self._pending is not None and not self._pending.done():
            return
        begun_s = time.monotonic()
        rejoins = self.stats.rejoins
        with torch.no_grad():
            self._exchange(begun_s + _LIMIT_S)
        if self.stats.rejoins == rejoins:
            longest_s = max(self.stats.longest_stop_s, time.monotonic() - begun_s)
            self.stats = replace(self.stats, longest_stop_s=longest_s)

    def _exchange(self, until_s: float) -> None:
        """Take part in quorums until an exchange is committed, or until the time is over."""
        committed = self._standing.committed
        while True:
            self._pending = self._pending or self.manager.ask(self._standing)
            try:
                quorum = self._pending.result(max(0.0, until_s - time.monotonic()))
            except (NotYetError, CancelledError):  # the second after `Manager.shutdown`
                break
            self._pending = None
            self._take_part(quorum)
            if self._standing.committed not in (None, committed):
                self._since = 0
                return
        self._count(skipped=1)
        _log.warning("%s: no exchange within %.0f s, so training continues without one", self.manager.name, _LIMIT_S)

    def _count(self, **more: Any) -> None:
        self.stats = replace(self.stats, **{name: getattr(self.stats, name) + count for name, count in more.items()})

    # --- one quorum ---------------------------------------------------------------------------------------------

    def _take_part(self, quorum: Quorum) -> None:
        resolution = resolve(quorum)
        me = self.manager.replica
        if any(member.replica == me for member in resolution.refused):
            text = "this replica has other settings, another model or another version than those that train"
            raise MismatchError(f"{text}: use the same on all replicas")
        self._standing = msgspec.structs.replace(self._standing, round=resolution.round)
        try:
            self._resolve_result(resolution)
            if any(member.replica == me for member in resolution.contributors):
                self._contribute(resolution)
            else:
                self._become_current(resolution)
        except Exception as error:  # noqa: BLE001 - whatever has failed, training goes on
            self._drop_connections()
            self._count(failed=1)
            _log.info("%s: an exchange failed: %s", self.manager.name, first_line(error))

    def _resolve_result(self, resolution: Resolution) -> None:
        """Commit or drop the result of an exchange whose end this replica has not seen."""
        prepared, result = self._standing.prepared, self._result
        self._result, self._standing = None, msgspec.structs.replace(self._standing, prepared=None)
        if prepared is not None and result is not None and prepared == resolution.agreed:
            self._commit(prepared, result)

    def _contribute(self, resolution: Resolution) -> None:
        contributors = resolution.contributors
        self._note_changes(contributors)
        source = contributors[0].replica == self.manager.replica
        connections = self._connected(resolution)
        healing = self._heal_connections(resolution, contributors[0]) if source and resolution.joining else None
        try:
            assert resolution.agreed is not None  # noqa: S101 - there are contributors
            number = resolution.agreed[1] + 1
            commit: Commit = (resolution.round, number, resolution.key)
            self._standing = msgspec.structs.replace(self._standing, attempted=commit)
            result = self._computed(connections, number)
            self._result, self._standing = result, msgspec.structs.replace(self._standing, prepared=commit)
            votes = self._votes(connections, Vote(result.digest, self._weights.residual_norm()))
            if len({vote.digest for vote in votes}) > 1:
                self._result, self._standing = None, msgspec.structs.replace(self._standing, prepared=None)
                _log.error("the results of the replicas differ in exchange %d, so none is applied", number)
                raise MismatchError("the results of the replicas differ")
            self._residual_norms = {m.replica: v.residual_norm for m, v in zip(contributors, votes, strict=True)}
            self._result, self._standing = None, msgspec.structs.replace(self._standing, prepared=None)
            self._commit(commit, result)
            if healing is not None:
                self._heal(healing, commit)
        finally:
            if healing is not None:
                healing.close()

    def _connected(self, resolution: Resolution) -> Connections:
        """Return the connections with the contributors. They are kept if all of them still have them."""
        old, contributors = self.connections, resolution.contributors
        if old is not None and not old.is_closed:
            kept = all(member.standing.session == old.key for member in contributors)
            if kept and {m.replica for m in contributors} == {m.replica for m in old.members}:
                return old
        self._drop_connections()
        made = self._connect(resolution.key, contributors)
        self.connections = made
        self._weights.forget_states()
        run_within(self._timeout_s, lambda: self._weights.prepare(made.ready))
        self._standing = msgspec.structs.replace(self._standing, session=made.key)
        self._sent_before = {}
        return made

    def _connect(self, key: str, members: tuple[Member, ...]) -> Connections:
        manager, exchanges = self.manager, self.policy.exchanges
        return connect(key, members, manager.replica, manager.address, exchanges, self._timeout_s, _CONNECT_S)

    def _connect_to_join(
        self, key: str, members: tuple[Member, ...], limit_s: float, timeout_s: float = _JOIN_TIMEOUT_S
    ) -> Connections:
        manager = self.manager
        return connect(f"{key}/join", members, manager.replica, manager.address, (), timeout_s, limit_s)

    def _drop_connections(self) -> None:
        """Close the connections, so that the others do not wait for this replica either."""
        if self.connections is not None:
            self.connections.close()
        self.connections = None
        self._standing = msgspec.structs.replace(self._standing, session="")

    def _computed(self, connections: Connections, number: int) -> Result:
        """Exchange all fragments, without applying anything."""
        weights, comm = self._weights, connections.ready
        weights.find()
        sent = weights.gathered()
        means, finite = weights.updates(sent), []
        for index, flat in enumerate(means):
            finite.append(run_within(self._timeout_s + 1, partial(weights.exchange, index, flat, number, comm)))
        return Result(self.stats.steps, sent, means, finite, list(weights.fragments))

    def _votes(self, connections: Connections, vote: Vote) -> list[Vote]:
        encoded = msgspec.json.encode(vote)
        gathered = run_within(self._timeout_s + 1, lambda: gather_bytes(connections.group, encoded))
        return [msgspec.json.decode(data, type=Vote) for data in gathered]

    def _commit(self, commit: Commit, result: Result) -> None:
        if self._own is not None:
            raise UsageError("an exchange inside handle.synced()")  # `before_step` prevents it
        self._weights.find()
        # If only some of the weights get the result, the replica must not commit it again, but join.
        self._standing = msgspec.structs.replace(self._standing, committed=None)
        if not self._weights.commit(result, self.stats.steps):
            warn("the updates are not finite, so all replicas return to the weights that they agreed on last")
        self._standing = msgspec.structs.replace(self._standing, committed=commit)
        self.stats = replace(self.stats, exchanges=commit[1], **self._sent())

    def _sent(self) -> dict[str, Any]:
        """Return the bytes of the last exchange, and of all, per level."""
        if self.connections is None:
            return {}
        now = dict(self.connections.ready.counter.sent_bytes)
        last = {level: sent - self._sent_before.get(level, 0) for level, sent in now.items()}
        self._sent_before = now
        before = self.stats.total_sent_bytes
        total = {level: before.get(level, 0) + last.get(level, 0) for level in {**before, **last}}
        return {"sent_bytes": last, "total_sent_bytes": total}

    # --- replicas that leave and join ---------------------------------------------------------------------------

    def _note_changes(self, contributors: tuple[Member, ...]) -> None:
        """Log who has left since the last exchange, and what is lost with it."""
        now = {member.replica: member.name for member in contributors}
        before, self._names = self._names, now
        self.stats = replace(self.stats, replicas=tuple(now.values()))
        for replica in before.keys() - now.keys():
            norm = self._residual_norms.get(replica)
            lost = "its steps since the last exchange are lost"
            if norm:
                lost += f", and its residual, which had the norm {norm:.4g}"
            _log.warning("replica %s has left: %s. %d replicas continue", before[replica], lost, len(now))
        if before:
            joined = [name for replica, name in now.items() if replica not in before]
            self._count(leaves=len(before.keys() - now.keys()), joins=len(joined))
            for name in joined:
                _log.info("replica %s takes part from now on", name)

    def _heal_connections(self, resolution: Resolution, source: Member) -> Connections | None:
        limit_s = min(_CONNECT_S, self._timeout_s / 2)  # the other contributors already wait for the exchange
        try:
            return self._connect_to_join(resolution.key, (source, *resolution.joining), limit_s)
        except Exception as error:  # noqa: BLE001 - the exchange does not depend on those that join
            _log.info("%s: a joining replica cannot be reached: %s", self.manager.name, first_line(error))
            return None

    def _heal(self, healing: Connections, commit: Commit) -> None:
        """Send the new weights to the replicas that join."""
        tensors = self._weights.complete()
        try:
            send(healing.group, {"commit": commit}, tensors)
        except Exception as error:  # noqa: BLE001
            _log.info("%s: a joining replica has not got its state: %s", self.manager.name, first_line(error))

    def _become_current(self, resolution: Resolution) -> None:
        """Get the weights and the optimizer's state from a replica that has them. If none has, use the first one's."""
        me = self.manager.replica
        source = (resolution.contributors or resolution.joining)[0]
        others = tuple(member for member in resolution.joining if member is not source)
        begins = not resolution.contributors
        timeout_s = _JOIN_TIMEOUT_S
        if resolution.contributors:  # the source first exchanges all fragments with them, and votes
            timeout_s += (len(self._weights.fragments) + 1) * (self._timeout_s + 1)
        with_source = self._connect_to_join(resolution.key, (source, *others), _JOIN_CONNECT_S, timeout_s)
        try:
            if source.replica == me:
                first: Commit = (resolution.round, self.stats.exchanges, resolution.key)
                send(with_source.group, {"commit": first}, self._weights.complete())
                self._standing = msgspec.structs.replace(self._standing, committed=first)
                return
            about, tensors = receive(with_source.group, self._weights.misfit)
            commit = msgspec.convert(about.get("commit"), Commit)
        finally:
            with_source.close()
        had_weights = self._standing.committed is not None
        if had_weights:
            lost = self._weights.update_norm()
            text = "%s was left out, and continues from %s. Its own update since then, of norm %.4g, is lost"
            _log.warning(text, self.manager.name, source.name, lost)
        self._standing = msgspec.structs.replace(self._standing, committed=None)  # until all of it is loaded
        self._weights.load(tensors)
        self._drop_connections()
        self._names, self._since = {}, 0
        self._standing = msgspec.structs.replace(self._standing, committed=commit, attempted=None)
        names = tuple(member.name for member in resolution.contributors)
        rejoins = self.stats.rejoins + had_weights
        self.stats = replace(self.stats, exchanges=commit[1], replicas=names, rejoins=rejoins)
        if not begins:
            _log.info("%s has joined after exchange %d", self.manager.name, commit[1])

    # --- for the handle -----------------------------------------------------------------------------------------

    @property
    def is_synced(self) -> bool:
        """Whether the model has the weights that replicas agreed on last, instead of this replica's own."""
        return self._own is not None

    @contextmanager
    def synced(self) -> Iterator[None]:
        """Give the model the weights that replicas agreed on last, inside this context."""
        inside_another = self.is_synced
        with torch.no_grad():
            if not inside_another:
                self._own = self._weights.use_agreed()
        try:
            yield
        finally:
            own = self._own
            if not inside_another and own is not None:
                self._own = None
                with torch.no_grad():
                    self._weights.use(own)

    def before_step(self) -> None:
        if self.is_synced:
            text = "optimizer.step() inside handle.synced(), where the model has the weights of all replicas"
            raise UsageError(f"{text}: leave the context before you train")

    def close(self) -> None:
        """Stop exchanging. The model keeps this replica's own weights."""
        self.is_closed = True
        for hook in self.hooks:
            hook.remove()
        if self._pending is not None:  # it must not ask again in the name of the next engine of this manager
            self._pending.cancel()
        self._drop_connections()
