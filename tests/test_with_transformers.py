"""SynclineTrainer trains as Hugging Face's Trainer does, checkpoints included."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import syncline
from frameworks import distance, fingerprint, on_torchrun_ranks, run_example, said, states_in
from syncline.cluster import Rank

SPARSE = syncline.OkTopk(density=0.05)
UPDATES = {"exchange": SPARSE, "updates": True, "every": 2, "warmup": 2}


@pytest.fixture(scope="module")
def runs() -> Any:
    """Import late, because a larger process takes longer to fork the ranks of other tests."""
    return importlib.import_module("transformers_runs")


def test_dense_trains_as_trainers_own_ddp_does(runs: Any, tmp_path: Path) -> None:
    def main(rank: Rank) -> None:
        for options in ({}, {"gradient_accumulation_steps": 3, "ddp_find_unused_parameters": False}):
            plain = runs.trainer(runs.Trainer, tmp_path, **options)
            plain.train()
            synced = runs.trainer(runs.SynclineTrainer, tmp_path, wanted={"exchange": syncline.Dense()}, **options)
            synced.train()
            assert synced.model_wrapped.find_unused_parameters is plain.model_wrapped.find_unused_parameters
            assert runs.losses(synced) == pytest.approx(runs.losses(plain), abs=1e-4)
            assert distance(synced.model, plain.model) < 1e-4
            assert synced.handle is not None
            assert synced.handle.stats().steps == 6
            assert synced.state.log_history[0]["syncline/sent_share"] == 1

    on_torchrun_ranks(main)


@pytest.mark.parametrize("by_tokens", [True, False])
def test_unequal_batches_train_as_the_large_batch_does(by_tokens: bool, runs: Any, tmp_path: Path) -> None:
    def main(rank: Rank) -> None:
        shares = syncline.Shares((8, 4))
        wanted = {"shares": shares, "model": runs.small_gpt2(dropout=0.0), "train_dataset": runs.ShortWindows()}
        options = {"num_train_epochs": 2, "max_steps": -1, "optim": "sgd", "lr_scheduler_type": "constant"}
        options["average_tokens_across_devices"] = by_tokens
        run = runs.trainer(runs.SynclineTrainer, tmp_path, wanted=wanted, **options)
        run.train()
        assert run.state.global_step == 8
        assert run.handle is not None and (run.handle.shares is None) == by_tokens
        assert distance(run.model, runs.large_batches(12, 2)) < 1e-6
        with pytest.raises(syncline.UsageError, match="updates cannot be weighted by samples"):
            options["average_tokens_across_devices"] = True
            runs.trainer(runs.SynclineTrainer, tmp_path, wanted={**wanted, "updates": True}, **options)

    on_torchrun_ranks(main)


def test_a_run_resumed_from_a_checkpoint_equals_the_uninterrupted_one(runs: Any, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 3}

    def whole(rank: Rank) -> str:
        run = runs.trainer(runs.SynclineTrainer, tmp_path, wanted={"exchange": SPARSE}, save_total_limit=2, **options)
        run.train()
        return fingerprint(run.model)

    def resumed(rank: Rank) -> str:
        run = runs.trainer(
            runs.SynclineTrainer, tmp_path / "more", wanted={"exchange": SPARSE}, save_total_limit=1, **options
        )
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        assert run.handle is not None
        assert run.handle.stats().steps == 6
        return fingerprint(run.model)

    def without(rank: Rank) -> str:
        run = runs.trainer(runs.SynclineTrainer, tmp_path, wanted={"exchange": SPARSE}, save_only_model=True, **options)
        with said() as text:
            run.train(resume_from_checkpoint=True)
        assert ("no residual was saved there" in text.getvalue()) is (rank.rank == 0)
        return fingerprint(run.model)

    (expected,) = set(on_torchrun_ranks(whole))
    assert len(list((tmp_path / "checkpoint-3/syncline").iterdir())) == 2
    assert on_torchrun_ranks(resumed) == [expected, expected]
    assert [path.name for path in (tmp_path / "more").iterdir()] == ["checkpoint-6"]
    (tmp_path / "checkpoint-3/syncline").rename(tmp_path / "elsewhere")
    (tmp_path / "checkpoint-6").rename(tmp_path / "six")
    assert expected not in on_torchrun_ranks(without), "the residual made no difference"
    assert runs.get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-6")
    assert not (tmp_path / "checkpoint-6/syncline").exists()


def test_updates_are_exchanged_and_a_resumed_run_equals_the_uninterrupted_one(runs: Any, tmp_path: Path) -> None:
    """Each rank has its own weights between exchanges, but evaluates, saves and returns those that all agreed on."""
    options: dict[str, Any] = {f"{kind}_strategy": "steps" for kind in ("save", "eval")}
    options |= {"save_steps": 2, "eval_steps": 2, "gradient_accumulation_steps": 2}

    class Evaluating(runs.SynclineTrainer):
        evaluated: tuple[str, ...] = ()

        def evaluation_loop(self, *args: Any, **options: Any) -> Any:
            self.evaluated += (fingerprint(self.model),)
            return super().evaluation_loop(*args, **options)

    def whole(rank: Rank) -> list[str]:
        # The first checkpoint counts as the best, because its loss is larger.
        best = {"load_best_model_at_end": True, "greater_is_better": True}
        run = runs.trainer(Evaluating, tmp_path / "first", wanted=UPDATES, **options, **best)
        run.train()
        sent = [entry.get("syncline/sent_bytes", 0) for entry in run.state.log_history if "loss" in entry]
        assert 0 < max(sent[2:]) < sent[0]
        assert run.state.best_model_checkpoint == str(tmp_path / "first/checkpoint-2")
        assert fingerprint(run.model) == run.evaluated[0]
        run.save_model(str(tmp_path / "best"))
        assert fingerprint(run.model) == run.evaluated[0]
        run.args.output_dir = str(tmp_path / "second")
        run.train()
        assert run.handle is not None
        assert run.handle.exchanges_updates
        assert len(set(run.evaluated)) == 6
        return [*run.evaluated, fingerprint(run.model)]

    def resumed(rank: Rank) -> list[str]:
        run = runs.trainer(Evaluating, tmp_path / "more", wanted=UPDATES, **options)
        run.train(resume_from_checkpoint=str(tmp_path / "first/checkpoint-4"))
        assert fingerprint(run.model) == run.evaluated[0]
        return list(run.evaluated)

    first, second = on_torchrun_ranks(whole)
    assert first == second
    assert fingerprint(runs.GPT2LMHeadModel.from_pretrained(tmp_path / "best")) == first[0]
    assert on_torchrun_ranks(resumed) == [[first[2]]] * 2
    assert states_in(tmp_path / "more/checkpoint-6/syncline") == states_in(tmp_path / "first/checkpoint-6/syncline")


def test_it_tunes_and_extends_another_trainer(runs: Any, tmp_path: Path) -> None:
    class Own(runs.Trainer):
        batches = 0

        def compute_loss(self, *args: Any, **options: Any) -> Any:
            self.batches += 1
            return super().compute_loss(*args, **options)

    class Mine(runs.SynclineTrainer, Own):
        pass

    def main(rank: Rank) -> None:
        plain = runs.trainer(runs.Trainer, tmp_path)
        plain.train()
        synced = runs.trainer(Mine, tmp_path, wanted={"quiet": True})
        synced.train()
        assert synced.batches == 6
        assert distance(synced.model, plain.model) < 1e-4
        assert synced.handle is None
        assert not synced.syncline.followed[0].following.done
        synced.train()
        assert synced.batches == 12

    on_torchrun_ranks(main)


def test_with_one_process_a_single_message_says_that_there_is_nothing_to_do(runs: Any, tmp_path: Path) -> None:
    def main(rank: Rank) -> None:
        with said() as text:
            run = runs.trainer(runs.SynclineTrainer, tmp_path, wanted=UPDATES, save_strategy="steps", save_steps=6)
            run.train()
        assert text.getvalue().count("nothing to do") == 1
        assert run.handle is None

    on_torchrun_ranks(main, ranks=1)
    assert not (tmp_path / "checkpoint-6/syncline").exists()


def test_the_example_runs_and_resumes(runs: Any, tmp_path: Path) -> None:
    arguments = ("--batch", "2", "--density", "0.05", "--folder", str(tmp_path))
    assert re.fullmatch(
        r"4 steps: \d\.\d\d bits per held-out byte", run_example("trainer_text.py", "--steps", "4", *arguments)
    )
    assert run_example("trainer_text.py", "--steps", "6", "--resume", *arguments).startswith("6 steps: ")
