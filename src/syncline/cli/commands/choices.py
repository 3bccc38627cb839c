"""Names and defaults for help texts, copied from modules that import torch. A test compares them with the originals."""

from __future__ import annotations

MODELS = ("mlp", "cnn", "resnet50", "gpt-small")
"""`syncline.models.zoo.MODELS`."""
AUTOCAST = ("bf16",)
"""`syncline.models.target.AUTOCAST`."""
ALLOWED = ("bf16", "fp16", "sparse")
"""`syncline.plan.search.ALLOWED`."""
EXCHANGES = (
    "dense",
    "bf16",
    "fp16",
    "hierarchical",
    "hierarchical+bf16",
    "topk-allgather",
    "oktopk",
    "hierarchical+oktopk",
)
"""`syncline.exchange.EXCHANGES`."""
BENCH_PROBE_S, BENCH_PROBE_LEVELS_S = 12.0, 30.0
"""`PROBE_S` and `PROBE_LEVELS_S` of `syncline.bench.run`."""
DEMO_TUNE_S = 25.0
"""`syncline.bench.demo.TUNE_S`."""
RUN_PROBE_S = 15.0
"""`syncline.tuning.settings.PROBE_S`."""
