"""Syncline makes data-parallel PyTorch training fast on slow or uneven networks.

model = DDP(net)
syncline.tune(model, step)                                    # measure, plan, apply in place
handle = syncline.attach(model, syncline.Dense(wire="bf16"))  # or choose yourself
"""

from syncline._version import __version__
from syncline.engine import (
    BucketTiming,
    Following,
    Handle,
    Layerwise,
    PhaseTiming,
    Stats,
    Tuned,
    attach,
    follow,
    handle_of,
    tune,
    wrap,
)
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
from syncline.plan.make import make_plan
from syncline.plan.plan import Plan

__all__ = [
    "BucketTiming",
    "ClusterError",
    "Dense",
    "Exchange",
    "ExchangeError",
    "Following",
    "Handle",
    "Hierarchical",
    "Layerwise",
    "MismatchError",
    "Network",
    "OkTopk",
    "PhaseTiming",
    "Plan",
    "Profile",
    "Stats",
    "SynclineError",
    "Tuned",
    "UsageError",
    "__version__",
    "attach",
    "follow",
    "handle_of",
    "make_plan",
    "measure_backward",
    "tune",
    "watch_backward",
    "wrap",
]
