"""What DDP itself says about a backward pass: when it is over, and which parameters it gives a result to.

DDP leaves the gradient of a parameter alone that no rank has used in a step, although the parameter's elements are in a
bucket. With `skip_all_reduce_unused_params` it leaves out whole buckets, and the last one may be among them. So neither
the end of a step nor what was applied in it can be read off the buckets: DDP's reducer has to be asked, after it has
finished.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.errors import UsageError


class Reduction:
    """The reducer of one DDP model, which may be replaced by another one while the model lives."""

    def __init__(self, ddp: DDP) -> None:
        self._ddp = weakref.ref(ddp)  # the model holds its hook, which holds the engine, which holds this
        self._static = bool(getattr(ddp, "static_graph", False))
        self.skips_buckets = bool(getattr(ddp, "skip_all_reduce_unused_params", False))
        """Whether DDP leaves out buckets that no rank uses."""
        self.may_leave_out = self._static or bool(ddp.find_unused_parameters)
        """Whether DDP may give some parameters no result."""
        self._static_use: tuple[Any, Tensor] = (None, torch.empty(0))

    def check(self, keeps: bool) -> None:
        """Refuse a model whose unused parameters cannot be known, where `keeps` says that a residual depends on it."""
        if keeps and self.may_leave_out and not hasattr(self._reducer, "_get_local_used_map"):
            raise UsageError(
                "this torch does not say which parameters were unused, and a residual would be lost with "
                "find_unused_parameters or static_graph: build the model without them, or use a lossless exchange"
            )

    def when_over(self, call: Callable[[], None]) -> bool:
        """Have `call` run when this backward pass is over and DDP has finished with it. False outside of a backward
        pass, where a rank that has joined already takes part in the others' steps."""
        engine: Any = torch.autograd.Variable._execution_engine
        try:
            # DDP queues a callback of its own after its last bucket. One that is queued by a callback comes after it.
            engine.queue_callback(lambda: engine.queue_callback(call))
        except RuntimeError:
            return False
        return True

    @property
    def finished(self) -> bool:
        """Whether DDP is done with the buckets of this backward pass. A checkpointed block may run a backward pass of
        its own inside of it, at whose end it is not."""
        try:
            self._reducer._check_reducer_finalized()
        except RuntimeError:
            return False
        return True

    def used(self, names: Mapping[int, str], bucketed: Collection[str]) -> dict[str, Tensor] | None:
        """For each parameter, whether DDP gave it a result in the last step, as a 0-dim tensor; None if all got one.

        Args:
            names: The names of all parameters that DDP may exchange, by `id`.
            bucketed: The names of those that have been seen in a bucket.
        """
        if not self.may_leave_out:
            return None
        if not self._static:
            counts: Tensor = self._reducer._get_local_used_map()
        else:  # what a static graph uses, it uses in every step: wait for the device once
            if self._static_use[0] is not self._reducer:
                self._static_use = self._reducer, self._reducer._get_local_used_map().cpu()
            counts = self._static_use[1]
        if not counts.is_cuda and bool(counts.all()):
            return None
        return dict(zip(self._numbered(names, bucketed, counts.numel()), (counts > 0).unbind(), strict=True))

    def _numbered(self, names: Mapping[int, str], bucketed: Collection[str], count: int) -> list[str]:
        """DDP numbers its parameters module by module, each once: those that were trained when it was built. One that
        was frozen afterwards keeps its number, and is in a bucket."""
        ddp = self._ddp()
        assert ddp is not None  # noqa: S101 - its hook runs
        found: dict[str, Tensor] = {}
        for module in ddp.module.modules():
            for parameter in module.parameters(recurse=False):
                if id(parameter) in names:
                    found.setdefault(names[id(parameter)], parameter)
        numbered = [name for name, parameter in found.items() if parameter.requires_grad or name in bucketed]
        if len(numbered) != count:
            raise UsageError(
                f"DDP exchanges {count} parameters, and the model has {len(numbered)} to exchange: freeze, add and "
                "remove parameters before DDP is built"
            )
        return numbered

    @property
    def _reducer(self) -> Any:
        ddp = self._ddp()
        assert ddp is not None  # noqa: S101 - its hook runs
        return ddp.reducer
