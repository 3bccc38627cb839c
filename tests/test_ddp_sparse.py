"""Tests of sparse exchanges in DDP models: conservation, GradScaler, checkpoints, clipping and hosts."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline
from ddp_helpers import TIMEOUT_S, Mlp, batch, gradients, on_ranks, refusal, seeded
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.errors import SynclineError
from syncline.exchange import AllgatherTopk
from syncline.runtime import topology
from syncline.runtime.checkpoint import sealed

SPARSE = syncline.OkTopk(density=0.1, values="fp32")
BUCKETS: dict[str, Any] = {"bucket_cap_mb": 0.004}
WIDTH = 32


def wide() -> nn.Module:
    return seeded(lambda: Mlp(WIDTH))


def start(exchange: syncline.Exchange = SPARSE, **options: Any) -> tuple[DDP, torch.optim.Optimizer, syncline.Handle]:
    model = DDP(wide(), **BUCKETS)
    return model, torch.optim.SGD(model.parameters(), lr=0.05), syncline.attach(model, exchange, **options)


def step(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    model(batch(rank, number, 8, WIDTH)).square().mean().backward()
    optimizer.step()


def residuals(handle: syncline.Handle) -> dict[str, Tensor]:
    """Return this rank's residuals by parameter name."""
    tensors = handle.state_dict()["tensors"]
    return {name: kinds["residual"] for name, kinds in tensors.items() if "residual" in kinds}


class Integers(nn.Module):
    """A model whose gradients equal its integer inputs, so that sums are exact. Some buckets are sent dense."""

    SHAPES: ClassVar[dict[str, tuple[int, ...]]] = {"a": (70, 16), "b": (40,), "c": (24, 4, 5, 5), "d": (900,), "e": ()}

    def __init__(self) -> None:
        super().__init__()
        for name, shape in self.SHAPES.items():
            data = torch.zeros(shape)
            form = torch.channels_last if len(shape) == 4 else torch.contiguous_format
            self.register_parameter(name, nn.Parameter(data.to(memory_format=form)))

    def forward(self, factors: dict[str, Tensor]) -> Tensor:
        total = torch.zeros(())
        for name in ("d", "a", "e", "c", "b"):  # not the order of definition, so that DDP's buckets change
            total = total.sin() + (getattr(self, name) * factors[name]).sum()
        return total

    @classmethod
    def drawn(cls, rank: int, number: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(100 * number + rank)
        draw = functools.partial(torch.randint, -4000, 4000, generator=generator)
        return {name: draw(shape).float() for name, shape in cls.SHAPES.items()}


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize(
    "exchange", [SPARSE, syncline.OkTopk(density=0.05), AllgatherTopk(density=0.1)], ids=["fp32", "bf16", "allgather"]
)
def test_applied_plus_residual_equals_what_came_in_while_ddp_changes_its_buckets(
    exchange: syncline.Exchange, lanes: int
) -> None:
    def main(rank: Rank) -> None:
        model = DDP(Integers(), **BUCKETS)
        handle = syncline.attach(model, exchange, lanes=lanes)
        ranks, layouts = dist.get_world_size(), []
        came_in = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in Integers.SHAPES.items()}
        applied = {name: tensor.clone() for name, tensor in came_in.items()}
        for number in range(6):
            model.zero_grad()
            model(Integers.drawn(rank.rank, number)).backward()
            for name, parameter in model.module.named_parameters():
                applied[name] += parameter.grad.double() * ranks
                came_in[name] += sum(Integers.drawn(other, number)[name].double() for other in range(ranks))
            own = residuals(handle)
            for name in Integers.SHAPES:
                residual = own.get(name, torch.zeros(Integers.SHAPES[name])).double() * ranks
                dist.all_reduce(residual)
                assert torch.equal(applied[name] + residual, came_in[name]), (number, name)
            layouts.append([bucket.bytes for bucket in handle.stats().buckets])
            assert handle.stats().sent_bytes == handle.predicted_sent_bytes()
        assert layouts[0] != layouts[-1]
        assert len(handle.paths) > 1 or not isinstance(exchange, syncline.OkTopk)
        assert any(bool(tensor.any()) for tensor in residuals(handle).values())

    on_ranks(2, main)


def test_with_the_scaler_known_a_changing_scale_changes_nothing() -> None:
    """Scales are powers of two, so results are bit-identical. Without the scaler, residuals would have an old scale."""

    def run(rank: int, scaled: bool, known: bool = True) -> list[dict[str, Tensor | None]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2, enabled=scaled)
        model, optimizer, _ = start(scaler=scaler if known else None)
        seen = []
        for number in range(8):
            optimizer.zero_grad()
            loss = model(batch(rank, number, 8, WIDTH)).square().mean()
            if number in (3, 6):  # an overflow on one rank, so the step is skipped
                if not scaled:
                    continue
                loss = loss * (torch.inf if rank == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if number not in (3, 6):
                seen.append(gradients(model))
            scaler.step(optimizer)
            scaler.update()
        return seen

    def main(rank: Rank) -> None:
        plain, scaled = run(rank.rank, False), run(rank.rank, True)
        for number, (mine, theirs) in enumerate(zip(scaled, plain, strict=True)):
            for name, gradient in theirs.items():
                assert torch.equal(mine[name], gradient), (number, name)
        unknown = run(rank.rank, True, known=False)
        assert any(not torch.equal(unknown[-1][name], gradient) for name, gradient in plain[-1].items())

    on_ranks(2, main)


def test_a_run_resumed_from_files_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    exchange = syncline.OkTopk(density=0.1, warmup=3, momentum=0.5)

    def begin(rank: Rank) -> dict[str, Tensor]:
        model, optimizer, handle = start(exchange, lanes=2)
        for number in range(7):
            if number in (2, 5):  # during the warm-up, and after it
                handle.save(tmp_path / str(number))
                if rank.rank == 0:
                    torch.save(model.state_dict(), tmp_path / f"{number}.pt")
            step(rank.rank, model, optimizer, number)
        return {name: tensor.tolist() for name, tensor in {**model.state_dict(), **residuals(handle)}.items()}

    def resume(rank: Rank, number: int) -> dict[str, Tensor]:
        model, optimizer, handle = start(exchange, lanes=2)
        model.load_state_dict(torch.load(tmp_path / f"{number}.pt", weights_only=True))
        handle.load(tmp_path / str(number))
        assert handle.stats().steps == number
        for later in range(number, 7):
            step(rank.rank, model, optimizer, later)
        return {name: tensor.tolist() for name, tensor in {**model.state_dict(), **residuals(handle)}.items()}

    whole = on_ranks(2, begin)
    for number in (2, 5):
        assert on_ranks(2, lambda rank, number=number: resume(rank, number)) == whole
    assert sorted(path.name for path in (tmp_path / "5").iterdir()) == [
        "rank-00000-of-00002.safetensors",
        "rank-00001-of-00002.safetensors",
    ]


@pytest.mark.parametrize(("saved", "loaded"), [(4, 2), (3, 2), (2, 3), (1, 2)])
def test_a_changed_number_of_ranks_is_refused_or_residuals_are_redistributed(
    saved: int, loaded: int, tmp_path: Path
) -> None:
    def save(rank: Rank) -> dict[str, list[float]]:
        model, optimizer, handle = start()
        for number in range(3):
            step(rank.rank, model, optimizer, number)
        handle.save(tmp_path)
        return {name: tensor.double().tolist() for name, tensor in residuals(handle).items()}

    def load(rank: Rank) -> dict[str, list[float]]:
        model, optimizer, handle = start()
        line = refusal(lambda: handle.load(tmp_path))
        assert f"saved by {saved} ranks, but there are {loaded} now" in line
        assert "must be one of" in line or "redistribute" in line
        handle.load(tmp_path, on_world_size="reset")
        assert not any(bool(tensor.any()) for tensor in residuals(handle).values())
        assert handle.stats().steps == 3
        handle.load(tmp_path, on_world_size="redistribute")
        dealt = {name: tensor.double().tolist() for name, tensor in residuals(handle).items()}
        step(rank.rank, model, optimizer, 3)
        return dealt

    before, after = on_ranks(saved, save), on_ranks(loaded, load)

    def total(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
        names = {name for rank in ranks for name in rank}
        return {name: sum(torch.tensor(rank[name]) for rank in ranks if name in rank) for name in names}

    for name, tensor in total(before).items():
        if bool(tensor.any()):
            assert torch.allclose(total(after)[name], tensor, rtol=1e-6, atol=1e-9), name


def rewrite(path: Path, tensors: dict[str, Tensor] | None = None, **fields: Any) -> None:
    """Replace the tensors, or fields in the header, of a rank's file."""
    with safe_open(str(path), "pt") as file:
        about = {**json.loads(file.metadata()["syncline"]), **fields}
    held = safetensors.torch.load(path.read_bytes()) if tensors is None else tensors
    path.write_bytes(sealed(about, held))


def spoil(path: Path, how: str) -> None:
    tensors = {} if how == "gone" else safetensors.torch.load(path.read_bytes())
    name = next(iter(tensors), "")
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif how == "pickle":
        torch.save({"residual": torch.zeros(3)}, path)
    elif how == "gone":
        path.unlink()
    elif how == "folder":
        path.unlink()
        path.mkdir()
    elif how == "nan":
        tensors[name].view(-1)[0] = torch.nan
        rewrite(path, tensors)
    elif how == "shape":
        rewrite(path, {**tensors, name: torch.zeros(7)})
    elif how == "name":
        rewrite(path, {**tensors, "residual/nobody": torch.zeros(7)})
    elif how == "older":
        rewrite(path, steps=0)
    elif how == "density":
        rewrite(path, exchange={"type": "OkTopk", "density": 0.2, "values": "fp32", "warmup": 0, "momentum": 0.0})
    elif how == "renamed":
        rewrite(path, rank=0)
    elif how == "steps":
        rewrite(path, steps="many")


SPOILED = {
    "cut": "is not a complete safetensors file",
    "pickle": "is not a complete safetensors file",
    "gone": "the files of ranks [1] of 2 are missing: copy them into the folder, or",
    "folder": "is a folder, not a state file",
    "nan": "contains NaN or infinity",
    "shape": "has shape (7,) in the checkpoint, but the parameter has shape",
    "name": "the checkpoint contains 'nobody', which is not a parameter of this model: load it into the model",
    "older": "was not saved together with rank-00000-of-00002.safetensors: steps is 0 instead of 1",
    "density": "was not saved together with rank-00000-of-00002.safetensors: exchange.density is 0.2 instead of 0.1",
    "renamed": "contains the state of rank 0, but its name says 1",
    "steps": "this is not a valid exchange state: steps: expected int, got str",
}


@pytest.mark.parametrize("how", SPOILED)
def test_unsuitable_files_are_refused_on_every_rank_and_nothing_is_loaded(how: str, tmp_path: Path) -> None:
    path = tmp_path / "rank-00001-of-00002.safetensors"

    def main(rank: Rank) -> None:
        model, optimizer, handle = start(timeout_s=TIMEOUT_S)
        step(rank.rank, model, optimizer, 0)
        handle.save(tmp_path)
        step(rank.rank, model, optimizer, 1)
        if rank.rank == 0:
            spoil(path, how)
        dist.barrier()
        before = residuals(handle)
        line = refusal(lambda: handle.load(tmp_path), syncline.SynclineError)
        prefix = "" if rank.rank == 1 or how == "gone" else "the checkpoint is refused on rank 1: "
        assert line.startswith(f"{prefix}{tmp_path if how == 'gone' else path}: ")
        assert SPOILED[how] in line
        assert "load an earlier checkpoint" in line or "or start without the checkpoint" in line
        assert all(torch.equal(tensor, before[name]) for name, tensor in residuals(handle).items())
        step(rank.rank, model, optimizer, 2)

    on_ranks(2, main)


@pytest.mark.parametrize("policy", ["redistribute", "reset"])
def test_all_files_must_belong_to_the_same_checkpoint(policy: str, tmp_path: Path) -> None:
    """Rank 3's file is wrong. With two ranks, no rank reads it first."""
    others = {
        "steps": {"steps": 1},
        "exchange.type": {"exchange": {"type": "Dense", "wire": "bf16"}},
        "buckets": {"buckets": [["first.weight"]]},
        "levels": {"levels": "((0, 1), (2, 3))"},
    }

    def save(rank: Rank) -> None:
        model, optimizer, handle = start()
        for number in range(2):
            step(rank.rank, model, optimizer, number)
        handle.save(tmp_path / "good")

    def load(rank: Rank) -> None:
        model, optimizer, handle = start()
        for field in others:
            line = refusal(lambda field=field: handle.load(tmp_path / field, on_world_size=policy), SynclineError)
            assert f"{tmp_path / field / 'rank-00003-of-00004.safetensors'}: was not saved together with" in line
            assert f"{field} is " in line
            assert line.startswith("the checkpoint is refused on rank 1: ") == (rank.rank == 0)
        handle.load(tmp_path / "good", on_world_size=policy)
        step(rank.rank, model, optimizer, 2)

    on_ranks(4, save)
    for field, fields in others.items():
        shutil.copytree(tmp_path / "good", tmp_path / field)
        rewrite(tmp_path / field / "rank-00003-of-00004.safetensors", **fields)
    on_ranks(2, load)


def test_a_state_of_another_exchange_or_model_is_refused_with_what_differs_and_what_to_do(tmp_path: Path) -> None:
    def main(rank: Rank) -> None:
        model, optimizer, handle = start()
        step(rank.rank, model, optimizer, 0)
        handle.save(tmp_path)
        file = tmp_path / "rank-00000-of-00002.safetensors"
        others = {
            "the checkpoint was saved with density=0.1, but this model uses 0.05": syncline.OkTopk(0.05, "fp32"),
            'the checkpoint was saved with type="OkTopk", but this model uses "Dense"': syncline.Dense(),
        }
        for expected, exchange in others.items():
            line = refusal(lambda exchange=exchange: start(exchange)[2].load(tmp_path))
            assert line == f"{file}: {expected}: use the same setting, or start without the checkpoint"
        wrapped = syncline.attach(DDP(nn.Sequential(wide()), **BUCKETS), SPARSE)
        assert f"{file}: the checkpoint contains " in (line := refusal(lambda: wrapped.load(tmp_path)))
        assert "not a parameter of this model: load it into the model that it was saved with" in line

    on_ranks(2, main)


def test_a_folder_without_a_state_and_an_unknown_policy_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def main(rank: Rank) -> None:
        _, _, handle = start()
        folders = {
            tmp_path: "contains no exchange state: pass the folder that save(folder) wrote",
            tmp_path / "x": "cannot be read: No such file or directory: pass the folder",
            tmp_path / "file": "cannot be read: Not a directory: pass the folder",
            "a\0b": "the checkpoint folder is 'a\\x00b': pass the path of a folder",
            "": "the checkpoint folder is '': pass",
            b"x": "the checkpoint folder is b'x': pass",
        }
        for folder, expected in folders.items():
            assert expected in refusal(lambda folder=folder: handle.load(folder))
        assert "one of refuse, reset, redistribute" in refusal(lambda: handle.load(tmp_path, on_world_size="guess"))
        mine = tmp_path / str(rank.rank)
        assert str(mine) in refusal(lambda: handle.load(mine))  # each rank reports its own error

    on_ranks(2, main)


def test_if_a_rank_cannot_write_every_rank_raises_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def main(rank: Rank) -> None:
        model, optimizer, handle = start()
        folders = {
            tmp_path / "file": f"{tmp_path / 'file'}: cannot be created: File exists: save to another path",
            tmp_path / "file" / "below": "cannot be created: Not a directory: save to another path",
            tmp_path / ("x" * 300): "cannot be created: File name too long: save to another path",
            "a\0b": "the checkpoint folder is 'a\\x00b': pass the path of a folder",
            None: "the checkpoint folder is None: pass the path of a folder",
        }
        for folder, expected in folders.items():
            assert expected in refusal(lambda folder=folder: handle.save(folder))
        step(rank.rank, model, optimizer, 0)
        handle.save(tmp_path / "state")
        before = residuals(handle)
        step(rank.rank, model, optimizer, 1)
        mine = tmp_path / "state" if rank.rank == 0 else tmp_path / "file"
        line = refusal(lambda: handle.save(mine), syncline.SynclineError)
        prefix = "" if rank.rank else "the state to save is refused on rank 1: "
        assert line == f"{prefix}{tmp_path / 'file'}: cannot be created: File exists: save to another path"
        dist.barrier()  # each rank removes its own draft
        assert len(list((tmp_path / "state").iterdir())) == 2
        handle.load(tmp_path / "state")
        assert handle.stats().steps == 1
        assert all(torch.equal(tensor, before[name]) for name, tensor in residuals(handle).items())
        dist.barrier()
        if rank.rank == 0:
            (tmp_path / "other" / "rank-00001-of-00002.safetensors").mkdir(parents=True)
        dist.barrier()
        line = refusal(lambda: handle.save(tmp_path / "other"), syncline.SynclineError)
        assert "is a folder, not a state file: remove it, or save to another path" in line

    on_ranks(2, main)


def test_a_folder_holds_the_last_checkpoint_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    """A folder in which a crash left other files can be loaded too."""

    def save(rank: Rank, folder: str, steps: int) -> None:
        model, optimizer, handle = start()
        for number in range(steps):
            step(rank.rank, model, optimizer, number)
        handle.save(tmp_path / folder)

    def files(folder: str) -> list[str]:
        return sorted(path.name for path in (tmp_path / folder).iterdir())

    for ranks, steps in ((3, 1), (2, 2), (3, 4)):
        on_ranks(ranks, lambda rank, steps=steps: save(rank, "again", steps))
        assert files("again") == [f"rank-{rank:05d}-of-{ranks:05d}.safetensors" for rank in range(ranks)]
        shutil.copytree(tmp_path / "again", tmp_path / f"{ranks} at {steps}")
    on_ranks(2, lambda rank: save(rank, "2 at 3", 3))

    def mixed(folder: str, *parts: str, drafts: str = "", of: range = range(0)) -> None:
        for part in parts:
            shutil.copytree(tmp_path / part, tmp_path / folder, dirs_exist_ok=True)
        for rank in of:
            name = f"rank-{rank:05d}-of-{drafts[0]:0>5}.safetensors"
            shutil.copy(tmp_path / drafts / name, tmp_path / folder / f"{name}.new")

    mixed("not yet removed", "2 at 2", "3 at 4")
    mixed("not all removed", "2 at 3", "3 at 4")
    (tmp_path / "not all removed" / "rank-00001-of-00002.safetensors").unlink()
    mixed("not all written", "2 at 2", drafts="2 at 3", of=range(1))
    mixed("not all written of others", "2 at 2", drafts="3 at 4", of=range(2))
    mixed("not yet in place", "2 at 2", drafts="2 at 3", of=range(2))
    mixed("not all in place", "2 at 2", drafts="2 at 3", of=range(1, 2))
    shutil.copy(tmp_path / "2 at 3" / "rank-00000-of-00002.safetensors", tmp_path / "not all in place")
    steps = {
        "not yet removed": 4,
        "not all removed": 4,
        "not all written": 2,
        "not all written of others": 2,
        "not yet in place": 3,
        "not all in place": 3,
    }

    def load(rank: Rank) -> None:
        model, optimizer, handle = start()
        for folder, expected in steps.items():
            handle.load(tmp_path / folder, on_world_size="redistribute")
            assert handle.stats().steps == expected, folder
            step(rank.rank, model, optimizer, expected)
            handle.save(tmp_path / folder)

    on_ranks(2, load)
    for folder in steps:
        assert files(folder) == files("2 at 3")


def test_clipping_gives_the_same_gradients_on_all_ranks() -> None:
    def main(rank: Rank) -> list[float]:
        model, _, _ = start()
        model(batch(rank.rank, 0, 8, WIDTH)).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        after = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
        return [norm.item(), after.item()]

    ranks = on_ranks(2, main)
    assert ranks[0] == ranks[1]
    assert ranks[0][0] > 1e-3
    assert ranks[0][1] == pytest.approx(1e-3, rel=1e-3)


def test_hosts_sum_everything_inside_and_only_leaders_have_a_residual() -> None:
    exchange = syncline.Hierarchical(across=syncline.OkTopk(density=0.1), levels=[[0, 1, 2], [3]])

    def main(rank: Rank) -> tuple[bool, list[float]]:
        rank.init_process_group(TIMEOUT_S)
        model, optimizer, handle = start(exchange)
        for number in range(4):
            step(rank.rank, model, optimizer, number)
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        return bool(residuals(handle)), weights.tolist()

    ranks = launch(ClusterSpec(hosts=4), main, shaped=False, deadline_s=90.0)
    assert [keeps for keeps, _ in ranks] == [True, False, False, True]
    assert all(weights == ranks[0][1] for _, weights in ranks)


@pytest.mark.parametrize("ranks", [4, 3])
def test_residuals_of_hosts_are_discarded_or_refused_on_other_hosts(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for any number of ranks, and for hosts that were detected or named."""
    within: dict[str, Any] = {"across": syncline.OkTopk(density=0.1), "shape": "leader"}

    def on_hosts(rank: Rank, hosts: str) -> list[tuple[str, Any]]:
        monkeypatch.setattr(topology, "host_identity", lambda: hosts[rank.rank])
        named = [[other for other, host in enumerate(hosts) if host == name] for name in sorted(set(hosts))]
        exchanges = {"found": syncline.Hierarchical(**within), "named": syncline.Hierarchical(**within, levels=named)}
        return [(name, start(exchange)) for name, exchange in exchanges.items()]

    def save(rank: Rank) -> None:
        for name, (model, optimizer, handle) in on_hosts(rank, "aabb"):
            for number in range(3):
                step(rank.rank, model, optimizer, number)
            assert bool(residuals(handle)) == (rank.rank in (0, 2))
            handle.save(tmp_path / name)

    def load(rank: Rank) -> None:
        for name, (model, optimizer, handle) in on_hosts(rank, "abab"[:ranks]):
            refused = refusal(lambda name=name, handle=handle: handle.load(tmp_path / name))
            moved = (
                "((0, 1), (2, 3)), but they are on ((0, 2), (1, 3))" if ranks == 4 else "4 ranks, but there are 3 now"
            )
            assert moved in refused
            dealt = refusal(lambda name=name, handle=handle: handle.load(tmp_path / name, on_world_size="redistribute"))
            for line in (refused, dealt):
                assert line.endswith(": pass on_world_size='reset', which drops the residuals")
            handle.load(tmp_path / name, on_world_size="reset")
            assert handle.stats().steps == 3
            assert not any(bool(tensor.any()) for tensor in residuals(handle).values())
            step(rank.rank, model, optimizer, 3)

    on_ranks(4, save)
    on_ranks(ranks, load)


def test_a_model_that_sends_a_tenth_still_learns() -> None:
    def main(rank: Rank) -> list[float]:
        losses = []
        for exchange in (syncline.Dense(), syncline.OkTopk(density=0.1)):
            model, optimizer, handle = start(exchange)
            fixed = batch(rank.rank, 0, 8, WIDTH)

            def measure(model: nn.Module = model, fixed: Tensor = fixed) -> float:
                return float(model(fixed).square().mean().item())

            first = measure()
            for _ in range(60):
                optimizer.zero_grad()
                model(fixed).square().mean().backward()
                optimizer.step()
            losses.append(measure() / first)
            handle.detach()
        return losses

    for dense, sparse in on_ranks(2, main):
        assert sparse < 0.5
        assert dense < 0.5


def test_numpy_numbers_are_valid_settings(tmp_path: Path) -> None:
    exchange = syncline.OkTopk(density=np.float64(0.125), values="fp32", warmup=np.int64(2), momentum=np.float32(0.5))
    assert exchange == syncline.OkTopk(density=0.125, values="fp32", warmup=2, momentum=0.5)
    assert repr(exchange) == repr(syncline.OkTopk(density=0.125, values="fp32", warmup=2, momentum=0.5))
    for wrong in ({"density": np.float64("nan")}, {"warmup": np.float64(2.0)}, {"momentum": np.bool_(True)}):
        assert f"OkTopk({next(iter(wrong))}=" in refusal(lambda wrong=wrong: syncline.OkTopk(**wrong))

    def main(rank: Rank) -> None:
        model, optimizer, handle = start(exchange)
        step(rank.rank, model, optimizer, 0)
        handle.save(tmp_path)
        handle.load(tmp_path)

    on_ranks(2, main)
