"""Exchange the updates of a DDP model's optimizer. After the warm-up, backward passes do not synchronise, as inside
DDP's `no_sync()`."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from syncline.ddp.engine import Engine, completed
from syncline.errors import UsageError
from syncline.runtime.topology import RankTopology
from syncline.updates.engine import UpdateEngine
from syncline.updates.updating import Updating


class DdpUpdating(Updating[Engine]):
    """The exchange of updates that is attached to a DDP model."""

    def __init__(
        self,
        ddp: DDP,
        engine: UpdateEngine,
        warm: Engine | None,
        optimizer: Optimizer,
        scaler: GradScaler | None,
        topology: RankTopology | None,
    ) -> None:
        self._ddp = weakref.ref(ddp)  # the model holds its hook, which holds this object
        super().__init__(engine, warm, optimizer, scaler, topology)

    def _check_step(self) -> None:
        ddp = self._ddp()
        if ddp is not None and ddp._join_config.enable:
            text = "join() is not supported while updates are exchanged: a rank that has joined takes no more steps"
            raise UsageError(f"{text}, but all ranks must. Give all ranks the same number of steps")

    def _start_updates(self) -> None:
        super()._start_updates()
        ddp = self._ddp()
        if ddp is not None and ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued:
            ddp.require_backward_grad_sync = True  # in the first step, as DDP requires. `submit` exchanges nothing

    def _synchronise(self, on: bool) -> None:
        """Make DDP call the hook in backward passes, and broadcast buffers before forward passes, or stop both."""
        ddp = self._ddp()
        if ddp is not None:
            ddp.require_backward_grad_sync = ddp.require_forward_param_sync = on

    def submit(self, bucket: Any) -> Any:
        """Exchange a bucket of gradients in the warm-up. After it, return the bucket unchanged."""
        if self._warm is not None:
            return self._warm.submit(bucket)
        flat: Tensor = bucket.buffer()
        return completed(flat)
