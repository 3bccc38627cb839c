"""What runs an exchange: process groups, lanes, the DDP hook; and what chooses one."""

from syncline.engine.attach import attach
from syncline.engine.handle import Handle
from syncline.engine.layerwise import Layerwise
from syncline.engine.stats import BucketTiming, Stats
from syncline.engine.tuning import Trial, Tuned, tune
from syncline.engine.wrapping import handle_of, wrap

__all__ = ["BucketTiming", "Handle", "Layerwise", "Stats", "Trial", "Tuned", "attach", "handle_of", "tune", "wrap"]
