"""Find what limits the scaling of a step, explain it in words, and list the remedies that help."""

from __future__ import annotations

from dataclasses import dataclass

from syncline.predict.prediction import Losses, Prediction, predict
from syncline.predict.remedies import REMEDIES, Remedy
from syncline.predict.schedule import Schedule
from syncline.records.network import Network
from syncline.records.profile import Profile
from syncline.units import count_text, duration_text, milliseconds_text, rate_text, size_text

__all__ = ["CAUSES", "Diagnosis", "Remedy", "diagnose", "lost_to"]

_WORTH = 0.02
"""Remedies that save a smaller share of a step are not listed."""
_FINE = 0.05
"""If a step loses a smaller share than this, nothing limits the scaling."""

CAUSES = {
    "startups": "start-ups of collectives",
    "host": "the hosts' links",
    "rack": "the links between racks",
    "local": "the links inside the hosts",
    "tail": "buckets that are full, and sent, too late",
    "straggler": "waiting for slower ranks",
    "overhead": "copies, hooks and the exchange's own work",
    "buffers": "broadcasting buffers before forward",
    "software": "processors and protocols that do not fill the links",
}


@dataclass(frozen=True)
class Diagnosis:
    prediction: Prediction
    culprit: str | None
    """The largest cause, a key of `CAUSES`; None if a step loses hardly any time."""
    why: str
    remedies: tuple[Remedy, ...]
    """Remedies that save time, the best first; those that change how a model trains are last."""


def lost_to(losses: Losses) -> dict[str, float]:
    """Return the seconds lost to each cause, the largest first, without causes that cost nothing."""
    seconds = {
        "startups": losses.startups_s,
        "tail": losses.tail_s,
        "straggler": losses.straggler_s,
        "overhead": losses.overhead_s,
        "buffers": losses.buffers_s,
        "software": losses.software_s,
        **losses.links_s,
    }
    return {name: seconds[name] for name in sorted(seconds, key=lambda name: -seconds[name]) if seconds[name] > 1e-7}


def diagnose(profile: Profile, network: Network, schedule: Schedule) -> Diagnosis:
    """Predict a step, and find the largest cause of loss and the remedies against it."""
    prediction = predict(profile, network, schedule)
    lost = lost_to(prediction.losses)
    total_s = prediction.iteration_s - prediction.compute_s
    if not lost or total_s < _FINE * prediction.compute_s:
        return Diagnosis(prediction, None, "hardly anything is lost: leave it alone", ())
    culprit = next(iter(lost))
    worth_s = (1 - _WORTH) * prediction.iteration_s
    remedies = [
        remedy
        for suggest in REMEDIES
        for remedy in suggest(profile, network, schedule)
        if remedy.prediction.iteration_s < worth_s
    ]
    remedies.sort(key=lambda remedy: (remedy.last, remedy.prediction.iteration_s))
    return Diagnosis(prediction, culprit, _why(culprit, profile, network, prediction), tuple(remedies))


def _why(culprit: str, profile: Profile, network: Network, prediction: Prediction) -> str:
    sizes = prediction.schedule.bucket_bytes(profile)
    buckets = count_text(len(sizes), "bucket")
    if culprit == "startups":
        startup = duration_text(network.collective("all_reduce").startup_s)
        median = size_text(sorted(sizes)[len(sizes) // 2])
        return f"{buckets} of {median} (median), and each collective takes {startup} to start, whatever its size"
    if culprit in ("host", "rack", "local"):
        link = network.link(culprit)
        rate = "" if link is None else f", at {rate_text(link.bytes_per_s * 8)}"
        nbytes = prediction.link_bytes(culprit)
        load = f"{size_text(nbytes)} per step through each of them{rate}"
        busy_s = 0.0 if link is None else nbytes / link.bytes_per_s
        if busy_s > prediction.backward_s:
            return f"{load}: that takes longer than backward"
        return f"{load}: the last gradients are ready only when backward ends, so no computation is left to hide them"
    if culprit == "tail":
        last = "the only bucket" if len(sizes) == 1 else f"the last of {buckets}"
        return f"{last} holds {size_text(sizes[-1])}, and is sent when no computation is left"
    if culprit == "straggler":
        slowest = profile.slowest
        if slowest is not None and slowest.step_s > 1.05 * profile.step_s:
            typical = milliseconds_text(profile.step_s)
            return f"rank {slowest.rank} computes for {milliseconds_text(slowest.step_s)}, a typical rank for {typical}"
        return f"in each step some rank is late, by {milliseconds_text(profile.jitter_s)} (median)"
    if culprit == "overhead":
        return f"{size_text(profile.gradient_bytes)} are copied and processed in {buckets}"
    if culprit == "buffers":
        return f"{size_text(sum(entry.bytes for entry in profile.buffers))} of buffers are sent before every forward"
    return "collectives take this long on links of any speed: use faster processors, or send fewer bytes"
