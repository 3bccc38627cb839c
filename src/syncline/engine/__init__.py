"""What runs an exchange: process groups, lanes, the DDP hook; and what chooses one."""

from syncline.engine.attach import attach
from syncline.engine.follow import Following, follow
from syncline.engine.handle import Handle
from syncline.engine.layerwise import Layerwise
from syncline.engine.stats import BucketTiming, PhaseTiming, Stats
from syncline.engine.tuning import Trial, Tuned, tune
from syncline.engine.wrapping import handle_of, wrap

__all__ = [
    "BucketTiming",
    "Following",
    "Handle",
    "Layerwise",
    "PhaseTiming",
    "Stats",
    "Trial",
    "Tuned",
    "attach",
    "follow",
    "handle_of",
    "tune",
    "wrap",
]
