"""The JSON of `bench` and `demo`. Other tools read it, so fields may be added but never changed or removed."""

from __future__ import annotations

import msgspec

from syncline.records.fields import Schema
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile

DEMO_METHODS = ("nosync", "ddp", "tune-exact", "tune-same", "tune-close")
"""The methods of the demo; the last three are `tune` with each quality."""
DIGITS_METHODS = ("nosync", "ddp", "tune", "tune-bf16")
"""The methods of the demo until release 0.2, which trained a CNN on digits."""


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hosts: int
    per_host: int | list[int]
    rate_bps: int
    device: str
    emulated: bool  # whether links were shaped; if not, ranks used the loopback interface and `rate_bps` has no meaning
    racks: int = 1
    trunk_rate_bps: int | None = None
    rank_order: str = "host"
    burst_bytes: int | None = None


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    parameters: int
    gradient_bytes: int


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    method: str
    step_ms: float  # median over interleaved rounds of one step, or of the mean of a period; low and high: quartiles
    step_ms_low: float
    step_ms_high: float
    sent_bytes: int | None  # payload per step of the busiest rank; for plain DDP, computed from its parameters
    predicted_ms: float | None
    predicted_sent_bytes: int | None
    wire_bytes: int | None = None  # bytes per step on the busiest host's interface counter, with headers
    vs_ddp: float | None = None  # median of paired per-round ratios of step times; low and high are the quartiles
    vs_ddp_low: float | None = None
    vs_ddp_high: float | None = None
    setting: str = ""
    peak_bytes: int | None = None  # peak of the tensors on the rank with the most, after warm-up; None: not measured
    states_bytes: int | None = None  # the part of `peak_bytes` that remains between steps


class BenchResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cluster: Cluster
    model: Model
    rows: list[Row]
    schema: Schema = 1
    rounds: int = 0
    batch: int | None = None
    torch: str = ""
    syncline: str = ""
    date: str = ""
    tree: str = ""  # the topology, as an exchange with levels detected it
    command: str = ""  # the command that repeats the measurement
    profile: Profile | None = None  # the profile of the predictions, with `network`; null if nothing was predicted
    network: Network | None = None
    plans: dict[str, Plan] = {}  # the plan of each method that has one
    sharded_profile: Profile | None = None  # the profile of the predictions of sharded models


class HeldOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A point of a training's curve."""

    step: int
    seconds: float  # time of training until then, without evaluations
    bits_per_byte: float  # the loss on held-out text


class DemoRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    method: str
    step_ms: float
    step_ms_low: float
    step_ms_high: float
    vs_ddp: float  # median of paired per-round ratios of step times
    wire_bytes: int | None  # bytes per step on the busiest host's interface counter
    held_out_accuracy: float | None
    difference: float | None  # largest difference between the trained weights and plain DDP's; 0 if bit-identical
    losses: list[float]  # the loss of each step, averaged over the ranks
    steps: int = 0
    setting: str = ""  # what tuning chose
    same_as: str = ""  # the method whose figures these are, because tuning kept it; it was not trained twice
    held_out: list[HeldOut] = []
    equal_steps: float | None = None  # held-out bits per byte after as many steps as plain DDP
    equal_time: float | None = None  # the same after as many seconds, or at the end of a shorter training
    reached_s: float | None = None  # seconds of training until plain DDP's final held-out loss; None: not reached


class Tuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The profile and plan of one `tune`."""

    profile: Profile
    plan: Plan
    seconds: float | None = None  # what tuning took, with the probe of the links
    lossless: bool | None = None  # whether what was applied is lossless; if plain DDP stays, it is


class DemoResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cluster: Cluster
    steps: int
    epochs: float
    rows: list[DemoRow]
    schema: Schema = 1
    said: dict[str, str] = {}  # the message of `tune`, by method
    command: str = ""  # the command that repeats the measurement
    network: Network | None = None
    tunings: dict[str, Tuning] = {}  # the results of `tune`, by method
    model: Model | None = None  # None if it was written by 0.2 or earlier, which trained a CNN on digits

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that a demo of this release compares."""
        return DIGITS_METHODS if self.model is None else DEMO_METHODS

    def row(self, method: str) -> DemoRow:
        return next(row for row in self.rows if row.method == method)
