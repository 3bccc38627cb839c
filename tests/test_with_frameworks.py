"""What the framework integrations have in common: they are imported on demand, and refuse wrong arguments."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import syncline
from ddp_helpers import refusal

CLASSES = {"lightning": "SynclineStrategy", "accelerate": "SynclineKwargs", "transformers": "SynclineTrainer"}


def maker(framework: str) -> Callable[..., Any]:
    """Return the class. It is imported late, because a larger process takes longer to fork the ranks of other tests."""
    return getattr(importlib.import_module(f"syncline.integrations.{framework}"), CLASSES[framework])


def test_importing_syncline_imports_no_framework() -> None:
    program = "import sys, syncline.cli, syncline.integrations; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert not {"lightning", "pytorch_lightning", "accelerate", "transformers"} & set(done.stdout.split())


@pytest.mark.parametrize("framework", CLASSES)
def test_a_missing_framework_is_named_with_the_command_that_installs_it(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*sys.modules]:
        if name.partition(".")[0] in (framework, f"pytorch_{framework}"):
            monkeypatch.delitem(sys.modules, name)
    for name in (framework, f"pytorch_{framework}"):
        monkeypatch.setitem(sys.modules, name, None)  # Python then treats it as not installed
    monkeypatch.delitem(sys.modules, f"syncline.integrations.{framework}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'syncline\[{framework}\]'$") as raised:
        importlib.import_module(f"syncline.integrations.{framework}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("framework", CLASSES)
def test_wrong_arguments_are_refused_at_construction(framework: str, tmp_path: Path) -> None:
    make = maker(framework)
    nowhere = tmp_path / "plan.json"
    for expected, wanted in {
        "exchange and plan exclude each other": {"exchange": syncline.Dense(), "plan": nowhere},
        "<class 'syncline.exchange.dense.Dense'> is not an exchange": {"exchange": syncline.Dense},
        "'sparse' is not an exchange": {"exchange": "sparse"},
        "allow, quality and change=False are for tuning": {"exchange": syncline.Dense(), "allow": ("bf16",)},
        "allow='topk'": {"allow": ("topk",)},
        "quality is 'good': it must be one of": {"quality": "good"},
        "plan is a int": {"plan": 3},
        "network is a list: pass a Network": {"network": []},
        f"{nowhere}: cannot be read": {"plan": nowhere},
        f"{tmp_path / 'net'}: cannot be read": {"network": tmp_path / "net"},
        "on_world_size is 'shrink': it must be one of": {"on_world_size": "shrink"},
        "an exchange of updates must be named: pass exchange= too": {"updates": True},
        "updates is 1: it must be True or False": {"exchange": syncline.Dense(), "updates": 1},
        "every is 0: it must be a number of steps": {"exchange": syncline.Dense(), "updates": True, "every": 0},
        "every, warmup, delay and outer are for updates": {"exchange": syncline.Dense(), "every": 5},
    }.items():
        assert refusal(lambda wanted=wanted: make(**wanted)).startswith(expected)


def test_a_communication_hook_is_refused_at_construction() -> None:
    hook = "DDP takes one hook, and Syncline needs it: leave yours out"
    assert refusal(lambda: maker("lightning")(ddp_comm_hook=print)) == f"ddp_comm_hook: {hook}"
    assert refusal(lambda: maker("accelerate")(comm_hook="bf16")) == f"comm_hook: {hook}"
