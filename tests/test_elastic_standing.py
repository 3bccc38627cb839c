"""What the members of a quorum conclude: all of them the same, and never two histories of the weights."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.elastic.standing import Commit, Member, Standing, resolve

OLD, NEW = (3, 7, "old"), (4, 8, "new")


def member(name: str, **standing: object) -> Member:
    return Member(f"{name}:1", "127.0.0.1/1", Standing("same", **standing))  # type: ignore[arg-type]


def names(members: tuple[Member, ...]) -> str:
    return "".join(member.name for member in members)


def test_the_first_of_new_replicas_begins_and_the_others_get_its_weights() -> None:
    resolution = resolve([member("b"), member("a"), member("c")])
    assert (resolution.agreed, names(resolution.contributors), names(resolution.joining)) == (None, "", "abc")


def test_a_replica_without_weights_joins_those_that_have_some() -> None:
    resolution = resolve([member("a"), member("b", round=4, committed=NEW)])
    assert (resolution.agreed, names(resolution.contributors), names(resolution.joining)) == (NEW, "b", "a")


def test_a_result_that_one_replica_has_committed_is_committed_by_those_that_are_prepared() -> None:
    resolution = resolve(
        [
            member("a", round=4, committed=NEW, attempted=NEW),
            member("b", round=4, committed=OLD, prepared=NEW, attempted=NEW),
            member("c", round=4, committed=OLD, attempted=NEW),
        ]
    )
    assert (resolution.agreed, names(resolution.contributors), names(resolution.joining)) == (NEW, "ab", "c")


def test_a_result_is_dropped_if_a_contributor_does_not_have_it() -> None:
    resolution = resolve(
        [
            member("a", round=4, committed=OLD, prepared=NEW, attempted=NEW),
            member("b", round=4, committed=OLD, attempted=NEW),
        ]
    )
    assert (resolution.agreed, names(resolution.contributors)) == (OLD, "ab")


def test_a_result_is_committed_if_all_contributors_that_are_there_have_it() -> None:
    """One that has left may have committed it."""
    prepared = [member(name, round=4, committed=OLD, prepared=NEW, attempted=NEW) for name in "ab"]
    resolution = resolve([*prepared, member("c")])
    assert (resolution.agreed, names(resolution.contributors), names(resolution.joining)) == (NEW, "ab", "c")


def test_a_replica_that_was_left_out_joins_again() -> None:
    ahead = (9, 12, "ahead")
    resolution = resolve([member("a", round=4, committed=NEW), member("b", round=9, committed=ahead)])
    assert (resolution.agreed, names(resolution.joining)) == (ahead, "a")


def test_a_replica_with_other_settings_takes_no_part() -> None:
    other = Member("a:1", "127.0.0.1/1", Standing("other"))
    resolution = resolve([other, member("b", round=4, committed=NEW), member("c", round=4, committed=NEW)])
    assert (names(resolution.refused), names(resolution.contributors)) == ("a", "bc")


@dataclass
class Model:
    """A replica, reduced to what it states and to the history of its weights."""

    name: str
    standing: Standing = field(default_factory=lambda: Standing("same"))
    history: tuple[Commit, ...] = ()
    result: tuple[Commit, ...] | None = None

    @property
    def member(self) -> Member:
        return Member(f"{self.name}:1", "127.0.0.1/1", self.standing)

    def state(self, **fields: object) -> None:
        self.standing = msgspec.structs.replace(self.standing, **fields)


def play(models: list[Model], outcomes: dict[str, str]) -> None:
    """One round among some replicas. Each contributor has a result, none, or also sees that all have one; or it does
    not even hear of the quorum."""
    resolution = resolve([model.member for model in models])
    assert resolve([model.member for model in reversed(models)]) == resolution
    heard = [model for model in models if outcomes[model.name] != "deaf"]
    contributing = {m.replica for m in resolution.contributors}
    for model in heard:
        before, result = model.standing, model.result
        model.result = None
        model.state(round=resolution.round, prepared=None)
        if before.prepared is not None and before.prepared == resolution.agreed and result is not None:
            model.history = result
            model.state(committed=before.prepared)
    everyone = {model.member.replica: model for model in models}
    contributors = [everyone[m.replica] for m in resolution.contributors]
    current = [model for model in contributors if model in heard]
    assert len({model.history for model in current}) <= 1, "contributors with different weights"
    for model in current:
        commit = (resolution.round, (resolution.agreed or (0, 0, ""))[1] + 1, resolution.key)
        model.state(attempted=commit)
        if outcomes[model.name] in ("prepared", "committed") and len(current) == len(contributors):
            model.result = (*model.history, commit)
            model.state(prepared=commit)
    all_prepared = bool(contributors) and all(m.result is not None and m in heard for m in contributors)
    for model in current:
        if all_prepared and outcomes[model.name] == "committed" and model.result is not None:
            model.history, model.result = model.result, None
            model.state(committed=model.standing.prepared, prepared=None)
    sources = [m for m in current if m.standing.prepared is None and outcomes[m.name] == "committed"]
    joining = [model for model in heard if model.member.replica not in contributing]
    if not contributors and joining and joining[0] is models[0]:
        first = (resolution.round, 0, resolution.key)
        for model in joining:
            model.history = (first,)
            model.state(committed=first, attempted=None)
    elif sources and sources[0] is contributors[0] and all_prepared:
        for model in joining:
            model.history = sources[0].history
            model.state(committed=sources[0].standing.committed, attempted=None)


OUTCOMES = ["committed", "prepared", "failed", "deaf"]
ROUND = st.tuples(
    st.sets(st.sampled_from("abcd"), min_size=1),
    st.fixed_dictionaries(dict.fromkeys("abcd", st.sampled_from(["committed", *OUTCOMES]))),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(ROUND, max_size=14), st.lists(st.sampled_from("abcd"), max_size=3))
def test_whatever_fails_contributors_always_have_the_same_weights(
    rounds: list[tuple[set[str], dict[str, str]]], dying: list[str]
) -> None:
    models = {name: Model(name) for name in "abcd"}
    play(list(models.values()), dict.fromkeys("abcd", "committed"))
    for number, (present, outcomes) in enumerate(rounds):
        if number % 4 == 3 and dying:
            name = dying.pop()
            models[name] = Model(name)  # killed, and started again
        play([models[name] for name in sorted(present)], outcomes)
