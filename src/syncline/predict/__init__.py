"""Predict the time of a training step: (Profile, Network, Schedule) → Prediction. It needs no cluster and no GPU.

- `schedule`: the buckets of a step, with their lanes and exchanges.
- `exchange_time`: the time of one exchange on a network.
- `timeline`: the simulation of several exchanges that share links.
- `prediction`: the time of a step, and what it loses to each cause.
- `diagnosis`: the largest cause, explained in words.
- `remedies`: changes that may help. To add a remedy, write one function there and add it to `REMEDIES`.
- `memory`: the peak memory of a step, and how to make it fit.
"""

from syncline.predict.exchange_time import solo_s
from syncline.predict.prediction import Losses, Prediction, predict
from syncline.predict.schedule import Schedule, ddp_buckets

__all__ = ["Losses", "Prediction", "Schedule", "ddp_buckets", "predict", "solo_s"]
