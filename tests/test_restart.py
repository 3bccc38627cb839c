"""Training that is killed at any moment resumes from its last checkpoint with the same result."""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

import syncline
from ddp_helpers import Mlp, batch, forked_torchrun, on_ranks, refusal, seeded
from syncline.cluster import ClusterSpec, Rank, launch, launch_outcomes
from syncline.runtime import checkpoint

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))  # not in a fixture, because ranks are forked
import restart_digits  # noqa: E402

STEPS, EVERY = 15, 5
SETTINGS = ["--steps", str(STEPS), "--every", str(EVERY), "--batch", "8", "--timeout", "30"]
DIE_AT = random.Random(2026).choice([step for step in range(EVERY + 1, STEPS - EVERY) if step % EVERY])
"""The step before which a rank is killed in the first attempt."""
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}


def torchrun(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run torchrun with one rank, in its own process group, so that no worker outlives it."""
    launcher = ["--standalone", "--nproc-per-node=1"]
    with subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *launcher, str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT},
        start_new_session=True,
    ) as run:
        try:
            output, errors = run.communicate(timeout=150)
        except BaseException:
            os.killpg(run.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(run.args, run.returncode, output, errors)


def run_example(ranks: int, *arguments: str) -> None:
    """Run the example on forked ranks, which need not import torch again."""
    options = options_of(*arguments)
    launch(ClusterSpec(hosts=ranks), lambda rank: restart_digits.main(options), shaped=False, deadline_s=90)


def options_of(*arguments: str) -> argparse.Namespace:
    return restart_digits.options_of([*SETTINGS, *arguments])


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def losses_in(path: Path) -> list[tuple[int, str]]:
    """Return the steps in the order in which they ran, including repeated ones, with their exact losses."""
    return [(entry["step"], entry["loss"]) for entry in map(json.loads, path.read_text().splitlines())]


def training_in(folder: Path) -> dict[str, Any]:
    training: dict[str, Any] = torch.load(folder / "training.pt", weights_only=True)
    return training


def kept_in(folder: Path) -> dict[str, Tensor]:
    """Return the sum of each saved tensor over all ranks, by its name in the files."""
    total: dict[str, Tensor] = {}
    for path in sorted(folder.glob("rank-*.safetensors")):
        for name, tensor in load_file(path).items():
            total[name] = total.get(name, torch.zeros(())) + tensor.double()
    return total


@dataclass(frozen=True)
class Straight:
    """A run without interruptions."""

    folder: Path
    losses: list[tuple[int, str]]

    @property
    def last(self) -> Path:
        return self.folder / f"step-{STEPS:06d}"


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    restart_digits.digits()  # read once, for all ranks
    folder = tmp_path_factory.mktemp("restart")
    run_example(2, "--checkpoint-dir", str(folder / "run"), "--losses", str(folder / "losses"))
    return Straight(folder / "run", losses_in(folder / "losses"))


def assert_ends_like(straight: Straight, folder: Path) -> None:
    """Assert equal weights, random states and residuals on each rank."""
    assert [step for step, _ in straight.losses] == list(range(1, STEPS + 1))
    assert sorted(path.name for path in folder.iterdir()) == ["latest", straight.last.name]
    mine, theirs = (training_in(path) for path in (folder / straight.last.name, straight.last))
    assert_same(mine["model"], theirs["model"])
    assert all(torch.equal(a, b) for a, b in zip(mine["random"], theirs["random"], strict=True))
    for path in (straight.last / "exchange").iterdir():
        kept = load_file(path)
        assert any(tensor.any() for tensor in kept.values())
        assert_same(load_file(folder / straight.last.name / "exchange" / path.name), kept)


def assert_same(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


# --- DDP ------------------------------------------------------------------------------------------------------------


def test_a_run_in_which_a_rank_was_killed_ends_with_the_bits_of_an_uninterrupted_one(
    straight: Straight, tmp_path: Path
) -> None:
    """torchrun restarts it, and only the steps since the last checkpoint run again."""
    folder, losses = tmp_path / "run", tmp_path / "losses"
    places = ["--checkpoint-dir", str(folder), "--losses", str(losses)]
    command = [str(EXAMPLES / "restart_digits.py"), *SETTINGS, *places, "--die-at", str(DIE_AT)]
    status, output, errors = forked_torchrun(tmp_path, "--max-restarts=3", *command, **ENVIRONMENT)
    assert status == 0, errors
    last = DIE_AT // EVERY * EVERY
    assert f"rank 1 kills itself before step {DIE_AT}" in output
    assert re.findall(r"continuing after step (\d+)", output) == [str(last)]
    assert losses_in(losses) == straight.losses[:DIE_AT] + straight.losses[last:]
    assert_ends_like(straight, folder)


@pytest.mark.parametrize("moment", ["write_draft", "put_in_place", "latest"])
def test_a_run_that_was_killed_while_saving_resumes_from_a_complete_checkpoint(
    straight: Straight, tmp_path: Path, moment: str
) -> None:
    """The second checkpoint is not used before `latest` names it, whenever saving was interrupted."""
    folder, losses = tmp_path / "run", tmp_path / "losses"
    options = options_of("--checkpoint-dir", str(folder), "--losses", str(losses))

    def dies(rank: Rank) -> None:
        if rank.rank == 0 and moment == "latest":
            replace = Path.replace
            patched(Path, "replace", lambda *paths: replace(*paths), before=lambda paths: paths[1].name == "latest")
        elif rank.rank == 0:
            patched(checkpoint, moment, getattr(checkpoint, moment), before=lambda _: True)
        restart_digits.main(options)

    def patched(where: Any, name: str, call: Callable[..., Any], before: Callable[[tuple[Any, ...]], bool]) -> None:
        times = []

        def second_time_dies(*arguments: Any) -> Any:
            if before(arguments):
                times.append(arguments)
            if len(times) == 2:
                killed()
            return call(*arguments)

        setattr(where, name, second_time_dies)

    outcomes = launch_outcomes(ClusterSpec(hosts=2), dies, deadline_s=60, grace_s=0.1, shaped=False)
    assert "SIGKILL" in str(outcomes[0].error)
    assert (folder / "latest").read_text() == f"step-{EVERY:06d}"
    assert (folder / f"step-{2 * EVERY:06d}" / "training.pt").exists()
    run_example(2, "--checkpoint-dir", str(folder), "--losses", str(losses))
    assert losses_in(losses) == straight.losses[: 2 * EVERY] + straight.losses[EVERY:]
    assert_ends_like(straight, folder)


def test_another_number_of_ranks_is_refused_or_shares_residuals_or_drops_them(
    straight: Straight, tmp_path: Path
) -> None:
    more = ["--checkpoint-dir", str(tmp_path / "run"), "--steps", str(STEPS + 2)]

    def go_on(ranks: int, policy: str) -> dict[str, Tensor]:
        """Resume on this number of ranks, and return the residuals before the next step."""
        shutil.copytree(straight.folder, tmp_path / "run", dirs_exist_ok=True)
        options = options_of(*more, "--on-world-size", policy)

        def main(rank: Rank) -> None:
            resume = restart_digits.resume

            def resume_and_save(*arguments: Any) -> tuple[int, int]:
                found = resume(*arguments)
                arguments[-1].save(tmp_path / policy)
                return found

            restart_digits.resume = resume_and_save
            restart_digits.main(options)

        launch(ClusterSpec(hosts=ranks), main, shaped=False, deadline_s=90)
        assert training_in(tmp_path / "run" / f"step-{STEPS + 2:06d}")["step"] == STEPS + 2
        return kept_in(tmp_path / policy)

    told = str(outcome_of(lambda: go_on(3, "refuse")))
    assert "saved by 2 ranks, but there are 3 now: pass on_world_size='redistribute', or 'reset'" in told
    before, shared = kept_in(straight.last / "exchange"), go_on(3, "redistribute")
    assert shared.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.allclose(shared[name], tensor, rtol=1e-6, atol=1e-12), name
    assert not any(tensor.any() for tensor in go_on(1, "reset").values())


def outcome_of(call: Callable[[], Any]) -> syncline.ClusterError:
    with pytest.raises(syncline.ClusterError) as raised:
        call()
    return raised.value


def test_a_truncated_state_file_ends_the_run_with_a_one_line_error(straight: Straight, tmp_path: Path) -> None:
    shutil.copytree(straight.folder, tmp_path / "run")
    path = tmp_path / "run" / straight.last.name / "exchange" / "rank-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    options = ["--checkpoint-dir", str(tmp_path / "run"), "--on-world-size", "redistribute"]  # one rank reads both
    ran = torchrun(EXAMPLES / "restart_digits.py", *SETTINGS, *options)
    assert ran.returncode != 0
    (told,) = (line for line in ran.stderr.splitlines() if line.startswith(f"restart_digits: {path}"))
    assert "load an earlier checkpoint" in told
    (traceback,) = ran.stderr.split("Traceback (most recent call last)")[1:]
    assert "torch/distributed/run.py" in traceback and "syncline" not in traceback.partition("FAILED")[0]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--steps", "-3"], "--steps -3: must be 1 or more"),
        (["--every", "0"], "--every 0: must be 1 or more"),
        (["--checkpoint-dir", __file__], "is not a folder"),
    ],
)
def test_invalid_options_of_the_example_are_refused_in_one_line(
    wrong: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        restart_digits.options_of(["--checkpoint-dir", str(tmp_path), *wrong])
    assert caught.value.code == 2 and capsys.readouterr().err.rstrip().endswith(told)


def test_torchrun_settings_that_prevent_a_restart_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    told = refusal(lambda: restart_digits.main(options_of("--checkpoint-dir", str(tmp_path))))
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in told


# --- Layerwise ------------------------------------------------------------------------------------------------------

SPARSE = syncline.OkTopk(density=0.05)


def momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=0.003)


OPTIMIZERS: list[Callable[[Any], Optimizer]] = [adam, momentum]


def trainer_of(make: Callable[[Any], Optimizer]) -> syncline.Layerwise:
    return syncline.Layerwise(seeded(lambda: Mlp(48)), make, SPARSE, bucket_mb=0.005)


def train(trainer: syncline.Layerwise, steps: range) -> None:
    for step in steps:
        trainer(batch(dist.get_rank(), step, 8, 48)).square().mean().backward()


def save(trainer: syncline.Layerwise, folder: Path) -> None:
    """Save as a script does: rank 0 saves the weights, and each rank its own state."""
    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        torch.save([trainer.module.state_dict(), trainer.optimizer.state_dict()], folder / "training.pt")
    trainer.save(folder / "exchange")


def load(trainer: syncline.Layerwise, folder: Path, **options: Any) -> None:
    model, optimizer = torch.load(folder / "training.pt", weights_only=True)
    trainer.module.load_state_dict(model)
    trainer.optimizer.load_state_dict(optimizer)
    trainer.load(folder / "exchange", **options)


def own_of(trainer: syncline.Layerwise) -> dict[str, Tensor]:
    """Return weights, residuals and the optimizer's state."""
    state = trainer.state_dict()
    kept = {f"{name}/{kind}": tensor for name, kinds in state["tensors"].items() for kind, tensor in kinds.items()}
    optimizer = {
        f"{index}/{kind}": value
        for index, kinds in state["optimizer"]["state"].items()
        for kind, value in kinds.items()
        if isinstance(value, Tensor)
    }
    return {**state["model"], **kept, **optimizer}


def test_layerwise_resumes_a_saved_run_bit_for_bit(tmp_path: Path) -> None:
    def main(rank: Rank) -> list[bool]:
        same = []
        for number, make in enumerate(OPTIMIZERS):
            folder = tmp_path / str(number)
            one = trainer_of(make)
            train(one, range(5))
            save(one, folder)
            train(one, range(5, 9))
            other = trainer_of(make)
            load(other, folder)
            assert other.steps == 5
            train(other, range(5, 9))
            mine, theirs = own_of(one), own_of(other)
            assert any(name.endswith("/residual") and tensor.any() for name, tensor in mine.items())
            same.append(mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine))
            one.close()
            other.close()
        return same

    assert on_ranks(2, main) == [[True, True]] * 2


def test_layerwise_refuses_on_all_ranks_what_would_make_them_diverge(tmp_path: Path) -> None:
    def main(rank: Rank) -> list[str]:
        told = []
        one = trainer_of(adam)
        train(one, range(3))
        save(one, tmp_path)
        exchange = tmp_path / "exchange"
        other = trainer_of(adam)
        told.append(refusal(lambda: other.load(exchange)))

        model, optimizer = torch.load(tmp_path / "training.pt", weights_only=True)
        if rank.rank == 0:
            other.module.load_state_dict(model)
        told.append(refusal(lambda: other.load(exchange), syncline.SynclineError))

        other.module.load_state_dict(model)
        if rank.rank == 0:
            other.optimizer.load_state_dict(optimizer)
        told.append(refusal(lambda: other.load(exchange), syncline.SynclineError))

        if rank.rank == 0:  # a rank whose weights have diverged
            next(iter(other.module.parameters())).data.add_(1)
        told.append(refusal(lambda: other.save(tmp_path / "apart"), syncline.SynclineError))
        assert other.steps == 0
        other.close()
        told.append(refusal(lambda: other.load(exchange)))
        return told

    for rank, (early, one_rank, optimizer, apart, closed) in enumerate(on_ranks(2, main)):
        assert "the model's weights are not those of step 3" in early
        assert (
            "refused on rank 1: the model's weights" if rank == 0 else "the model's weights are not those"
        ) in one_rank
        assert "optimizer.state is" in optimizer
        assert "the state to save differs between ranks: weights is" in apart
        assert "closed" in closed
    assert not list((tmp_path / "apart").glob("*"))


def test_layerwise_on_another_number_of_ranks_refuses_shares_or_drops_residuals(tmp_path: Path) -> None:
    def first(rank: Rank) -> None:
        for number, make in enumerate(OPTIMIZERS):
            trainer = trainer_of(make)
            train(trainer, range(4))
            save(trainer, tmp_path / str(number))
            trainer.close()

    def then(rank: Rank) -> list[str]:
        told = []
        for number, make in enumerate(OPTIMIZERS):
            folder, trainer = tmp_path / str(number), trainer_of(make)
            for policy in ("refuse", "redistribute", "reset"):
                try:
                    load(trainer, folder, on_world_size=policy)
                    trainer.save(folder / policy)
                    train(trainer, range(4, 6))
                    told.append("went on")
                except syncline.UsageError as error:
                    told.append(str(error))
            trainer.close()
        return told

    on_ranks(2, first)
    told = on_ranks(3, then)[0]
    for number, (refused, shared, dropped) in enumerate((told[:3], told[3:])):
        assert "saved by 2 ranks, but there are 3 now: pass on_world_size='redistribute', or 'reset'" in refused
        assert shared == dropped == "went on"
        folder = tmp_path / str(number)
        before, after = kept_in(folder / "exchange"), kept_in(folder / "redistribute")
        assert any(tensor.any() for tensor in before.values())
        for name, tensor in before.items():
            assert torch.allclose(after[name], tensor, rtol=1e-6, atol=1e-12), name
        assert not any(tensor.any() for tensor in kept_in(folder / "reset").values())


def test_layerwise_killed_while_saving_leaves_the_old_or_the_new_checkpoint_and_no_mixture(tmp_path: Path) -> None:
    """Both checkpoints use one folder. The old one is valid until all drafts of the new one are written."""

    def dies(rank: Rank, moment: str, folder: Path) -> None:
        rank.init_process_group(30)
        trainer = trainer_of(momentum)
        train(trainer, range(3))
        trainer.save(folder)
        train(trainer, range(3, 5))
        if rank.rank == 1:
            setattr(checkpoint, moment, lambda *_: killed())
        trainer.save(folder)

    def then(rank: Rank) -> list[int]:
        found = []
        for moment in ("write_draft", "put_in_place"):
            straight, other = trainer_of(momentum), trainer_of(momentum)
            train(straight, range(3))
            if moment == "put_in_place":
                train(straight, range(3, 5))
            other.module.load_state_dict(straight.module.state_dict())
            other.optimizer.load_state_dict(straight.optimizer.state_dict())
            other.load(tmp_path / moment)
            mine, theirs = own_of(straight), own_of(other)
            assert all(torch.equal(mine[name], theirs[name]) for name in mine), moment
            found.append(other.steps)
        return found

    for moment in ("write_draft", "put_in_place"):
        outcomes = launch_outcomes(
            ClusterSpec(hosts=2),
            functools.partial(dies, moment=moment, folder=tmp_path / moment),
            deadline_s=60,
            grace_s=0.1,
            shaped=False,
        )
        assert "SIGKILL" in str(outcomes[1].error)
    assert on_ranks(2, then) == [[3, 5]] * 2
