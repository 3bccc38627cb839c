"""Predict the time of a training step: (Profile, Network, Schedule) → Prediction. It needs no cluster and no GPU.
`schedule` holds the buckets of a step, `exchange_time` the time of one exchange on a network, and `timeline` simulates
exchanges that share links. `prediction` adds them up, `diagnosis` explains them, `memory` predicts the peak memory."""

from syncline.predict.exchange_time import solo_s
from syncline.predict.prediction import Losses, Prediction, predict
from syncline.predict.schedule import Schedule, ddp_buckets

__all__ = ["Losses", "Prediction", "Schedule", "ddp_buckets", "predict", "solo_s"]
