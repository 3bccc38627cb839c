"""Hostile input: wrong or malicious files and messages are read correctly or refused, without side effects."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib.util
import json
import os
import pickle
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline
from ddp_helpers import TIMEOUT_S, Mlp, on_ranks, refusal, seeded
from hostile import FORMATS
from hostile.messages import Codes, Messages
from hostile.mutations import HEADS, Trees
from hostile.oracle import Files, Finding
from hostile.states import ABOUT, STATES, TENSORS, same_state
from syncline.cluster import ClusterSpec, Rank, launch, run_command, why_not_shaped
from syncline.errors import SynclineError
from syncline.files import FileError, read_json, write_bytes, write_json
from syncline.kernels.cpu import CpuKernels
from syncline.records.bench_result import BenchResult
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile
from syncline.records.run_record import RunRecord
from syncline.runtime import checkpoint as state_files
from syncline.runtime.checkpoint import load_state, write_draft

strict = pytest.mark.filterwarnings("error")
"""No case may cause a warning."""
needs_namespaces = pytest.mark.skipif(why_not_shaped() is not None, reason=f"no namespaces: {why_not_shaped()}")
loose = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

FILES = {name: format for name, format in FORMATS.items() if isinstance(format, Files)}
TEXTS = [name for name in FILES if "state" not in name]
MESSAGES = [name for name in FORMATS if name not in FILES]
SEED = 20


# --- every format -----------------------------------------------------------------------------------------------


@strict
@pytest.mark.parametrize("name", FORMATS)
def test_any_case_is_read_correctly_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    format = FORMATS[name]
    outcomes = [format.judge(format.case(SEED, number), tmp_path) for number in range(100 if name in MESSAGES else 300)]
    if isinstance(format, Codes):
        assert set(outcomes) == {"accepted", "accepted, not finite"}
        return
    assert len(set(outcomes)) > 3, "cases that all end alike test little"
    assert any(not outcome.startswith("accepted") for outcome in outcomes)


@strict
@pytest.mark.parametrize("name", FILES)
def test_examples_are_valid(name: str, tmp_path: Path) -> None:
    format = FILES[name]
    assert [format.judge(example, tmp_path) for example in format.examples] == ["accepted"] * len(format.examples)


@strict
@pytest.mark.parametrize("name", MESSAGES)
def test_honest_messages_are_accepted(name: str, tmp_path: Path) -> None:
    format = FORMATS[name]
    assert isinstance(format, Messages)
    honest = b"".join(rows.contiguous().numpy().tobytes() for rows in format.honest)
    assert format.judge(honest, tmp_path) == "accepted"


@strict
@pytest.mark.parametrize("name", FILES)
def test_files_of_another_kind_are_refused(name: str, tmp_path: Path) -> None:
    format = FILES[name]
    others = [other.examples[0] for kind, other in FILES.items() if "state" not in kind or "state" not in name]
    for content in (*HEADS, b"", b"null", b"\n", *(other for other in others if other not in format.examples)):
        assert format.judge(content, tmp_path) != "accepted", content[:40]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@strict
@given(name=st.sampled_from(TEXTS), value=values, data=st.data())
@loose
def test_any_value_in_any_place(name: str, value: Any, data: st.DataObject, tmp_path: Path) -> None:
    format = FILES[name]
    trees = Trees(format.examples)
    number = data.draw(st.integers(0, len(trees.trees) - 1))
    place = data.draw(st.sampled_from(trees.places[number]))
    format.judge(json.dumps(trees.put(number, place, value)).encode(), tmp_path)


@strict
@given(name=st.sampled_from(list(FILES)), content=st.binary(max_size=400) | st.text().map(str.encode))
@loose
def test_any_bytes(name: str, content: bytes, tmp_path: Path) -> None:
    FILES[name].judge(content, tmp_path)


@strict
@given(name=st.sampled_from(MESSAGES), data=st.data())
@loose
def test_any_words_in_a_message(name: str, data: st.DataObject, tmp_path: Path) -> None:
    format = FORMATS[name]
    assert isinstance(format, Messages)
    case = bytearray(b"".join(rows.contiguous().numpy().tobytes() for rows in format.honest))
    words = data.draw(
        st.dictionaries(st.integers(0, len(case) // 2 - 1), st.binary(min_size=2, max_size=2), max_size=8)
    )
    for word, bits in words.items():
        case[2 * word : 2 * word + 2] = bits
    format.judge(bytes(case), tmp_path)


def big(edit: Callable[[Any], None]) -> bytes:
    tree = json.loads(FILES["profile"].examples[0])
    edit(tree)
    return json.dumps(tree).encode()


LARGE = {
    "a key that is repeated behind 50,000 others": b"{%s}" % b",".join(b'"%d":0' % (n % 50_000) for n in range(50_001)),
    "a shape of 200,000 dimensions": big(lambda tree: tree["gradients"][0].update(shape=[9999] * 200_000)),
    "sizes of 4,000 digits": big(lambda tree: tree["gradients"][0].update(shape=[10**4000] * 200)),
    "a name of a million characters": big(lambda tree: tree.update(device="\x00" * 1_000_000)),
    "a key of a million characters": b'{"%s": 1}' % (b"k" * 1_000_000),
    "a hundred thousand levels": b"[" * 100_000,
    "a number of a million digits": b'{"schema": %s}' % (b"1" * 1_000_000),
}


@strict
@pytest.mark.parametrize("what", LARGE)
def test_large_files_are_answered_at_once(what: str, tmp_path: Path) -> None:
    assert FILES["profile"].judge(LARGE[what], tmp_path) != "accepted"


def test_an_endless_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.files._MOST_BYTES", 1 << 20)
    assert "/dev/zero: has more than 1 MiB" in refusal(lambda: Profile.load("/dev/zero"), FileError)


# --- the oracle itself ------------------------------------------------------------------------------------------


def found_in(format: Files[Any] | Messages, folder: Path, says: str, cases: int = 400) -> bool:
    """Return whether the oracle reports this for one of a format's cases."""
    for number in range(cases):
        try:
            format.judge(format.case(SEED, number), folder)
        except Finding as finding:
            if str(finding).startswith(says):
                return True
    return False


def lenient_plan(path: Path) -> Any:
    """A reader that trusts its file."""
    try:
        tree = json.loads(path.read_bytes())
        return Any if not isinstance(tree, dict) else msgspec.convert(tree, dict[str, Any])
    except ValueError as error:
        raise FileError(f"{path}: {error}".replace("\n", " ")[:400]) from error


def lenient_state(path: Path) -> dict[str, Any]:
    """Read with safetensors alone, without a checksum."""
    try:
        tensors = safetensors.torch.load(path.read_bytes())
    except (safetensors.SafetensorError, TypeError, ValueError, KeyError, RuntimeError) as error:
        raise FileError(f"{path}: is no safetensors") from error
    kept: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        kept.setdefault(key.partition("/")[2], {})[key.partition("/")[0]] = tensor
    return {**ABOUT, "tensors": kept}


def test_the_oracle_catches_a_reader_that_trusts_its_file(tmp_path: Path) -> None:
    assert found_in(dataclasses.replace(FILES["plan"], read=lenient_plan), tmp_path, "accepted, but ")


def test_the_oracle_catches_a_reader_without_a_checksum(tmp_path: Path) -> None:
    lenient = dataclasses.replace(FILES["state"], read=lenient_state)
    assert found_in(lenient, tmp_path, "accepted, but AssertionError: a damaged state was read")


def test_the_oracle_catches_readers_that_raise_write_pages_or_take_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hostile.oracle.SLOW_S", 0.1)

    def pages(path: Path) -> None:
        raise FileError(f"{path}: is wrong\nin many ways")

    def long_winded(path: Path) -> None:
        raise FileError(f"{path}: " + "x" * 600)

    def nameless(path: Path) -> None:
        raise FileError("is wrong")

    def slow(path: Path) -> None:
        while True:
            pass

    expected = {
        pages: "refused, but not in one line that begins with",
        long_winded: "refused in 6",
        nameless: "refused, but not in one line that begins with",
        slow: "TooSlow",
        lambda path: json.loads(path.read_bytes()[:-1]): "JSONDecodeError",
    }
    for read, says in expected.items():
        broken = dataclasses.replace(FILES["plan"], read=read)
        with pytest.raises(Finding, match=says):
            broken.judge(broken.examples[0], tmp_path)


def test_the_oracle_catches_a_kernel_that_believes_what_it_receives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = CpuKernels.spread

    def believes(self: CpuKernels, gathered: Tensor, flat: Tensor) -> Tensor:
        try:
            return checked(self, gathered, flat)
        except SynclineError:
            return torch.ones((), dtype=torch.bool)

    monkeypatch.setattr(CpuKernels, "spread", believes)
    format = FORMATS["oktopk"]
    assert isinstance(format, Messages)
    assert found_in(format, tmp_path, "a message that cannot be was taken for one")


def fuzz() -> Any:
    """Import the script in `benchmarks`."""
    spec = importlib.util.spec_from_file_location("fuzz", Path(__file__).parents[1] / "benchmarks" / "fuzz.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz"] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


def crashes(path: Path) -> None:
    """Crash as native code would, except for files that start with a brace."""
    if path.read_bytes()[:1] != b"{":
        os._exit(11)
    raise FileError(f"{path}: is wrong")


@pytest.mark.parametrize(
    ("read", "status", "says"),
    [
        (Plan.load, 0, ""),
        (lenient_plan, 1, "plan: accepted, but"),
        (crashes, 1, "plan: its process ended with 11"),
    ],
)
def test_the_script_fails_on_a_finding_and_shows_how_to_reproduce_it(
    read: Any,
    status: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = fuzz()
    monkeypatch.setattr(module, "FORMATS", {"plan": dataclasses.replace(FILES["plan"], read=read)})
    monkeypatch.setattr(sys, "argv", ["fuzz.py", "--cases", "60", "--json", str(tmp_path / "found.json")])
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert module.main() == status
    finally:
        signal.signal(signal.SIGTERM, before)
    said = capsys.readouterr().out
    assert says in said
    assert ("python benchmarks/fuzz.py --only 'plan' --seed 1 --first " in said) == bool(status)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["cases"] == found["formats"]["plan"]["cases"] == 60
    assert bool(found["failures"]) == bool(status)


# --- states of exchanges ----------------------------------------------------------------------------------------


@strict
def test_no_flipped_bit_and_no_cut_is_overlooked(tmp_path: Path) -> None:
    """Flip a bit in every byte and cut after every fourth. If the file is still read, its contents must be the same: a
    flip can turn one kind of white space into another."""
    content, format, read = STATES[0], FILES["state"], 0
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        read += format.judge(bytes(flipped), tmp_path) == "accepted"
        if place % 4 == 0:
            assert format.judge(content[:place], tmp_path) != "accepted"
    assert read < 8


def test_a_changed_header_is_detected_without_reading_the_tensors(tmp_path: Path) -> None:
    path = tmp_path / "rank-00001-of-00004.safetensors"
    path.write_bytes(STATES[0])
    assert load_state(path, tensors=False)["steps"] == ABOUT["steps"]
    path.write_bytes(STATES[0].replace(b'steps\\":7', b'steps\\":9'))
    line = refusal(lambda: load_state(path, tensors=False), FileError)
    assert line == f"{path}: is damaged: the checksum of its header does not match: load an earlier checkpoint"


def test_a_file_without_checksums_is_reported_as_another_version(tmp_path: Path) -> None:
    path = tmp_path / "rank-00001-of-00004.safetensors"
    path.write_bytes(safetensors.torch.save(TENSORS, {"syncline": json.dumps({**ABOUT, "schema": 1})}))
    assert refusal(lambda: load_state(path), FileError) == (
        f"{path}: the checkpoint has schema 1, but this version of syncline reads schema {state_files.SCHEMA}: load it "
        "with the version that saved it"
    )


def test_a_pipe_in_place_of_a_state_is_refused_without_waiting(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000-of-00001.safetensors"
    os.mkfifo(path)
    assert "is a pipe or a device, not a state file" in refusal(lambda: load_state(path), FileError)


def test_the_checksum_of_a_state_does_not_depend_on_memory_addresses(tmp_path: Path) -> None:
    strided = torch.arange(12.0).view(3, 4).t()
    state = {**ABOUT, "tensors": {"a": {"residual": strided}}}
    assert same_state(
        load_state(write_draft(tmp_path, state)), {**ABOUT, "tensors": {"a": {"residual": strided.clone()}}}
    )


# --- files on disk ----------------------------------------------------------------------------------------------


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0)
    os.umask(before)
    yield os.umask
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_its_owner_may_write_to_a_file_whatever_the_umask(tmp_path: Path, umask: Callable[[int], int]) -> None:
    for mask, expected in ((0o000, 0o644), (0o022, 0o644), (0o027, 0o640), (0o077, 0o600)):
        umask(mask)
        path = tmp_path / f"{mask:o}.json"
        write_json(path, {"a": 1})
        draft = write_draft(tmp_path / f"{mask:o}" / "folder", {**ABOUT, "tensors": {}})
        assert mode(path) == mode(draft) == expected
        assert mode(draft.parent) == mode(draft.parent.parent) == 0o755 & ~mask


def test_a_private_file_stays_private(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_json(path, {"a": 1})
    path.chmod(0o600)
    write_json(path, {"a": 2})
    assert mode(path) == 0o600
    path.chmod(0o666)
    write_json(path, {"a": 3})
    assert mode(path) == 0o644


def test_a_state_is_not_written_through_a_symbolic_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    state = {**ABOUT, "tensors": {}}
    draft = write_draft(tmp_path / "folder", state)
    draft.unlink()
    draft.symlink_to(victim)
    assert write_draft(tmp_path / "folder", state) == draft
    assert not draft.is_symlink()
    assert victim.read_text() == "precious"


def test_a_file_has_no_name_until_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    monkeypatch.setattr(os, "fsync", lambda file: names.append([path.name for path in tmp_path.iterdir()]))
    for content in (b"first", b"second"):
        write_bytes(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == content
    assert names == [[], ["file"]]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_draft_has_an_unpredictable_name_and_is_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.files._OPEN_FILES", tmp_path / "missing")  # as where files need a name
    made = []
    opened = os.open

    def seen(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_CREAT and path != tmp_path:
            made.append((Path(path).name, bool(flags & os.O_EXCL)))
        return opened(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", seen)
    for _ in range(2):
        write_bytes(tmp_path / "file", b"")
    assert len({name for name, _ in made}) == 2
    assert all(exclusive and len(name) >= len(".file..tmp") + 16 for name, exclusive in made)


# --- nothing is unpickled ---------------------------------------------------------------------------------------


class Malicious:
    """Creates a marker file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


READERS: dict[str, Callable[[Path], Any]] = {
    "plan": Plan.load,
    "profile": Profile.load,
    "network": Network.load,
    "record": RunRecord.load,
    "bench": lambda path: read_json(path, BenchResult),
    "state": load_state,
    "state's header": lambda path: load_state(path, tensors=False),
}


@pytest.mark.parametrize("name", READERS)
def test_a_malicious_pickle_is_refused_and_never_run(name: str, tmp_path: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "rank-00000-of-00001.safetensors"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path.write_bytes(pickle.dumps(Malicious(marker), protocol))
        assert refusal(lambda: READERS[name](path), FileError).startswith(f"{path}: ")
    torch.save({"tensors": Malicious(marker)}, path)
    assert refusal(lambda: READERS[name](path), FileError).startswith(f"{path}: ")
    assert not marker.exists()
    pickle.loads(pickle.dumps(Malicious(marker)))  # noqa: S301 - shows that the attack works
    assert marker.exists()


SOURCE = Path(syncline.__file__).parent
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}
CALLS = {
    *("eval", "exec", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("numpy.load", "np.load", "torch.package.PackageImporter"),
}
PICKLING = ("_object", "_object_list", "_objects")
"""Names of the collectives of torch.distributed that pickle."""


def dangers(source: str) -> list[str]:
    """Find code in a module that could execute untrusted input."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        found += [name for name in names if name.partition(".")[0] in MODULES or name.endswith(PICKLING)]
        harmless = ast.unparse(node) == "gc.get_objects" if isinstance(node, ast.Attribute) else False
        if isinstance(node, ast.Attribute) and node.attr.endswith(PICKLING) and not harmless:
            found.append(node.attr)
        if isinstance(node, ast.Call):
            called, given = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            safe = called.endswith("torch.load") and given.get("weights_only") == "True"
            if called in CALLS or (called.split(".")[-2:] == ["torch", "load"] and not safe):
                found.append(called)
            if given.get("shell", "False") != "False" or given.get("allow_pickle", "False") != "False":
                found.append(f"{called} with {given}")
    return found


def test_nothing_unpickles_evaluates_or_starts_a_shell() -> None:
    files = list(SOURCE.rglob("*.py"))
    assert len(files) > 100
    assert {path.name: found for path in files if (found := dangers(path.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import yaml; yaml.load(x)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "dist.all_gather_object(a, b)",
        "dist.broadcast_object_list(a)",
        "from torch.distributed import scatter_object_list",
        "eval(text)",
        "exec(text)",
        "subprocess.run(text, shell=True)",
        "np.load(path, allow_pickle=True)",
        "os.system(text)",
    ],
)
def test_code_that_does_so_is_found(source: str) -> None:
    assert dangers(source)
    assert not dangers("torch.load(path, weights_only=True)\nmodel.eval()\nsubprocess.run([a], shell=False)")


# --- a rank that lies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", ["noise", "twice", "nan"])
def test_a_rank_that_sends_anything_makes_the_others_raise_or_skip_the_step(lie: str) -> None:
    """Rank 1 sends wrong messages over gloo; rank 0 is correct."""

    def main(rank: Rank) -> None:
        model = DDP(seeded(lambda: Mlp(64)))
        handle = syncline.attach(model, syncline.OkTopk(density=0.1), lanes=1, timeout_s=TIMEOUT_S)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank.rank))

        def step() -> None:
            model(data).square().mean().backward()

        for _ in range(2):
            step()
            optimizer.zero_grad()
        kernels = [bucket.state.kernels for bucket in handle._attached.buckets.values()]
        slots = kernels[0]._slots
        if rank.rank == 1:
            honest = kernels[0].pack

            def pack(*given: Any) -> None:
                honest(*given)
                words = given[-1].view(-1, slots.bytes).view(torch.int16)
                if lie == "noise":
                    words.random_(-(1 << 15), 1 << 15)
                elif lie == "twice":
                    words[:, slots.places_at + 1] = words[:, slots.places_at]
                    words[:, 1 : slots.places_at] = 0
                    words[:, 1] = 2
                else:
                    words[:, slots.values_at :] = 0x7FC0

            kernels[0].pack = pack  # type: ignore[method-assign]
        before = handle.state_dict()["tensors"]
        if lie == "nan":
            step()
            assert any(not bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
            after = handle.state_dict()["tensors"]
            assert all(torch.equal(after[name]["residual"], kinds["residual"]) for name, kinds in before.items())
            return
        with pytest.raises(RuntimeError, match="ExchangeError"):
            step()
        assert isinstance(handle.error, syncline.ExchangeError)
        assert "\n" not in str(handle.error)
        assert "unusable" in refusal(handle.state_dict, syncline.ExchangeError)

    on_ranks(2, main)


# --- listening sockets ------------------------------------------------------------------------------------------


def listeners(pids: list[int | str], at: str = "self") -> set[str]:
    """Return the addresses and ports on which these processes listen in the network namespace of process `at`."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):  # the process has ended, or closed it
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                name = entry.readlink().name
                if name.startswith("socket:["):
                    inodes.add(name.removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{at}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                groups = [bytes.fromhex(address[start : start + 8])[::-1] for start in range(0, len(address), 8)]
                found.add(f"{'.'.join(str(byte) for byte in b''.join(groups))}:{int(port, 16)}")
    return found


def hosts_of(listening: Any) -> set[str]:
    return {address.rpartition(":")[0] for address in listening}


@pytest.mark.parametrize("shaped", [pytest.param(True, marks=needs_namespaces), False])
def test_an_attached_model_listens_on_its_own_interface_alone(shaped: bool, tmp_path: Path) -> None:
    outside: list[set[str]] = []
    seen = tmp_path / "seen"
    os.mkfifo(seen)
    tell = os.open(seen, os.O_RDWR)

    def main(rank: Rank) -> list[list[str]]:
        before = listeners(["self"])
        rank.init_process_group(TIMEOUT_S)
        joined = listeners(["self"])
        model = DDP(seeded(lambda: Mlp(64)))
        handle = syncline.attach(model, syncline.OkTopk(density=0.1), lanes=2, timeout_s=TIMEOUT_S)
        for _ in range(2):
            model(torch.ones(4, 64)).sum().backward()
        attached = listeners(["self"])
        rank.say("attached")
        with seen.open("rb", buffering=0) as told:
            told.read(1)
        handle.detach()
        return [sorted(before), sorted(joined), sorted(attached), [os.environ["SYNCLINE_HOST_ADDR"]]]

    def look(_: int, event: Any) -> None:
        """List the open ports of this process and its descendants in the machine's own network."""
        mine = psutil.Process()
        outside.append(listeners([mine.pid, *(child.pid for child in mine.children(recursive=True))]))
        if len(outside) == 2:
            os.write(tell, b"..")

    already = listeners([os.getpid()])
    try:
        found = launch(ClusterSpec(hosts=2), main, shaped=shaped, on_event=look)
    finally:
        os.close(tell)
    for before, joined, attached, (address,) in found:
        assert set(before) == (set() if shaped else already)
        assert hosts_of(set(joined) - already) <= {address}
        assert hosts_of(set(attached) - already) == {address}, "it listens there, and nowhere else"
    assert len(outside) == 2
    for open_outside in outside:
        assert hosts_of(open_outside - already) == (set() if shaped else {"127.0.0.1"})
    assert listeners([os.getpid()]) == already


LISTEN = """
import os, socket
server = socket.create_server(("0.0.0.0", 0))
print(os.stat("/proc/self/ns/net").st_ino, server.getsockname()[1], flush=True)
"""


@needs_namespaces
def test_a_port_of_an_emulated_host_is_not_open_outside(capfd: pytest.CaptureFixture[str]) -> None:
    """This includes ports on all addresses, such as that of torchrun's store."""
    already = listeners([os.getpid()])
    assert run_command(ClusterSpec(hosts=2), [sys.executable, "-I", "-c", LISTEN]) == 0
    lines = [line.partition(" | ")[2].split() for line in capfd.readouterr().out.splitlines() if " | " in line]
    networks = {int(network) for network, _ in lines}
    assert len(networks) == 2
    assert Path("/proc/self/ns/net").stat().st_ino not in networks
    assert listeners([os.getpid()]) == already
