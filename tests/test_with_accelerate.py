"""SynclineKwargs trains as Accelerate's own DDP does, `save_state` and `load_state` included."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.amp.grad_scaler import GradScaler

import syncline
from frameworks import (
    SHARES,
    distance,
    fingerprint,
    images,
    on_torchrun_ranks,
    run_example,
    said,
    small_net,
    states_in,
    trained_on_large_batches,
    type_example,
)
from syncline.cluster import Rank

SPARSE = syncline.OkTopk(density=0.05)
UPDATES = {"exchange": SPARSE, "updates": True, "every": 2, "warmup": 1, "delay": 1}


@pytest.fixture(scope="module")
def runs() -> Any:
    """Import late, because a larger process takes longer to fork the ranks of other tests."""
    return importlib.import_module("accelerate_runs")


def test_dense_trains_as_accelerates_own_ddp_does(runs: Any) -> None:
    def main(rank: Rank) -> None:
        for accumulated in (1, 3):
            plain = runs.Run(accumulated=accumulated)
            kwargs = runs.SynclineKwargs(syncline.Dense(), bucket_cap_mb=1, gradient_as_bucket_view=True)
            synced = runs.Run(kwargs, accumulated=accumulated)
            assert kwargs.to_kwargs() == {"bucket_cap_mb": 1, "gradient_as_bucket_view": True}
            assert synced.model.gradient_as_bucket_view
            assert distance(synced.train(), plain.train()) < 1e-6
            assert synced.losses == pytest.approx(plain.losses, abs=1e-5)
            assert kwargs.handle is not None
            assert kwargs.handle.stats().steps == 6 // accumulated
            assert kwargs.figures()["syncline/sent_bytes"] > 0

    on_torchrun_ranks(main)


def test_unequal_batches_train_as_the_large_batch_does(runs: Any) -> None:
    def main(rank: Rank) -> None:
        shares = syncline.Shares(SHARES)
        data = images(73)
        kwargs = runs.SynclineKwargs(shares=shares)
        accelerator = runs.Accelerator(cpu=True, kwargs_handlers=[kwargs])
        kwargs.join(accelerator)
        net = small_net()
        batches = runs.DataLoader(data, batch_sampler=shares.sampler(data))
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
        for epoch in range(2):
            batches.batch_sampler.set_epoch(epoch)
            for pixels, labels in batches:
                optimizer.zero_grad()
                accelerator.backward(torch.nn.functional.cross_entropy(model(pixels), labels))
                optimizer.step()
        assert kwargs.handle is not None and kwargs.handle.shares == shares
        assert distance(net, trained_on_large_batches(73, 2)) < 1e-6
        with pytest.raises(syncline.UsageError, match=r"do not pass it to accelerator\.prepare"):
            accelerator.prepare(batches)

    on_torchrun_ranks(main)


def test_a_run_resumed_from_save_state_equals_the_uninterrupted_one(runs: Any, tmp_path: Path) -> None:
    def whole(rank: Rank) -> list[str]:
        run = runs.Run(runs.SynclineKwargs(SPARSE))
        run.train(0, 3)
        run.accelerator.save_state(tmp_path / "three")
        final = fingerprint(run.train(3, 6))
        run.accelerator.load_state(tmp_path / "three")  # return to step 3 in the same run
        return [final, fingerprint(run.train(3, 6))]

    def resumed(rank: Rank) -> list[str]:
        run = runs.Run(runs.SynclineKwargs(SPARSE))
        run.accelerator.load_state(tmp_path / "three")
        run.accelerator.save_state(tmp_path / "again")  # before anything is attached
        final = fingerprint(run.train(3, 6))

        again = runs.Run(runs.SynclineKwargs(SPARSE))
        again.accelerator.load_state(tmp_path / "again")
        return [final, fingerprint(again.train(3, 6))]

    def without(rank: Rank) -> list[str]:
        run = runs.Run(runs.SynclineKwargs(SPARSE))
        with said() as text:
            run.accelerator.load_state(tmp_path / "three")
        assert ("no residual was saved there" in text.getvalue()) is (rank.rank == 0)
        return [fingerprint(run.train(3, 6))]

    def more(rank: Rank) -> None:
        run = runs.Run(runs.SynclineKwargs(SPARSE))
        run.accelerator.load_state(tmp_path / "three")
        with pytest.raises(
            syncline.UsageError, match="saved by 2 ranks, but there are 3 now: pass on_world_size='redis"
        ):
            run.train(3, 4)
        run = runs.Run(runs.SynclineKwargs(SPARSE, on_world_size="redistribute"))
        run.accelerator.load_state(tmp_path / "three")
        run.train(3, 4)

    results = on_torchrun_ranks(whole)
    expected = results[0][0]
    assert results == [[expected, expected]] * 2
    assert len(list((tmp_path / "three/syncline").iterdir())) == 2
    assert on_torchrun_ranks(resumed) == [[expected, expected]] * 2
    on_torchrun_ranks(more, ranks=3)
    (tmp_path / "three/syncline").rename(tmp_path / "three/elsewhere")
    assert [expected] not in on_torchrun_ranks(without), "the residual made no difference"


def test_updates_are_exchanged_and_a_resumed_run_equals_the_uninterrupted_one(runs: Any, tmp_path: Path) -> None:
    """Each rank has its own weights between exchanges. `save_state` saves these, and those that all agreed on."""

    def whole(rank: Rank) -> dict[str, str]:
        kwargs = runs.SynclineKwargs(**UPDATES)
        run = runs.Run(kwargs, accumulated=2)
        digests = {}
        run.train(0, 2, clip=1.0)
        assert kwargs.handle is not None
        warm = kwargs.handle.stats().total_sent_bytes["world"]
        run.train(2, 6, clip=1.0)
        run.accelerator.save_state(tmp_path / "three")
        assert warm < kwargs.handle.stats().total_sent_bytes["world"] < 2 * warm
        digests["own"] = fingerprint(run.model)
        with kwargs.synced():
            digests["agreed"] = fingerprint(run.model)
        digests["own, final"] = fingerprint(run.train(0, 4, clip=1.0))
        run.accelerator.save_state(tmp_path / "five")
        run.accelerator.load_state(tmp_path / "three")  # return to the third step in the same run
        with kwargs.synced():
            assert fingerprint(run.model) == digests["agreed"]
        assert fingerprint(run.train(0, 4, clip=1.0)) == digests["own, final"]
        return digests

    def resumed(rank: Rank) -> str:
        run = runs.Run(runs.SynclineKwargs(**UPDATES), accumulated=2)
        run.accelerator.load_state(tmp_path / "three")
        final = fingerprint(run.train(0, 4, clip=1.0))
        run.accelerator.save_state(tmp_path / "again")
        return final

    first, second = on_torchrun_ranks(whole)
    assert first["agreed"] == second["agreed"]
    assert first["own"] != second["own"]
    net = small_net()
    net.load_state_dict(load_file(tmp_path / "three/model.safetensors"))
    assert fingerprint(net) == first["agreed"]
    assert on_torchrun_ranks(resumed) == [first["own, final"], second["own, final"]]
    assert states_in(tmp_path / "again/syncline") == states_in(tmp_path / "five/syncline")


def test_the_residual_follows_the_loss_scale(runs: Any) -> None:
    def main(rank: Rank) -> None:
        scaler = GradScaler("cpu", init_scale=64.0)
        kwargs = runs.SynclineKwargs(syncline.Dense(), updates=True)
        final = fingerprint(runs.Run(kwargs, scaler=scaler).train(infinite_at=2))
        assert scaler.get_scale() == (32.0 if rank.rank == 1 else 64.0)  # rank 1 has skipped a step
        assert kwargs.handle is not None
        assert kwargs.handle.stats().steps == 6
        with kwargs.synced():
            assert fingerprint(kwargs.followed[0].model) == final
        doubling = GradScaler("cpu", init_scale=64.0, growth_interval=1)
        scaled = runs.Run(runs.SynclineKwargs(SPARSE), scaler=doubling).train()
        assert doubling.get_scale() == 64 * 2**6
        assert fingerprint(scaled) == fingerprint(runs.Run(runs.SynclineKwargs(SPARSE)).train())

    on_torchrun_ranks(main)


def test_each_of_several_models_is_followed_and_saved(runs: Any, tmp_path: Path) -> None:
    def main(rank: Rank) -> None:
        accelerator = runs.Accelerator(cpu=True, kwargs_handlers=[runs.DistributedDataParallelKwargs(bucket_cap_mb=2)])
        kwargs = runs.SynclineKwargs(SPARSE, quiet=True).join(accelerator)
        models = accelerator.prepare(small_net(), small_net())
        assert kwargs.handle is None
        for model in models:
            assert model.bucket_bytes_cap == 2 * 2**20
            model(torch.ones(2, 784)).square().mean().backward()
        assert len(kwargs.handles) == 2
        accelerator.save_state(tmp_path)
        accelerator.free_memory()
        accelerator.prepare(small_net())
        assert kwargs.handles == []

    on_torchrun_ranks(main)
    assert {len(list((tmp_path / name).iterdir())) for name in ("syncline", "syncline_1")} == {2}


def test_it_tunes_during_training(runs: Any) -> None:
    def main(rank: Rank) -> None:
        kwargs = runs.SynclineKwargs(quiet=True)
        synced = runs.Run(kwargs, joins=False)
        assert distance(synced.train(), runs.Run().train()) < 1e-6
        assert kwargs.handle is None
        assert not kwargs.followed[0].following.done

    on_torchrun_ranks(main)


def test_wrong_use_is_refused_and_one_process_has_nothing_to_do(runs: Any, tmp_path: Path) -> None:
    def main(rank: Rank) -> None:
        with pytest.raises(syncline.UsageError, match=r"call SynclineKwargs\.join\(accelerator\) before"):
            runs.Run(runs.SynclineKwargs(SPARSE), joins=False)
        with pytest.raises(syncline.UsageError, match="join before prepare"):
            runs.SynclineKwargs().join(runs.Run().accelerator)
        with pytest.raises(syncline.UsageError, match="comm_hook: DDP takes one hook"):
            runs.SynclineKwargs().join(
                runs.Accelerator(kwargs_handlers=[runs.DistributedDataParallelKwargs(comm_hook="fp16")])
            )
        with pytest.raises(syncline.UsageError, match="updates=True needs the accelerator's optimizer"):
            runs.Run(runs.SynclineKwargs(**UPDATES), joins=False)
        for optimizers, text in {0: "none: pass it to accelerator.prepare", 2: "SGD and SGD: use one with"}.items():
            accelerator = runs.Accelerator(cpu=True)
            runs.SynclineKwargs(**UPDATES).join(accelerator)
            model = accelerator.prepare(small_net())
            for _ in range(optimizers):
                accelerator.prepare(torch.optim.SGD(model.parameters()))
            with pytest.raises(syncline.UsageError, match=f"needs one optimizer of the model, and found {text}"):
                model(torch.ones(2, 784))

    def alone(rank: Rank) -> None:
        kwargs = runs.SynclineKwargs(**UPDATES)
        with said() as text:
            run = runs.Run(kwargs)
            run.model.module = run.model  # the model is not wrapped
            run.accelerator.save_state(tmp_path)
        assert text.getvalue().count("nothing to do") == 1
        assert kwargs.handle is None

    on_torchrun_ranks(main)
    on_torchrun_ranks(alone, ranks=1)
    assert not (tmp_path / "syncline").exists()


def test_the_example_runs_as_a_user_types_it_and_resumes(runs: Any, tmp_path: Path) -> None:
    arguments = ("--steps", "4", "--batch", "8", "--accumulate", "2", "--density", "0.02", "--folder", str(tmp_path))
    said = r"4 steps: \d+\.\d% of held-out digits right"
    assert re.fullmatch(said, type_example("accelerate_digits.py", *arguments))
    assert re.fullmatch(said, run_example("accelerate_digits.py", *arguments, "--resume"))
