"""What runs an exchange: process groups, lanes, the DDP hook; and what chooses one."""

from syncline.engine.attach import BucketTiming, Handle, Stats, attach
from syncline.engine.tune import Trial, Tuned, tune
from syncline.engine.wrap import handle_of, wrap

__all__ = ["BucketTiming", "Handle", "Stats", "Trial", "Tuned", "attach", "handle_of", "tune", "wrap"]
