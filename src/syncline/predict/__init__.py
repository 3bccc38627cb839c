"""(Profile, Network, Schedule) → Prediction: pure, without a cluster, without a GPU."""

from syncline.predict.exchange_time import solo_s
from syncline.predict.prediction import Losses, Prediction, predict
from syncline.predict.schedule import Schedule, ddp_buckets

__all__ = ["Losses", "Prediction", "Schedule", "ddp_buckets", "predict", "solo_s"]
