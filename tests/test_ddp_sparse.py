"""Sparse exchange in a model that trains: over real processes, through DDP's buckets, beside what people use."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline
from ddp_helpers import TIMEOUT_S, Mlp, batch, gradients, on_ranks, refusal, seeded
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.exchange import AllgatherTopk

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


def kept(handle: syncline.Handle) -> dict[str, Tensor]:
    tensors = handle.state_dict()["tensors"]
    return {name: kinds["residual"] for name, kinds in tensors.items() if "residual" in kinds}


class Integers(nn.Module):
    """Its gradients are what it is given: integers, so that sums are exact. Some of its buckets go whole."""

    SHAPES: ClassVar[dict[str, tuple[int, ...]]] = {"a": (70, 16), "b": (40,), "c": (24, 4, 5, 5), "d": (900,), "e": ()}

    def __init__(self) -> None:
        super().__init__()
        for name, shape in self.SHAPES.items():
            data = torch.zeros(shape)
            form = torch.channels_last if len(shape) == 4 else torch.contiguous_format
            self.register_parameter(name, nn.Parameter(data.to(memory_format=form)))

    def forward(self, factors: dict[str, Tensor]) -> Tensor:
        total = torch.zeros(())
        for name in ("d", "a", "e", "c", "b"):  # another order than they are defined in, so buckets change
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
def test_applied_plus_kept_is_what_came_in_while_ddp_changes_its_buckets(
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
            left = kept(handle)
            for name in Integers.SHAPES:
                waiting = left.get(name, torch.zeros(Integers.SHAPES[name])).double() * ranks
                dist.all_reduce(waiting)
                assert torch.equal(applied[name] + waiting, came_in[name]), (number, name)
            layouts.append([bucket.bytes for bucket in handle.stats().buckets])
            assert handle.stats().sent_bytes == handle.predicted_sent_bytes()
        assert layouts[0] != layouts[-1]
        assert len(handle.ways) > 1 or not isinstance(exchange, syncline.OkTopk)
        assert any(bool(tensor.any()) for tensor in kept(handle).values())

    on_ranks(2, main)


def test_with_the_scaler_known_a_changing_scale_changes_nothing() -> None:
    """Powers of two, and values as they are: so not a bit. Without it, what is kept would be in another measure."""

    def run(rank: int, scaled: bool, known: bool = True) -> list[dict[str, Tensor | None]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2, enabled=scaled)
        model, optimizer, _ = start(scaler=scaler if known else None)
        seen = []
        for number in range(8):
            optimizer.zero_grad()
            loss = model(batch(rank, number, 8, WIDTH)).square().mean()
            if number in (3, 6):  # an overflow on one rank: plain training leaves the step out
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
            if number in (2, 5):  # while it is still dense, and later
                handle.save(tmp_path / str(number))
                if rank.rank == 0:
                    torch.save(model.state_dict(), tmp_path / f"{number}.pt")
            step(rank.rank, model, optimizer, number)
        return {name: tensor.tolist() for name, tensor in {**model.state_dict(), **kept(handle)}.items()}

    def resume(rank: Rank, number: int) -> dict[str, Tensor]:
        model, optimizer, handle = start(exchange, lanes=2)
        model.load_state_dict(torch.load(tmp_path / f"{number}.pt", weights_only=True))
        handle.load(tmp_path / str(number))
        assert handle.stats().steps == number
        for later in range(number, 7):
            step(rank.rank, model, optimizer, later)
        return {name: tensor.tolist() for name, tensor in {**model.state_dict(), **kept(handle)}.items()}

    whole = on_ranks(2, begin)
    for number in (2, 5):
        assert on_ranks(2, lambda rank, number=number: resume(rank, number)) == whole
    assert sorted(path.name for path in (tmp_path / "5").iterdir()) == [
        "rank-00000-of-00002.safetensors",
        "rank-00001-of-00002.safetensors",
    ]


@pytest.mark.parametrize(("saved", "loaded"), [(4, 2), (3, 2), (2, 3), (1, 2)])
def test_a_changed_number_of_ranks_is_refused_or_dealt_anew_as_asked(saved: int, loaded: int, tmp_path: Path) -> None:
    def save(rank: Rank) -> dict[str, list[float]]:
        model, optimizer, handle = start()
        for number in range(3):
            step(rank.rank, model, optimizer, number)
        handle.save(tmp_path)
        return {name: tensor.double().tolist() for name, tensor in kept(handle).items()}

    def load(rank: Rank) -> dict[str, list[float]]:
        model, optimizer, handle = start()
        line = refusal(lambda: handle.load(tmp_path))
        assert f"{saved} ranks saved it, and {loaded} are here" in line
        assert "must be one of" in line or "redistribute" in line
        handle.load(tmp_path, on_world_size="reset")
        assert not any(bool(tensor.any()) for tensor in kept(handle).values())
        assert handle.stats().steps == 3
        handle.load(tmp_path, on_world_size="redistribute")
        dealt = {name: tensor.double().tolist() for name, tensor in kept(handle).items()}
        step(rank.rank, model, optimizer, 3)
        return dealt

    before, after = on_ranks(saved, save), on_ranks(loaded, load)

    def total(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
        names = {name for rank in ranks for name in rank}
        return {name: sum(torch.tensor(rank[name]) for rank in ranks if name in rank) for name in names}

    for name, tensor in total(before).items():
        if bool(tensor.any()):
            assert torch.allclose(total(after)[name], tensor, rtol=1e-6, atol=1e-9), name


def spoil(path: Path, how: str) -> None:
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif how == "pickle":
        torch.save({"residual": torch.zeros(3)}, path)
    elif how == "gone":
        path.unlink()
    elif how == "nan":
        from safetensors import safe_open
        from safetensors.torch import load, save

        tensors = load(path.read_bytes())
        next(iter(tensors.values())).view(-1)[0] = torch.nan
        with safe_open(str(path), "pt") as file:
            about = file.metadata()
        path.write_bytes(save(tensors, about))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("cut", "is not a complete safetensors file"),
        ("pickle", "is not a complete safetensors file"),
        ("gone", "the states of ranks [1] of 2 are missing"),
        ("nan", "is not finite"),
        ("older", "steps"),
    ],
)
def test_files_that_do_not_fit_are_refused_on_every_rank_and_nothing_is_taken_over(
    how: str, expected: str, tmp_path: Path
) -> None:
    def main(rank: Rank) -> None:
        model, optimizer, handle = start(timeout_s=TIMEOUT_S)
        step(rank.rank, model, optimizer, 0)
        if rank.rank == 1 or how != "older":
            handle.save(tmp_path)
        step(rank.rank, model, optimizer, 1)
        if rank.rank == 0 and how == "older":
            handle.save(tmp_path)
        dist.barrier()
        if rank.rank == 0:
            spoil(tmp_path / "rank-00001-of-00002.safetensors", how)
        dist.barrier()
        before = kept(handle)
        line = refusal(lambda: handle.load(tmp_path), syncline.SynclineError)
        assert expected in line or "error" in line
        if rank.rank == 1:
            assert expected in line
        assert all(torch.equal(tensor, before[name]) for name, tensor in kept(handle).items())
        step(rank.rank, model, optimizer, 2)

    on_ranks(2, main)


def test_a_folder_without_a_state_and_an_unknown_policy_are_refused_in_one_line(tmp_path: Path) -> None:
    def main(rank: Rank) -> None:
        _, _, handle = start()
        for folder, expected in ((tmp_path, "holds no state"), (tmp_path / "x", "cannot be read")):
            assert expected in refusal(lambda folder=folder: handle.load(folder))
        assert "one of refuse, reset, redistribute" in refusal(lambda: handle.load(tmp_path, on_world_size="guess"))

    on_ranks(2, main)


def test_clipping_clips_the_applied_gradients_alike_on_all_ranks() -> None:
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


def test_inside_hosts_everything_is_summed_and_only_leaders_keep_something() -> None:
    exchange = syncline.Hierarchical(across=syncline.OkTopk(density=0.1), levels=[[0, 1, 2], [3]])

    def main(rank: Rank) -> tuple[bool, list[float]]:
        rank.init_process_group(TIMEOUT_S)
        model, optimizer, handle = start(exchange)
        for number in range(4):
            step(rank.rank, model, optimizer, number)
        sent = handle.stats().sent_bytes
        assert sent == {level: sent.get(level, 0) for level in sent}
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        return bool(kept(handle)), weights.tolist()

    ranks = launch(ClusterSpec(hosts=4), main, shaped=False, deadline_s=90.0)
    assert [keeps for keeps, _ in ranks] == [True, False, False, True]
    assert all(weights == ranks[0][1] for _, weights in ranks)


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
