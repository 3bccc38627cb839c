"""SynclineStrategy trains as Lightning's DDPStrategy does, checkpoints included."""

from __future__ import annotations

import importlib
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import GradScaler

import made_up
import syncline
from frameworks import (
    SHARES,
    distance,
    fingerprint,
    images,
    on_torchrun_ranks,
    run_example,
    said,
    sparse_plan,
    states_in,
    trained_on_large_batches,
)
from syncline.cluster import Rank

SPARSE = syncline.OkTopk(density=0.05)
UPDATES = {"exchange": SPARSE, "updates": True, "every": 2, "warmup": 2}


@pytest.fixture(scope="module")
def runs() -> Any:
    """Import late, because a larger process takes longer to fork the ranks of other tests."""
    return importlib.import_module("lightning_runs")


def test_dense_trains_as_lightnings_own_ddp_does(runs: Any) -> None:
    def main(rank: Rank) -> None:
        for accumulated, precision in ((1, "32-true"), (3, "bf16-mixed")):
            options = {"accumulate_grad_batches": accumulated, "gradient_clip_val": 1.0, "precision": precision}
            plain = runs.fit(runs.DDPStrategy(), **options)
            strategy = runs.SynclineStrategy(syncline.Dense(), gradient_as_bucket_view=True)
            synced = runs.fit(strategy, **options)
            assert synced.losses == pytest.approx(plain.losses, abs=1e-5)
            assert distance(synced, plain) < 1e-6
            assert strategy.handle is not None
            assert strategy.handle.stats().steps == 6 // accumulated
        plain = runs.fit(runs.DDPStrategy())
        for model in (runs.Digits(), runs.Manual()):
            assert distance(runs.fit(runs.SynclineStrategy(syncline.Dense(), updates=True), model=model), plain) < 1e-6

    on_torchrun_ranks(main)


def test_unequal_batches_train_as_the_large_batch_does(runs: Any) -> None:
    def main(rank: Rank) -> None:
        shares = syncline.Shares(SHARES)
        data = images(73)
        strategy = runs.SynclineStrategy(shares=shares)
        batches = runs.DataLoader(data, batch_sampler=shares.sampler(data))
        model = runs.fit(strategy, batches=batches, use_distributed_sampler=False)
        assert strategy.handle is not None and strategy.handle.shares == shares
        assert distance(model.net, trained_on_large_batches(73, 2)) < 1e-6
        with pytest.raises(syncline.UsageError, match="use_distributed_sampler=False"):
            runs.fit(runs.SynclineStrategy(shares=shares), batches=batches)

    on_torchrun_ranks(main)


def test_a_run_resumed_from_a_checkpoint_equals_the_uninterrupted_one(runs: Any, tmp_path: Path) -> None:
    """Residuals are saved beside the checkpoint, removed with it, and required to resume."""

    def whole(rank: Rank) -> str:
        return fingerprint(runs.fit(runs.SynclineStrategy(SPARSE), **runs.after_each_epoch(tmp_path, save_last="link")))

    def resumed(rank: Rank) -> str:
        strategy = runs.SynclineStrategy(SPARSE)
        model = runs.fit(
            strategy, resume=tmp_path / "step=3.ckpt", **runs.after_each_epoch(tmp_path / "top", save_top_k=1)
        )
        assert strategy.handle is not None
        assert strategy.handle.stats().steps == 6
        return fingerprint(model)

    def elsewhere(rank: Rank) -> str:
        alone = tmp_path / "alone"
        with pytest.raises(syncline.UsageError, match=r"step=3\.ckpt\.syncline, which does not exist: copy"):
            runs.fit(runs.SynclineStrategy(SPARSE), resume=alone / "step=3.ckpt")
        with pytest.raises(syncline.UsageError, match="the checkpoint was saved with"):
            runs.fit(runs.SynclineStrategy(syncline.OkTopk(density=0.1)), resume=tmp_path / "step=3.ckpt")
        with pytest.raises(syncline.UsageError, match="was saved at step 6, but its checkpoint at step 3"):
            runs.fit(runs.SynclineStrategy(SPARSE), resume=tmp_path / "mixed/step=3.ckpt")
        at_the_end = runs.SynclineStrategy(SPARSE)
        runs.fit(at_the_end, resume=tmp_path / "last.ckpt", epochs=3)
        assert at_the_end.handle is not None
        assert at_the_end.handle.stats().steps == 9
        return fingerprint(runs.fit(runs.SynclineStrategy(SPARSE, on_world_size="reset"), resume=alone / "step=3.ckpt"))

    (expected,) = set(on_torchrun_ranks(whole))
    kept = [f"rank-0000{rank}-of-00002.safetensors" for rank in range(2)]
    assert sorted(path.name for path in (tmp_path / "step=3.ckpt.syncline").iterdir()) == kept
    assert on_torchrun_ranks(resumed) == [expected, expected]
    assert sorted(path.name for path in (tmp_path / "top").iterdir()) == ["step=6.ckpt", "step=6.ckpt.syncline"]
    for name in ("alone", "mixed"):
        (tmp_path / name).mkdir()
        shutil.copy(tmp_path / "step=3.ckpt", tmp_path / name)
    shutil.copytree(tmp_path / "step=6.ckpt.syncline", tmp_path / "mixed/step=3.ckpt.syncline")
    assert expected not in on_torchrun_ranks(elsewhere), "the residual made no difference"


def test_updates_are_exchanged_and_a_resumed_run_equals_the_uninterrupted_one(runs: Any, tmp_path: Path) -> None:
    """Each rank has its own weights between exchanges, but validates, saves and returns those that all agreed on."""
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}  # two steps in each epoch of three batches

    def whole(rank: Rank) -> list[str]:
        strategy = runs.SynclineStrategy(**UPDATES)
        model = runs.fit(strategy, epochs=3, **runs.after_each_epoch(tmp_path), **options)
        assert 0 < max(model.sent_bytes[step] for step in (3, 4, 5, 6)) < model.sent_bytes[1]
        model.trainer.save_checkpoint(tmp_path / "after.ckpt")
        final = fingerprint(model)
        assert final == model.validated[-1] != model.validated[-2]
        assert strategy.handle is not None
        assert strategy.handle.stats().steps == 6

        model.trainer.fit_loop.max_epochs = 4
        model.trainer.fit(model, *runs.loaders())
        assert strategy.handle.stats().steps == 2
        assert strategy.handle.exchanges_updates
        return [final, fingerprint(model), *model.validated]

    def resumed(rank: Rank) -> str:
        path, saved = tmp_path / "step=4.ckpt", runs.after_each_epoch(tmp_path / "more")
        return fingerprint(runs.fit(runs.SynclineStrategy(**UPDATES), epochs=3, resume=path, **saved, **options))

    def refused(rank: Rank) -> None:
        class Two(runs.Manual):
            def configure_optimizers(self) -> Any:
                return [super().configure_optimizers(), torch.optim.Adam(self.net[1].parameters())]

        class Without(runs.Digits):
            def configure_optimizers(self) -> Any:
                return None

        for model, text in {Two(): "SGD and Adam: use one with", Without(): "none: return one from configure_"}.items():
            with pytest.raises(syncline.UsageError, match=f"needs one optimizer of the model, and found {text}"):
                runs.fit(runs.SynclineStrategy(**UPDATES), model=model)

    first, second = on_torchrun_ranks(whole)
    assert first == second
    saved = torch.load(tmp_path / "step=6.ckpt", weights_only=False)["state_dict"]
    model = runs.Digits()
    model.load_state_dict(saved)
    assert fingerprint(model) == first[0]
    assert on_torchrun_ranks(resumed) == [first[0], first[0]]
    expected = states_in(tmp_path / "step=6.ckpt.syncline")
    assert states_in(tmp_path / "more/step=6.ckpt.syncline") == expected
    assert states_in(tmp_path / "after.ckpt.syncline") == expected
    on_torchrun_ranks(refused)


def test_the_residual_follows_the_loss_scale(runs: Any) -> None:
    def scaled(growth_interval: int) -> str:
        scaler = GradScaler("cpu", init_scale=64.0, growth_interval=growth_interval)
        model = runs.fit(
            runs.SynclineStrategy(SPARSE), plugins=[runs.MixedPrecision("16-mixed", device="cpu", scaler=scaler)]
        )
        assert scaler.get_scale() == 64 * 2 ** (6 // growth_interval)
        return fingerprint(model)

    def main(rank: Rank) -> None:
        assert scaled(growth_interval=1) == scaled(growth_interval=1000)
        scaler = GradScaler("cpu", init_scale=64.0)
        strategy = runs.SynclineStrategy(syncline.Dense(), updates=True)
        plugin = runs.MixedPrecision("16-mixed", device="cpu", scaler=scaler)
        runs.fit(strategy, model=runs.Digits(infinite_at=2), plugins=[plugin])
        assert scaler.get_scale() == (32.0 if rank.rank == 1 else 64.0)  # rank 1 has skipped a step
        assert strategy.handle is not None
        assert strategy.handle.stats().steps == 6

    on_torchrun_ranks(main)


def test_the_learning_rate_finder_leaves_nothing_behind(runs: Any, tmp_path: Path) -> None:
    """It trains a few steps, and then loads the checkpoint that it saved before them."""

    class Finder(runs.LearningRateFinder):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            super().on_fit_start(trainer, pl_module)
            pl_module.lr = 0.05  # not what it has found

    def main(rank: Rank) -> None:
        wanted = {**UPDATES, "every": 1, "warmup": 0}
        finder = Finder(num_training_steps=3, early_stop_threshold=None)
        found = runs.fit(runs.SynclineStrategy(**wanted), callbacks=[finder], default_root_dir=tmp_path)
        assert len(found.losses) == 9
        assert fingerprint(found) == fingerprint(runs.fit(runs.SynclineStrategy(**wanted)))

    on_torchrun_ranks(main)


def test_it_tunes_and_a_resumed_run_uses_the_plan_that_was_found(runs: Any, tmp_path: Path) -> None:
    fast = made_up.network((0, 0), mbit=100_000.0, startup_s=1e-6)
    found = sparse_plan(runs.Digits())
    folder = tmp_path / "step=3.ckpt.syncline"

    def tuned(rank: Rank) -> None:
        plain = runs.fit(runs.DDPStrategy(), epochs=5)
        strategy = runs.SynclineStrategy(network=fast, quiet=True)
        assert distance(runs.fit(strategy, epochs=5, **runs.after_each_epoch(tmp_path / "plain")), plain) < 1e-5
        assert strategy.followed is not None
        assert strategy.followed.following.plan is not None
        assert strategy.followed.following.plan.nothing
        again = runs.SynclineStrategy(network=fast)
        with said() as text:
            runs.fit(again, epochs=6, resume=tmp_path / "plain/step=15.ckpt")
        assert (rank.rank > 0) is ("The plan is applied, as requested" not in text.getvalue())
        assert again.handle is None
        with said() as text:  # as a compiled model leaves it: a residual, and no plan
            runs.fit(runs.SynclineStrategy(allow=("sparse",), network=fast), resume=tmp_path / "step=3.ckpt")
        assert (rank.rank > 0) is ("because the model is tuned again: no plan was saved there" not in text.getvalue())

    def planned(rank: Rank) -> str:
        return fingerprint(runs.fit(runs.SynclineStrategy(plan=found), **runs.after_each_epoch(tmp_path)))

    def resumed(rank: Rank) -> str:
        strategy = runs.SynclineStrategy(allow=("sparse",))
        model = runs.fit(strategy, resume=tmp_path / "step=3.ckpt", **runs.after_each_epoch(tmp_path / "more"))
        assert strategy.handle is not None
        assert strategy.handle.plan == found
        return fingerprint(model)

    (expected,) = set(on_torchrun_ranks(planned))
    on_torchrun_ranks(tuned)
    found.save(folder / "plan.json")
    assert on_torchrun_ranks(resumed) == [expected, expected]
    assert syncline.Plan.load(tmp_path / "more/step=6.ckpt.syncline/plan.json") == found


def test_the_callback_logs_each_step_and_prints_what_is_attached(runs: Any) -> None:
    def main(rank: Rank) -> str:
        callback = runs.SynclineCallback()
        with said() as text:
            model = runs.fit(runs.SynclineStrategy(SPARSE, quiet=True), callbacks=[callback])
        logged = model.trainer.logged_metrics
        assert 0 < logged["syncline/sent_share"] < 0.2
        assert logged["syncline/exchange_ms"] > 0
        with pytest.raises(syncline.UsageError, match=r"strategy=SynclineStrategy\(…\)\), but it has DDPStrategy"):
            runs.fit(runs.DDPStrategy(), callbacks=[callback])
        return str(text.getvalue())

    first, second = on_torchrun_ranks(main)
    assert "OkTopk(density=0.05" in first
    assert "2 slots of" in first
    assert not second


def test_with_one_process_a_single_message_says_that_there_is_nothing_to_do(runs: Any, tmp_path: Path) -> None:
    def main(rank: Rank) -> str:
        strategy = runs.SynclineStrategy(**UPDATES)
        with said() as text:
            runs.fit(strategy, ranks=1, **runs.after_each_epoch(tmp_path))
        assert strategy.handle is None
        return str(text.getvalue())

    (text,) = on_torchrun_ranks(main, ranks=1)
    assert text.count("nothing to do") == 1
    assert not list(tmp_path.glob("*.syncline"))


def test_the_example_runs_and_resumes(runs: Any, tmp_path: Path) -> None:
    arguments = ("--batch", "8", "--density", "0.02", "--folder", str(tmp_path))
    assert re.fullmatch(
        r"4 steps: \d+\.\d% of held-out digits right", run_example("lightning_digits.py", "--steps", "4", *arguments)
    )
    again = run_example("lightning_digits.py", "--steps", "6", "--resume", *arguments)
    assert again.startswith("6 steps: ")
