"""Choose the size of buckets whose weights are gathered behind the next forward pass.

Forward must wait for the whole bucket that it needs first, and the optimizer for the whole bucket that is ready last.
So buckets should be small, until start-ups take longer than that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from syncline.exchange import Dense, Exchange, name_of
from syncline.predict.exchange_time import topology_of
from syncline.predict.prediction import Prediction, predict
from syncline.predict.schedule import DDP_CAPS, MIB, OVERLAP, Schedule
from syncline.records.bucket_caps import filled
from syncline.records.network import Network
from syncline.records.profile import Profile

_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
"""Numbers of buckets to try."""
_WORTH = 0.99
"""Other buckets than the model's own must save some of the step."""


def best_overlap(
    profile: Profile,
    network: Network,
    *,
    caps: Sequence[int] = DDP_CAPS,
    exchange: Exchange | None = None,
    gather: str = "fp32",
    paced: bool = False,
) -> tuple[Prediction, tuple[int, ...]]:
    """Find the size of buckets with which a step takes the least time.

    Args:
        profile, network: The model and the links.
        caps: The sizes in bytes at which the model closes its buckets now. They stay if others save less than 1 %.
        exchange: How gradients are sent to the owners of shards. Default: `Dense()`.
        gather: The format in which weights are gathered.
        paced: As for `predict`.

    Returns:
        The prediction, and the sizes in bytes at which buckets are closed.
    """
    exchange = exchange or Dense()
    whole, topology = Schedule.of(profile, OVERLAP), topology_of(network)

    def tried(sizes: tuple[int, ...]) -> tuple[Prediction, tuple[int, ...]]:
        schedule = dataclasses.replace(
            whole,
            buckets=filled(profile.gradients, sizes),
            bucket_mb=sizes[0] / MIB if len(sizes) == 1 else None,
            exchange=exchange,
            exchange_name=name_of(exchange),
            gather=gather,
        )
        return predict(profile, network, schedule, paced=paced, topology=topology), sizes

    own = tried(tuple(caps))
    others = [tried((max(1, -(-profile.gradient_bytes // count)),)) for count in _COUNTS]
    best = min(others, key=lambda option: option[0].iteration_s)
    return best if best[0].iteration_s < _WORTH * own[0].iteration_s else own
