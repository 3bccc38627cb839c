"""SynclineStrategy trains as Lightning's DDPStrategy does, checkpoints included."""

from __future__ import annotations

import importlib
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch.amp.grad_scaler import GradScaler

import made_up
import syncline
from frameworks import distance, fingerprint, on_torchrun_ranks, run_example, said, sparse_plan
from syncline.cluster import Rank

SPARSE = syncline.OkTopk(density=0.05)


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

    def planned(rank: Rank) -> str:
        return fingerprint(runs.fit(runs.SynclineStrategy(plan=found), **runs.after_each_epoch(tmp_path)))

    def resumed(rank: Rank) -> str:
        strategy = runs.SynclineStrategy(allow=("sparse",))
        model = runs.fit(strategy, resume=tmp_path / "step=3.ckpt", **runs.after_each_epoch(tmp_path / "more"))
        assert strategy.handle is not None
        assert strategy.handle.plan == found
        return fingerprint(model)

    on_torchrun_ranks(tuned)
    (expected,) = set(on_torchrun_ranks(planned))
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
        strategy = runs.SynclineStrategy(SPARSE)
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
