"""The bench's and the demo's JSON: stable, because other tools read it. Fields are only ever added."""

from __future__ import annotations

import msgspec

from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile

SCHEMA = 1


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hosts: int
    per_host: int | list[int]
    rate_bps: int
    device: str
    emulated: bool
    """Whether links were shaped; otherwise ranks met on the loopback interface and the rate means nothing."""
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
    step_ms: float
    """Median over interleaved rounds; low and high are the quartiles."""
    step_ms_low: float
    step_ms_high: float
    sent_bytes: int | None
    """Payload per step, by the busiest rank: counted call by call; for plain DDP, from the buckets that it logged."""
    predicted_ms: float | None
    predicted_sent_bytes: int | None
    wire_bytes: int | None = None
    """Per step, by the busiest host's interface counter, headers included."""
    vs_ddp: float | None = None
    """Median of paired per-round ratios of step times; low and high are the quartiles."""
    vs_ddp_low: float | None = None
    vs_ddp_high: float | None = None
    setting: str = ""
    peak_bytes: int | None = None
    """Of tensors, by the busiest rank, in a step after warm-up; where it was asked for."""
    states_bytes: int | None = None
    """Of that, what is there between steps."""


class BenchResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cluster: Cluster
    model: Model
    rows: list[Row]
    schema: int = SCHEMA
    rounds: int = 0
    batch: int | None = None
    torch: str = ""
    syncline: str = ""
    date: str = ""
    tree: str = ""
    """Where ranks sit, as an exchange that asks for it found them."""
    command: str = ""
    """That measures it again."""
    profile: Profile | None = None
    """What was predicted from, with the network; null where nothing was."""
    network: Network | None = None
    plans: dict[str, Plan] = {}
    """By the method that followed it."""


class DemoRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    method: str
    step_ms: float
    step_ms_low: float
    step_ms_high: float
    vs_ddp: float
    """Median of paired per-round ratios of step times."""
    wire_bytes: int | None
    """Per step, by the busiest host's interface counter."""
    held_out_accuracy: float | None
    difference: float | None
    """Of the trained weights from plain DDP's: the largest, 0 if bit-identical."""
    losses: list[float]
    """Per step, averaged over the ranks."""


class Tuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one tuning found."""

    profile: Profile
    plan: Plan


class DemoResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cluster: Cluster
    steps: int
    epochs: float
    rows: list[DemoRow]
    schema: int = SCHEMA
    said: dict[str, str] = {}
    """What tuning said, by method."""
    command: str = ""
    """That measures it again."""
    network: Network | None = None
    tunings: dict[str, Tuning] = {}
    """By method."""

    def row(self, method: str) -> DemoRow:
        return next(row for row in self.rows if row.method == method)
