"""What runs an exchange: process groups, lanes, the DDP hook."""

from syncline.engine.attach import BucketTiming, Handle, Stats, attach

__all__ = ["BucketTiming", "Handle", "Stats", "attach"]
