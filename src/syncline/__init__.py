"""Syncline makes data-parallel PyTorch training fast on slow or uneven networks.

model = DDP(net)
syncline.tune(model, step)                                    # measure, plan, apply in place
handle = syncline.attach(model, syncline.Dense(wire="bf16"))  # or choose yourself
"""

from syncline._version import __version__
from syncline.ddp.attach import attach
from syncline.ddp.handle import Handle
from syncline.ddp.wrap import handle_of, wrap
from syncline.errors import (
    ClusterError,
    ExchangeError,
    MismatchError,
    SynclineError,
    UsageError,
)
from syncline.exchange import Dense, Exchange, Hierarchical, OkTopk
from syncline.layerwise.trainer import Layerwise
from syncline.measure.backward import measure_backward
from syncline.measure.backward_watch import watch_backward
from syncline.plan.make import make_plan
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile
from syncline.runtime.stats import BucketTiming, PhaseTiming, Stats
from syncline.tuning.follow import Following, follow
from syncline.tuning.tune import Tuned, tune

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
