"""Send the first rank's buffers to all ranks ahead of the weights.

DDP broadcasts buffers, such as the statistics of BatchNorm, at the start of a forward pass. While weights are being
gathered, a few kilobytes then share the links with megabytes, and the forward pass waits for them: 26 ms of a step of
190 ms for a ResNet-50 on 8 hosts. So they are sent between the optimizer's step and the gathers, when the links are
idle. Other ranks still receive them at the start of the next forward pass, as with DDP. A buffer that the script has
written in the meantime, for example by loading a checkpoint, keeps what was written.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.dist.lane import Job
from syncline.overlap.engine import OverlapEngine


class BufferBroadcast:
    """The buffers of one model. All ranks call its methods in the same order."""

    def __init__(self, engine: OverlapEngine) -> None:
        self._engine = engine
        self._sent: list[tuple[list[tuple[Tensor, int]], Tensor, Any]] = []
        """Per type: buffers with their versions, values of the first rank, and a future of these."""

    def send(self, ddp: DDP) -> None:
        """Begin to send the buffers, if DDP would broadcast them before the next forward pass."""
        self._sent = []
        if not ddp.will_sync_module_buffers() or hasattr(ddp, "buffer_hook"):
            return
        runner, group = self._engine.runner, self._engine.runner.groups[0].comm.group
        ddp._assign_modules_buffers()  # a script may have replaced a buffer by another tensor
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for buffer in ddp.modules_buffers:
            by_type.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_type.values():
            flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
            broadcast = partial(dist.broadcast, flat, dist.get_global_rank(group, 0), group=group)
            job = Job(len(self._engine.buckets), 0, flat, broadcast)
            versions = [(buffer, buffer._version) for buffer in buffers]
            self._sent.append((versions, flat, runner.lanes[0].submit(job)))

    def receive(self, ddp: DDP) -> None:
        """Give the buffers the values that were sent, if any were, instead of DDP's broadcast."""
        sent, self._sent = self._sent, []
        for versions, flat, future in sent:
            with self._engine.explained("the buffers"):
                self._engine.runner.wait(future)
            if self._engine.group.rank() > 0:
                values = flat.split([buffer.numel() for buffer, _ in versions])
                with torch.no_grad():
                    for (buffer, version), value in zip(versions, values, strict=True):
                        if buffer._version == version:
                            buffer.copy_(value.view(buffer.shape))
        if sent:
            ddp.require_forward_param_sync = False  # in this forward pass, after which DDP sets it again
