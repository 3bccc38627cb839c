"""Syncline makes data-parallel PyTorch training fast on slow or uneven networks.

    model = DDP(net)
    syncline.tune(model, step)                                    # measure, plan, and apply the plan to the model
    handle = syncline.attach(model, syncline.Dense(wire="bf16"))  # or choose the exchange yourself

`step(model)` runs one forward and backward pass. The default is lossless.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from syncline._version import __version__
from syncline.errors import ClusterError, ExchangeError, MismatchError, SynclineError, UsageError

if TYPE_CHECKING:
    from syncline.balance.measure import shares
    from syncline.balance.shares import Shares
    from syncline.ddp.attach import attach, wrap
    from syncline.ddp.handle import Handle, handle_of
    from syncline.exchange import ChunkedTopk, Dense, Exchange, Hierarchical, OkTopk, Quantized
    from syncline.layerwise.trainer import Layerwise
    from syncline.measure.backward import measure_backward
    from syncline.measure.backward_watch import watch_backward
    from syncline.plan.make import make_plan
    from syncline.records.network import Network
    from syncline.records.plan import Plan
    from syncline.records.profile import Profile
    from syncline.runtime.stats import BucketTiming, PhaseTiming, Stats
    from syncline.tuning.follow import follow
    from syncline.tuning.following import Following
    from syncline.tuning.tune import Tuned, tune
    from syncline.updates.policy import Nesterov

__all__ = ["BucketTiming", "ChunkedTopk", "ClusterError", "Dense", "Exchange", "ExchangeError", "Following", "Handle"]
__all__ += ["Hierarchical", "Layerwise", "MismatchError", "Nesterov", "Network", "OkTopk", "PhaseTiming", "Plan"]
__all__ += ["Profile", "Quantized", "Shares", "Stats"]
__all__ += ["SynclineError", "Tuned", "UsageError", "__version__", "attach", "follow", "handle_of", "make_plan"]
__all__ += ["measure_backward", "shares", "tune", "watch_backward", "wrap"]

_MODULES = {
    "syncline.balance.measure": ("shares",),
    "syncline.balance.shares": ("Shares",),
    "syncline.ddp.attach": ("attach", "wrap"),
    "syncline.ddp.handle": ("Handle", "handle_of"),
    "syncline.exchange": ("ChunkedTopk", "Dense", "Exchange", "Hierarchical", "OkTopk", "Quantized"),
    "syncline.layerwise.trainer": ("Layerwise",),
    "syncline.measure.backward": ("measure_backward",),
    "syncline.measure.backward_watch": ("watch_backward",),
    "syncline.plan.make": ("make_plan",),
    "syncline.records.network": ("Network",),
    "syncline.records.plan": ("Plan",),
    "syncline.records.profile": ("Profile",),
    "syncline.runtime.stats": ("BucketTiming", "PhaseTiming", "Stats"),
    "syncline.tuning.follow": ("follow",),
    "syncline.tuning.following": ("Following",),
    "syncline.tuning.tune": ("Tuned", "tune"),
    "syncline.updates.policy": ("Nesterov",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
"""The module of each public name. Modules are imported on first use, because torch takes seconds to import and
`syncline --help` does not need it."""
_PACKAGES = frozenset({"elastic", "exchange", "measure", "plan"})
"""Packages that are attributes after `import syncline` alone."""


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    elif name in _PACKAGES:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # so that __getattr__ is not called for it again
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF, *_PACKAGES})
