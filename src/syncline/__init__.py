"""Syncline makes data-parallel PyTorch training fast on slow or uneven networks.

model = DDP(net)
handle = syncline.attach(model, syncline.Dense(wire="bf16"))
"""

from syncline._version import __version__
from syncline.engine import BucketTiming, Handle, Stats, attach
from syncline.errors import (
    ClusterError,
    ExchangeError,
    MismatchError,
    SynclineError,
    UsageError,
)
from syncline.exchange import Dense, Exchange, Hierarchical, OkTopk
from syncline.measure.backward import measure_backward
from syncline.measure.network import Network
from syncline.measure.profile import Profile
from syncline.measure.watch import watch_backward

__all__ = [
    "BucketTiming",
    "ClusterError",
    "Dense",
    "Exchange",
    "ExchangeError",
    "Handle",
    "Hierarchical",
    "MismatchError",
    "Network",
    "OkTopk",
    "Profile",
    "Stats",
    "SynclineError",
    "UsageError",
    "__version__",
    "attach",
    "measure_backward",
    "watch_backward",
]
