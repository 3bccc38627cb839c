"""Send the gradients of a sharded model to the owners of shards through an exchange, and gather parameters in 16 bits.

FSDP calls a custom reduce-scatter for each unit in backward, and a custom all-gather before forward and backward. On
CUDA, both are called on a stream of FSDP, which waits for the result, and the host does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.dist.comm import gather_into
from syncline.errors import UsageError
from syncline.exchange.scatter import CodedRows, DenseRows, Scatter, ScatterSum
from syncline.fsdp.engine import ShardEngine
from syncline.fsdp.units import Unit

WIRES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class ScatterEngine(ShardEngine):
    """Sums the gradients of each unit, and leaves each rank its shard."""

    def reduce_scatter(self, unit: Unit, output: Tensor, flat: Tensor, op: Any) -> None:
        """Write this rank's shard of the mean, or of the sum, of a unit's gradients to `output`."""
        averages = op == dist.ReduceOp.AVG
        if not averages and op != dist.ReduceOp.SUM:
            text = (
                "with set_gradient_divide_factor, NCCL multiplies inside FSDP's reduce-scatter, which no exchange does"
            )
            raise UsageError(f"{text}: call set_force_sum_reduction_for_comms(True) for every unit, too")
        scatter = self.policy.exchange
        assert isinstance(scatter, Scatter)  # noqa: S101 - `attach_sharded` made it
        exchange = scatter if averages else ScatterSum(scatter.like)  # FSDP has divided, or will divide, itself
        bucket = self.exchange(unit, flat, unit.whole_layout(flat.dtype, flat.device), exchange)
        state = bucket.ready
        assert isinstance(state, DenseRows | CodedRows)  # noqa: S101 - of the exchange `Scatter`
        output.copy_(state.shard)

    def gather(self, output: Tensor, shard: Tensor, group: dist.ProcessGroup, plain: Callable[..., Any]) -> Any:
        """Collect the parameters of a unit from all ranks, in 16 bits if that was asked for."""
        wire = self.policy.gather
        if wire is None or shard.dtype not in (torch.float32, torch.float64):
            return plain(output_tensor=output, input_tensor=shard, group=group)
        # `shard` is a part of `output`, and is rounded too, so that all ranks compute with the same parameters.
        received = torch.empty(output.numel(), dtype=WIRES[wire], device=output.device)
        gather_into(received, shard.to(WIRES[wire]), group=group)
        output.copy_(received)
        return None
