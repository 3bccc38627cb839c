"""Plan files: loading, saving and validation, comparison with a model, and exchanges as data."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import made_up
from syncline.exchange import EXCHANGES, AllgatherTopk, Dense, Exchange, Hierarchical, OkTopk, made_of, settings
from syncline.files import FileError
from syncline.records.plan import MAX_LANES, Alternative, Plan, PlannedBucket, PlannedGradient, Where
from syncline.records.profile import ITEM_BYTES

loose = hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

SPARSE_BETWEEN_HOSTS = Hierarchical(across=OkTopk(density=0.05), shape="leader", chunks=2)
HERE = Where(host_of_rank=(0, 0, 1, 1), backend="gloo", device="cpu")


def gradient(name: str, shape: tuple[int, ...], dtype: str = "float32") -> PlannedGradient:
    return PlannedGradient(name=name, shape=shape, dtype=dtype)


def bucket(*parameters: str, lane: int = 0, exchange: Exchange | None = None) -> PlannedBucket:
    return PlannedBucket(parameters=parameters, lane=lane, exchange=settings(exchange or Dense()))


def plan(
    gradients: tuple[PlannedGradient, ...], buckets: tuple[PlannedBucket, ...], *, lanes: int = 1, where: Where = HERE
) -> Plan:
    alternatives = (
        Alternative(name="do nothing: plain DDP", iteration_s=0.1, lossless=True),
        Alternative(name="all at once", iteration_s=0.07, lossless=False),
    )
    return made_up.plan(gradients, buckets, where, lanes=lanes, alternatives=alternatives)


PLAN = plan(
    (
        gradient("head.weight", (10, 8)),
        gradient("head.bias", (10,)),
        gradient("body.0.weight", (8, 3, 3), "bfloat16"),
        gradient("scale", ()),
    ),
    (
        bucket("head.weight", "head.bias"),
        bucket("body.0.weight", lane=1, exchange=Dense(wire="bf16")),
        bucket("scale", exchange=SPARSE_BETWEEN_HOSTS),
    ),
    lanes=2,
)
NOTHING = msgspec.structs.replace(PLAN, buckets=(), lanes=1)
PARAMETERS = {one.name: (one.shape, one.dtype) for one in PLAN.gradients}

TREE = json.loads(json.dumps(msgspec.to_builtins(PLAN)))
Place = tuple[str | int, ...]


def places(tree: Any, so_far: Place = ()) -> list[Place]:
    """Yield the path to every value of a JSON tree, including inner nodes."""
    branches = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    found = [so_far] if so_far else []
    return found + [place for key, branch in branches for place in places(branch, (*so_far, key))]


def at(tree: Any, place: Place) -> Any:
    for key in place:
        tree = tree[key]
    return tree


def written(place: Place) -> str:
    """Format a path as errors do: `buckets[0].lane`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place).lstrip(".")


def in_an_exchange(place: Place) -> bool:
    return "exchange" in place[:-1]


PLACES = places(TREE)
KEYS = [place for place in PLACES if isinstance(place[-1], str) and not in_an_exchange(place)]
NUMBERS = [place for place in PLACES if type(at(TREE, place)) in (int, float)]
OBJECTS: list[Place] = [
    (),
    *(place for place in PLACES if isinstance(at(TREE, place), dict) and "exchange" not in place),
]
"""Paths outside exchange settings, whose errors have other wordings."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


def edited(path: Path, place: Place, value: Any) -> Path:
    """Write the valid plan with one value changed or added at any depth."""
    tree = json.loads(json.dumps(TREE))
    at(tree, place[:-1])[place[-1]] = value
    path.write_text(json.dumps(tree), encoding="utf-8")
    return path


def refusal(path: Path) -> str:
    """Return the error of loading a file, checked to be one line that begins with the file's name."""
    with pytest.raises(FileError) as caught:
        Plan.load(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert len(text.splitlines()) == 1
    return text.removeprefix(f"{path}: ")


# --- saving and loading ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [PLAN, NOTHING], ids=["buckets", "nothing"])
def test_a_saved_plan_loads_as_itself(path: Path, made: Plan) -> None:
    made.save(path)
    assert Plan.load(path) == made
    text = path.read_text(encoding="utf-8")
    Plan.load(path).save(path)
    assert path.read_text(encoding="utf-8") == text


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Generate plans with any layout. The gradients of a bucket have one dtype, and need not be neighbours."""
    lanes = draw(st.integers(1, MAX_LANES))
    shapes = st.lists(st.integers(0, 50), max_size=3).map(tuple)
    gradients, held = [], dict[tuple[str, int], list[str]]()
    for index in range(draw(st.integers(1, 8))):
        name, dtype = draw(st.sampled_from(["a", "b.ü", "c.0"])) + str(index), draw(st.sampled_from(list(ITEM_BYTES)))
        gradients.append(gradient(name, draw(shapes), dtype))
        held.setdefault((dtype, draw(st.integers(0, 2))), []).append(name)
    buckets = tuple(
        bucket(
            *names, lane=draw(st.integers(0, lanes - 1)), exchange=EXCHANGES[draw(st.sampled_from(list(EXCHANGES)))]()
        )
        for names in held.values()
    )
    return plan(tuple(gradients), buckets, lanes=lanes)


@given(made=plans())
@loose
def test_any_plan_loads_as_itself_and_its_caps_are_one_types_buckets(path: Path, made: Plan) -> None:
    made.save(path)
    assert Plan.load(path) == made
    nbytes = {one.name: math.prod(one.shape) * ITEM_BYTES[one.dtype] for one in made.gradients}
    types = {one.name: one.dtype for one in made.gradients}
    by_type: dict[str, list[int]] = {}
    for one in made.buckets:
        by_type.setdefault(types[one.parameters[0]], []).append(sum(nbytes[name] for name in one.parameters))
    caps = {tuple(max(1, size) for size in sizes) for sizes in by_type.values()}
    assert made.caps in caps
    assert sum(made.caps) == max(map(sum, caps))


def test_caps_are_the_bytes_of_the_buckets_of_the_type_with_most() -> None:
    assert PLAN.caps == (4 * (80 + 10), 4)
    heavy = msgspec.structs.replace(PLAN.gradients[2], shape=(8, 30, 3))
    more = msgspec.structs.replace(PLAN, gradients=(*PLAN.gradients[:2], heavy, PLAN.gradients[3]))
    assert more.caps == (2 * 8 * 30 * 3,)


def test_a_plan_without_buckets_leaves_plain_ddp_alone() -> None:
    assert NOTHING.nothing and not PLAN.nothing
    assert (NOTHING.caps, NOTHING.exchanges) == ((), ())
    assert NOTHING.lossless


def test_a_plan_is_lossless_if_all_its_buckets_are() -> None:
    assert not PLAN.lossless
    buckets = tuple(msgspec.structs.replace(one, exchange=settings(Hierarchical())) for one in PLAN.buckets)
    assert msgspec.structs.replace(PLAN, buckets=buckets).lossless


# --- strictness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", KEYS, ids=written)
def test_a_missing_key_is_named(path: Path, place: Place) -> None:
    tree = json.loads(json.dumps(TREE))
    del at(tree, place[:-1])[place[-1]]
    path.write_text(json.dumps(tree), encoding="utf-8")
    assert refusal(path).startswith(f"{written(place)}: is missing")


@pytest.mark.parametrize("place", OBJECTS, ids=written)
def test_an_unknown_key_is_named(path: Path, place: Place) -> None:
    assert refusal(edited(path, (*place, "extra"), 1)).startswith(f"{written((*place, 'extra'))}: is not a known key")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", NUMBERS, ids=written)
def test_nan_is_refused_in_every_field(path: Path, place: Place, value: float) -> None:
    assert refusal(edited(path, place, value)) == f"{written(place)}: must be a finite number, not {value}"


@pytest.mark.parametrize(
    ("place", "value", "expected"),
    [
        (("schema",), 2, "schema: is 2, and this release reads up to 1; upgrade syncline"),
        (("schema",), 0, "schema: is 0, and this release reads 1; write the file again"),
        (("schema",), True, "schema: must be the whole number 1"),
        (("lanes",), 0, "lanes: must be at least 1"),
        (("lanes",), 17, "lanes: must be at most 16"),
        (("low_s",), -0.1, "low_s: must be at least 0"),
        (("where", "host_of_rank"), [], "where.host_of_rank: must have a length of at least 1"),
        (("where", "backend"), 3, "where.backend: expected str, got int"),
        (("gradients",), [], "gradients: must have a length of at least 1"),
        (("gradients", 1, "name"), "head.weight", "gradients[1].name: head.weight appears twice"),
        (("gradients", 0, "dtype"), "int32", "gradients[0].dtype: int32 is unknown"),
        (("gradients", 0, "shape"), [-10, -8], "gradients[0].shape[0]: must be at least 0"),
        (("gradients", 0, "shape"), [2**40, 2**40], "gradients[0].shape: has too many elements"),
        (("gradients", 0, "shape"), "10x8", "gradients[0].shape: expected array, got str"),
        (("gradients", 0, "name"), "neck", "buckets[0].parameters: head.weight is not among the gradients"),
        (("buckets", 2, "parameters"), [], "buckets[2].parameters: must have a length of at least 1"),
        (("buckets", 2, "parameters"), ["scale", "rest"], "buckets[2].parameters: rest is not among the gradients"),
        (("buckets", 2, "parameters"), ["head.bias"], "buckets[2].parameters: head.bias is in buckets[0], too"),
        (("buckets", 2, "parameters"), ["scale"] * 2, "buckets[2].parameters: scale is in buckets[2], too"),
        (("buckets", 0, "parameters"), ["head.weight"], "buckets: head.bias is in none of them"),
        (("buckets",), TREE["buckets"][:2], "buckets: scale is in none of them"),
        (("buckets", 1, "lane"), 2, "buckets[1].lane: is 2; the plan has lanes 0 to 1"),
        (("buckets", 0, "lane"), -1, "buckets[0].lane: must be at least 0"),
        (("buckets", 0, "lane"), 0.5, "buckets[0].lane: expected int, got float"),
        (("buckets", 0, "exchange", "type"), "Dance", "buckets[0].exchange: no exchange is of type 'Dance'; known: De"),
        (("buckets", 0, "exchange", "type"), None, "buckets[0].exchange: no exchange is of type None"),
        (("buckets", 0, "exchange"), {}, "buckets[0].exchange: no exchange is of type None"),
        (("buckets", 0, "exchange"), [], "buckets[0].exchange: expected object, got array"),
        (
            ("buckets", 0, "exchange", "wires"),
            1,
            "buckets[0].exchange: Dense has no setting 'wires'; it has: roundings",
        ),
        (("buckets", 1, "exchange", "wire"), "fp8", "buckets[1].exchange: Dense(wire='fp8'): wire must be one of"),
        (("buckets", 1, "exchange", "wire"), ["bf16"], "buckets[1].exchange: Dense(wire=['bf16']): "),
        (("buckets", 2, "exchange", "across", "density"), 7, "buckets[2].exchange: OkTopk(density=7): density must be"),
        (("buckets", 2, "exchange", "across", "k"), 7, "buckets[2].exchange: OkTopk has no setting 'k'"),
        (("buckets", 2, "exchange", "across", "type"), "Mine", "buckets[2].exchange: no exchange is of type 'Mine'"),
        (("buckets", 2, "exchange", "across"), "OkTopk", "buckets[2].exchange: Hierarchical(across='OkTopk'): pass an"),
        (("buckets", 2, "exchange", "levels"), [[0, "1"]], "buckets[2].exchange: levels="),
    ],
)
def test_contradictions_name_the_field(path: Path, place: Place, value: Any, expected: str) -> None:
    assert refusal(edited(path, place, value)).startswith(expected)


def test_types_in_one_bucket_are_named(path: Path) -> None:
    together = [{**TREE["buckets"][0], "parameters": ["head.weight", "body.0.weight", "head.bias", "scale"]}]
    assert refusal(edited(path, ("buckets",), together)) == (
        "buckets[0].parameters: are bfloat16 and float32; a bucket must have one dtype"
    )


def test_a_contradiction_cannot_be_constructed_either() -> None:
    with pytest.raises(ValueError, match=r"^buckets\[1\]\.parameters: a is in buckets\[0\], too$"):
        plan((gradient("a", (3,)),), (bucket("a"), bucket("a")))


def test_a_time_that_is_not_a_number_is_not_written(path: Path) -> None:
    with pytest.raises(FileError, match=r"plan\.json: not written: iteration_s: must be a finite number, not nan$"):
        msgspec.structs.replace(PLAN, iteration_s=math.nan).save(path)


@given(data=st.data())
@loose
def test_a_truncated_plan_is_refused(path: Path, data: st.DataObject) -> None:
    PLAN.save(path)
    text = path.read_text(encoding="utf-8").rstrip()
    path.write_text(text[: data.draw(st.integers(1, len(text) - 1))], encoding="utf-8")
    assert refusal(path).startswith("is not complete JSON")


@given(
    place=st.sampled_from(PLACES),
    value=st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=4),
        st.lists(st.integers() | st.text(max_size=2), max_size=3),
        st.dictionaries(st.sampled_from(["type", "name", "lane"]), st.sampled_from(["Dense", "a", 0]), max_size=2),
    ),
)
@loose
def test_any_edit_loads_or_is_refused_in_one_line(path: Path, place: Place, value: Any) -> None:
    edited(path, place, value)
    try:
        loaded = Plan.load(path)
    except FileError:
        refusal(path)
    else:
        assert {name for one in loaded.buckets for name in one.parameters} in (
            {one.name for one in loaded.gradients},
            set(),
        )
        assert len(loaded.exchanges) == len(loaded.buckets)


def test_a_network_in_a_plans_place_is_recognised(path: Path) -> None:
    made_up.network().save(path)
    assert refusal(path).startswith("is a network, but another kind of file is needed here")


def test_a_missing_file_is_an_error_that_names_it(path: Path) -> None:
    assert refusal(path).startswith("cannot be read")


def test_a_plan_that_cannot_be_written_leaves_the_old_file_and_nothing_else(path: Path) -> None:
    PLAN.save(path)
    with pytest.raises(FileError, match=r"plan\.json: not written") as caught:
        msgspec.structs.replace(PLAN, reason="half a character: \ud800").save(path)
    assert len(str(caught.value).splitlines()) == 1
    assert Plan.load(path) == PLAN
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_is_not_there_is_an_error_that_names_the_file(path: Path) -> None:
    with pytest.raises(FileError, match=r"nowhere/plan\.json: cannot be written: No such file"):
        PLAN.save(path.parent / "nowhere" / "plan.json")
    assert list(path.parent.iterdir()) == []


# --- comparison with a model -----------------------------------------------------------------------------------------


def test_a_plan_fits_what_it_was_made_for_in_whatever_order_it_is_listed() -> None:
    assert PLAN.difference(PARAMETERS, HERE) is None
    assert PLAN.difference(dict(reversed(PARAMETERS.items())), HERE) is None
    assert NOTHING.difference(PARAMETERS, HERE) is None


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (
            {name: found for name, found in PARAMETERS.items() if name != "head.bias"},
            "the plan's parameter head.bias is not in the model",
        ),
        ({**PARAMETERS, "tail.bias": ((3,), "float32")}, "the model's parameter tail.bias is not in the plan"),
        (
            {**PARAMETERS, "head.weight": ((8, 10), "float32")},
            "parameter head.weight is float32 of shape [8, 10], but float32 of shape [10, 8] in the plan",
        ),
        (
            {**PARAMETERS, "body.0.weight": ((8, 3, 3), "float16")},
            "parameter body.0.weight is float16 of shape [8, 3, 3], but bfloat16 of shape [8, 3, 3] in the plan",
        ),
        ({}, "the plan's parameter head.weight is not in the model"),
    ],
    ids=["missing", "new", "shape", "dtype", "none"],
)
def test_another_model_is_refused_with_the_parameter_that_differs(
    parameters: dict[str, tuple[tuple[int, ...], str]], expected: str
) -> None:
    assert PLAN.difference(parameters, HERE) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"backend": "nccl"}, "the plan is for backend gloo, but this job uses nccl"),
        ({"device": "cuda"}, "the plan is for device cpu, but this job uses cuda"),
        ({"host_of_rank": (0, 0, 1)}, "the plan is for 4 ranks, but this job has 3"),
        (
            {"host_of_rank": (0, 1, 0, 1)},
            "the plan is for ranks on hosts [0, 0, 1, 1], but the ranks of this job are on hosts [0, 1, 0, 1]",
        ),
    ],
    ids=["backend", "device", "ranks", "hosts"],
)
def test_another_cluster_is_refused_with_the_difference(changes: dict[str, Any], expected: str) -> None:
    assert PLAN.difference(PARAMETERS, msgspec.structs.replace(HERE, **changes)) == expected


# --- exchanges as data ----------------------------------------------------------------------------------------------

KINDS = {
    **{name: make() for name, make in EXCHANGES.items()},
    "sparse": OkTopk(density=0.001, values="fp32", warmup=100, momentum=0.9),
    "sparse by gathering": AllgatherTopk(density=0.2, values="bf16"),
    "sparse between hosts": SPARSE_BETWEEN_HOSTS,
    "sizes": Hierarchical(levels=(2, 2), shape="sharded"),
    "nested": Hierarchical(levels=[[[0, 1], [2]], [[3], [4, 5]]], chunks=7),
    "16 bits everywhere": Hierarchical(within=Dense(wire="bf16"), across=Dense(wire="fp16")),
    "gathered between hosts": Hierarchical(across=AllgatherTopk()),
}


@pytest.mark.parametrize("exchange", KINDS.values(), ids=list(KINDS))
def test_every_exchange_is_made_again_of_its_settings(exchange: Exchange, path: Path) -> None:
    assert made_of(settings(exchange)) == exchange
    assert made_of(json.loads(json.dumps(settings(exchange)))) == exchange
    plan((gradient("a", (3,)),), (bucket("a", exchange=exchange),)).save(path)
    assert Plan.load(path).exchanges == (exchange,)


@given(
    density=st.floats(1e-4, 1),
    values=st.sampled_from(["fp32", "bf16", "fp16"]),
    warmup=st.integers(0, 10**6),
    momentum=st.floats(0, 1, exclude_max=True),
    chunks=st.none() | st.integers(1, 1024),
)
def test_settings_survive_json_to_the_last_digit(
    density: float, values: str, warmup: int, momentum: float, chunks: int | None
) -> None:
    inner = OkTopk(density=density, values=values, warmup=warmup, momentum=momentum)
    outer = Hierarchical(across=inner, chunks=chunks)
    assert made_of(json.loads(json.dumps(settings(outer)))) == outer


def test_settings_that_are_left_out_are_the_usual_ones() -> None:
    assert made_of({"type": "OkTopk", "density": 0.5}) == OkTopk(density=0.5)
    assert made_of({"type": "Hierarchical", "across": {"type": "OkTopk"}}) == Hierarchical(across=OkTopk())


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        ({}, "no exchange is of type None; known: Dense, Hierarchical, Quantized, OkTopk, AllgatherTopk, ChunkedTopk"),
        ({"type": ["Dense"]}, "no exchange is of type"),
        ({"type": "dense"}, "no exchange is of type 'dense'"),
        ({"type": "Dense", "wire": ["bf16"]}, r"^Dense\(wire=\['bf16'\]\): wire must be one of fp32, bf16, fp16"),
        (
            {"type": "OkTopk", "k": 3},
            "OkTopk has no setting 'k'; it has: decay, density, mean, momentum, values, warmup",
        ),
        ({"type": "OkTopk", "warmup": 1.5}, r"OkTopk\(warmup=1.5\): warmup must be a number of steps"),
        ({"type": "Hierarchical", "across": {"type": "Hierarchical"}}, "use one Hierarchical, with as many levels"),
        ({"type": "Hierarchical", "within": {"type": "OkTopk"}}, "within must be a Dense exchange"),
        ({"type": "Hierarchical", "shape": "sharded", "across": {"type": "OkTopk"}}, "residual must stay on one rank"),
    ],
)
def test_invalid_settings_are_refused_with_a_reason(described: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        made_of(described)
