"""Find out from DDP when a backward pass is over, and which parameters got a result.

DDP does not change the gradient of a parameter that no rank has used in a step, although the parameter is in a bucket.
With `skip_all_reduce_unused_params` it skips whole buckets, possibly the last one. So the buckets alone show neither
the end of a step nor which results were applied. DDP's reducer knows both after it has finished.
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
    """The reducer of a DDP model, which may be replaced while the model lives."""

    def __init__(self, ddp: DDP) -> None:
        self._ddp = weakref.ref(ddp)  # the model holds the hook, which holds the engine, which holds this object
        self._static = bool(getattr(ddp, "static_graph", False))
        self.skips_buckets = bool(getattr(ddp, "skip_all_reduce_unused_params", False))
        """Whether DDP skips buckets that no rank uses."""
        self.may_leave_out = self._static or bool(ddp.find_unused_parameters)
        """Whether some parameters may get no result."""
        self._static_use: tuple[Any, Tensor] = (None, torch.empty(0))

    def check(self, keeps: bool) -> None:
        """Raise if an exchange has a residual, which depends on unused parameters, and torch does not report them."""
        if keeps and self.may_leave_out and not hasattr(self._reducer, "_get_local_used_map"):
            raise UsageError(
                "this version of torch does not report unused parameters, so find_unused_parameters or static_graph "
                "would lose part of the residual: build the model without them, or use a lossless exchange"
            )

    def when_over(self, call: Callable[[], None]) -> bool:
        """Schedule `call` for when this backward pass is over and DDP has finished with it.

        Return False outside a backward pass: a rank that has joined early takes part in the steps of the others.
        """
        engine: Any = torch.autograd.Variable._execution_engine
        try:
            # DDP queues its own callback after its last bucket. A callback that another callback queues runs after it.
            engine.queue_callback(lambda: engine.queue_callback(call))
        except RuntimeError:
            return False
        return True

    @property
    def finished(self) -> bool:
        """Whether DDP is done with the buckets. It is not after a nested backward pass (activation checkpointing)."""
        try:
            self._reducer._check_reducer_finalized()
        except RuntimeError:
            return False
        return True

    def used(self, names: Mapping[int, str], bucketed: Collection[str]) -> dict[str, Tensor] | None:
        """Return for each parameter whether it got a result in the last step, as a 0-dim tensor; None if all did.

        `names` are those of all parameters that DDP may exchange, by `id`; `bucketed` were seen in a bucket.
        """
        if not self.may_leave_out:
            return None
        if not self._static:
            counts: Tensor = self._reducer._get_local_used_map()
        else:  # a static graph uses the same parameters in every step: read them, and wait for the device, only once
            if self._static_use[0] is not self._reducer:
                self._static_use = self._reducer, self._reducer._get_local_used_map().cpu()
            counts = self._static_use[1]
        if not counts.is_cuda and bool(counts.all()):
            return None
        return dict(zip(self._in_ddp_order(names, bucketed, counts.numel()), (counts > 0).unbind(), strict=True))

    def _in_ddp_order(self, names: Mapping[int, str], bucketed: Collection[str], count: int) -> list[str]:
        """Return the names of the `count` parameters that DDP exchanges, in its order.

        DDP numbers the parameters that were trained when it was built, module by module. A parameter that was frozen
        later keeps its number, and is in a bucket.
        """
        parameters = {
            names[id(parameter)]: parameter
            for module in self._model.module.modules()
            for parameter in module.parameters(recurse=False)
            if id(parameter) in names
        }
        ordered = [name for name, parameter in parameters.items() if parameter.requires_grad or name in bucketed]
        if len(ordered) != count:
            raise UsageError(
                f"DDP exchanges {count} parameters, but the model now has {len(ordered)} to exchange: freeze, add and "
                "remove parameters before DDP is built"
            )
        return ordered

    @property
    def _model(self) -> DDP:
        ddp = self._ddp()
        assert ddp is not None  # noqa: S101 - its hook runs
        return ddp

    @property
    def _reducer(self) -> Any:
        return self._model.reducer
