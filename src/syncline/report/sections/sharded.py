"""Predicted steps of a sharded model: FSDP2 and HSDP, with and without Syncline's exchanges."""

from __future__ import annotations

from collections.abc import Iterator

from syncline.errors import UsageError
from syncline.predict.sharded import FLOOR, SHARDED, ShardedPrediction, predict_sharded
from syncline.records.profile import Profile
from syncline.report.charts import Section
from syncline.report.inputs import PREDICT, Inputs, ModelData, resized
from syncline.report.sections.plan import numbers
from syncline.units import rate_text


def sharded_section(inputs: Inputs, model: ModelData) -> Iterator[Section]:
    """Show the methods that were asked for or, without any, all that the profile can predict."""
    measured = [bench.sharded_profile for bench in inputs.benches]
    profile = next((known for known in (model.profile, *measured) if known is not None and known.sharding), None)
    if profile is None or model.network is None:
        return
    curves = {}
    for name in inputs.sharded or (*SHARDED, FLOOR):
        for rate_bps in inputs.rates_bps:
            found = _predictions(inputs, profile, model, name, rate_bps)
            if found:
                curves[name if rate_bps is None else f"{name}, {rate_text(rate_bps)}"] = found
    if curves:
        lead = f"{FLOOR} is a step without communication between replicas. With replicas, what is sent is between them."
        yield Section("sharded", "Sharded models", lead, [numbers(curves)], commands=inputs.again(*PREDICT))


def first_prediction(inputs: Inputs, model: ModelData) -> ShardedPrediction | None:
    """Return the prediction that was asked for first, if the profile permits it."""
    if model.profile is None or model.network is None or not inputs.sharded:
        return None
    found = _predictions(inputs, model.profile, model, inputs.sharded[0], inputs.rates_bps[0])
    return found[0] if found else None


def _predictions(
    inputs: Inputs, profile: Profile, model: ModelData, name: str, rate_bps: int | None
) -> list[ShardedPrediction]:
    assert model.network is not None  # noqa: S101 - the caller has checked
    try:
        counts = inputs.hosts or (model.network.hosts,)
        return [predict_sharded(profile, resized(model.network, count, rate_bps), name) for count in counts]
    except UsageError:  # the profile has the collectives of other methods
        return []
