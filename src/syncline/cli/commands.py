"""The options and the help of each command.

A command is a struct: its fields are the options, and its docstring is the help. Nothing here imports torch, numpy
or scipy, so that help and wrong options are answered at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from typer import Argument, Option

RUN_FOLDER = Path("syncline-run")
_FILES = "Files from profile, probe, plan, bench or demo; folders of runs or failure reports."
_PLANS = "ddp, hierarchical, dense,lanes=4, bf16,bucket_mb=5, local-15. Can be repeated. Default: ddp."
_RESULT = "Same as --out; with --quality or --memory-budget: write the result."
_CONTENTION = "Also measure what computation and exchanges take from each other, in about 200 more steps."
_BUDGET = "Instead: find the fastest method that fits in this memory per rank, as in 8GiB."
_FAILURES = "Folder with the failure reports. Default: $SYNCLINE_FAILURES, or syncline-failure."

# Names and defaults for help texts, copied from modules that import torch. A test compares them with the originals.
MODELS = ("mlp", "cnn", "resnet50", "gpt-small")
AUTOCAST = ("bf16",)
QUALITIES = ("exact", "same", "close")
ALLOWED = ("bf16", "fp16", "int8", "int4", "int3", "sparse")
EXCHANGES = (
    *("dense", "bf16", "fp16", "hierarchical", "hierarchical+bf16"),
    *("int8", "int4", "int3", "hierarchical+int4"),
    *("topk-allgather", "oktopk", "hierarchical+oktopk", "topk-chunks"),
)
BENCH_PROBE_S, BENCH_PROBE_LEVELS_S, DEMO_TUNE_S, RUN_PROBE_S = 12.0, 30.0, 12.0, 15.0
_TARGET = f"Model: {', '.join(MODELS)}, or a function that builds one."
_PROBE_DEFAULT = f"by default {BENCH_PROBE_S:g}, or {BENCH_PROBE_LEVELS_S:g} for several ranks per host"


def _option(metavar: str, help: str, *names: str, **others: Any) -> Any:
    return Option(*names, metavar=metavar, help=help, **others)


def _cluster(metavar: str, help: str) -> Any:
    return _option(metavar, help, rich_help_panel="Emulated cluster")


def _updates(help: str, *names: str) -> Any:
    others: dict[str, Any] = {"show_default": False, "rich_help_panel": "Updates"}
    return Option(*names, help=help, **others) if names else _option("N", help, **others)


Hosts = Annotated[int, _cluster("N", "Number of hosts.")]
PerHost = Annotated[str, _cluster("N|N,N,…", "Ranks per host, or a list.")]
Rate = Annotated[str, _cluster("RATE", "Rate of each host's link.")]
RanksPerHost = Annotated[int | None, _option("N", "Without --network: ranks per host. Default: 1.", min=1)]
ProfileName = Annotated[str, _option("NAME|FILE", "Profile of the model, from syncline profile.")]
NetworkFile = Annotated[Path | None, _option("FILE", "Network of the cluster, from syncline probe.")]
JsonFile = Annotated[Path | None, _option("FILE", "Write the result as JSON.")]
ReportFile = Annotated[Path | None, _option("FILE", "Also write an HTML report.")]
Scale = Annotated[str, _option("T,B", "Multiply the profile's times by T and its sizes by B.")]
Allow = Annotated[str, _option("A,B,…", f"Or lossy exchanges, by name: {', '.join(ALLOWED)}.")]
Quality = Annotated[str | None, _option("Q", f"How far to go: {', '.join(QUALITIES)}.")]


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that describe an emulated cluster, as typed; `options.cluster_spec` checks them."""

    hosts: Hosts = 4
    per_host: PerHost = "1"
    rate: Rate = "200mbit"
    racks: Annotated[int, _cluster("N", "Number of racks.")] = 1
    trunk_rate: Annotated[str | None, _cluster("RATE", "Rate between each rack and the others.")] = None
    rank_order: Annotated[str, _cluster("host|scrambled", "Number ranks host by host, or round-robin.")] = "host"
    device: Annotated[str, _cluster("cpu|cuda", "Device of the ranks.")] = "cpu"


class Demo(msgspec.Struct, frozen=True, kw_only=True):
    """Train a small GPT over an emulated slow network, with plain DDP and with syncline.tune. Two to three minutes.

    syncline demo --hosts 4 --rate 100mbit
    """

    hosts: Hosts = 4
    per_host: PerHost = "1"
    rate: Rate = "100mbit"
    steps: Annotated[int, Option(min=1, help="Steps of plain DDP; faster methods take up to twice as many.")] = 50
    tune: Annotated[float, _option("SECONDS", "Time for each of the three tunings.", min=5, max=3600)] = DEMO_TUNE_S
    json: JsonFile = None
    report: Annotated[Path | None, _option("FILE", "File for the HTML report. Default: syncline-report.html.")] = None


class Doctor(msgspec.Struct, frozen=True, kw_only=True):
    """Check what works on this machine, and say how to repair what does not. Under five seconds.

    syncline doctor

    torchrun --nnodes 2 … -m syncline doctor     # can the ranks of a job reach each other?
    """

    json: JsonFile = None
    wait: Annotated[float, _option("SECONDS", "Under torchrun: time to wait for the others.", min=1, max=600)] = 30.0


class Bench(ClusterOptions, frozen=True, kw_only=True):
    """Compare methods of exchanging gradients or updates on an emulated cluster.

    syncline bench --hosts 4 --rate 200mbit --model cnn --methods ddp,dense,bf16

    All methods run in the same processes, step the same optimizer, and take turns step by step.
    """

    model: Annotated[str | None, _option("NAME", f"{', '.join(MODELS)}; default: cnn.")] = None
    replay: Annotated[str | None, _option("PROFILE", "Profile to replay: file or name.")] = None
    scale: Scale = "1,1"
    methods: Annotated[str, _option("A,B,…", "Methods to compare; to see all: --methods list.")] = "nosync,ddp,dense"
    steps: Annotated[int, Option(min=1, help="Steps of each method; for local-15, periods of 15.")] = 30
    batch: Annotated[int, Option(min=1, help="Samples per rank and step.")] = 16
    bucket_mb: Annotated[float | None, Option(help="Bucket size of DDP, in MB.")] = None
    network: Annotated[Path | None, _option("FILE", "Network, from syncline probe.")] = None
    probe: Annotated[float | None, _option("SECONDS", f"Time for probing, {_PROBE_DEFAULT}. 0: no predictions.")] = None
    peak_memory: Annotated[bool, Option("--peak-memory", help="Also measure peak memory.")] = False
    timeout: Annotated[float, _option("SECONDS", "Give up after this time.")] = 1800
    json: JsonFile = None
    report: ReportFile = None


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Measure when each gradient of a model is ready, and how long forward, backward and update take.

    syncline profile cnn --output profile.json

    FUNCTION() must return (model, step) or (model, step, optimizer), and step(model) the loss.

    It measures in this process or, under torchrun, on all ranks at once.
    """

    target: Annotated[str, Argument(metavar="MODEL|FILE.py:FUNCTION", help=_TARGET)]
    output: Annotated[Path | None, _option("FILE", "Write the profile.", "--output", "--json")] = None
    device: Annotated[str | None, _option("cpu|cuda", "Device to compute on. Default: cpu.")] = None
    steps: Annotated[int, Option(min=1, help="Measured steps; medians are reported.")] = 20
    warmup: Annotated[int, Option(min=0, help="Steps before the measured ones.")] = 5
    batch: Annotated[int | None, Option(min=1, help="Samples per rank and step. Default for MODEL: 16.")] = None
    autocast: Annotated[str | None, _option("|".join(AUTOCAST), "Run MODEL under autocast.")] = None
    memory: Annotated[bool, Option("--memory", help="Also measure activations, for plan --memory-budget.")] = False
    contention: Annotated[bool, Option("--contention", help=_CONTENTION)] = False


class Probe(ClusterOptions, frozen=True, kw_only=True):
    """Measure a cluster's links with the collectives that training uses.

    torchrun --nnodes 4 … -m syncline probe --output network.json     # this cluster

    syncline probe --hosts 4 --rate 200mbit --output network.json     # an emulated cluster
    """

    output: Annotated[Path | None, _option("FILE", "Write the network.", "--output", "--json")] = None
    budget: Annotated[float, _option("SECONDS", "Approximate time for the measurement.")] = 55.0
    every: Annotated[bool, Option("--every", help="Show the measured times of every collective.")] = False


class Predict(msgspec.Struct, frozen=True, kw_only=True):
    """Predict the time of a training step for other hosts, links and plans, and find what limits it.

    syncline predict --profile bert-base-cuda --network network.json --hosts 4,8,16,64 --rate 10gbit

    Without --network, links are assumed to be Ethernet at --rate, and the answer says so.
    """

    profile: ProfileName
    network: NetworkFile = None
    hosts: Annotated[str | None, _option("N,N,…", "Numbers of hosts. The diagnosis is for the first.")] = None
    rate: Annotated[str | None, _option("RATE,…", "Rates of the hosts' links. Default: as measured.")] = None
    trunk_rate: Annotated[str | None, _option("RATE", "Rate of the racks' links. Default: as measured.")] = None
    per_host: RanksPerHost = None
    plan: Annotated[list[str] | None, _option("PLAN", _PLANS)] = None
    scale: Scale = "1,1"
    json: JsonFile = None
    report: ReportFile = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Find the fastest plan for a model on a cluster: which buckets, lanes and exchanges to use.

    syncline plan --profile profile.json --network network.json --out plan.json

    Apply it with syncline.wrap(net, "plan.json"). Without --network, links are assumed to be Ethernet at --rate.

    syncline plan --profile profile.json --network network.json --quality same     # the gentlest fast method

    syncline plan --profile profile.json --network network.json --memory-budget 8GiB --allow sparse
    """

    profile: ProfileName
    network: NetworkFile = None
    hosts: Annotated[int | None, _option("N", "Hosts. Default: the network's, or 4.", min=1, max=65_536)] = None
    rate: Annotated[str | None, _option("RATE", "Rate of the hosts' links. Default: as measured.")] = None
    per_host: RanksPerHost = None
    quality: Quality = None
    allow: Allow = ""
    bucket_mb: Annotated[float | None, Option(help="Bucket size of plain DDP, if not its default, in MB.")] = None
    memory_budget: Annotated[str | None, _option("SIZE", _BUDGET)] = None
    scale: Scale = "1,1"
    out: Annotated[Path | None, _option("FILE", "Write the plan.", "--out", "-o")] = None
    json: Annotated[Path | None, _option("FILE", _RESULT)] = None
    report: ReportFile = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Make one self-contained HTML page from Syncline's files: what limits a training, and what would help.

    syncline report profile.json network.json plan.json

    syncline report syncline-run     # the folder that syncline run wrote
    """

    files: Annotated[list[Path], Argument(metavar="FILE|FOLDER…", help=_FILES)]
    output: Annotated[Path, _option("FILE", "File for the page.", "--output", "-o")] = Path("report.html")
    trace: Annotated[Path | None, _option("FILE", "Also write a run's steps for Perfetto or chrome://tracing.")] = None
    json: JsonFile = None


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Read the failure reports that ranks wrote: where each one failed, which rank is suspected, and what to check.

    syncline failure

    syncline failure collected/ --events 10

    If there are no failure reports, it reads the records of syncline run: a rank that was killed leaves nothing else.
    """

    folder: Annotated[Path | None, Argument(metavar="FOLDER", help=_FAILURES)] = None
    events: Annotated[int, _option("N", "Also show the last N events of each rank.", min=0)] = 0
    json: JsonFile = None


class ClusterRun(ClusterOptions, frozen=True, kw_only=True):
    """Run a command on every host of an emulated cluster.

    syncline cluster run --hosts 4 --per-host 2 --rate 1gbit -- torchrun train.py

    torchrun needs no options: the environment has the numbers of hosts and ranks, and the addresses.
    """

    command: Annotated[list[str], Argument(metavar="COMMAND", help="Command to run, after --.")]
    per_rank: Annotated[bool, Option("--per-rank", help="Start it once per rank, without torchrun.")] = False


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Run an unmodified training script and make its DDP models exchange gradients faster.

    torchrun --nproc-per-node 4 -m syncline.run train.py --epochs 3

    syncline run --nproc-per-node 4 train.py --epochs 3

    It measures the script's steps, tries a plan, and keeps it if it is faster.

    Losses stay the same, up to summation order, unless --quality permits more.
    """

    script: Annotated[str, Argument(metavar="SCRIPT", help="Training script; with -m, a module.")]
    arguments: Annotated[list[str] | None, Argument(metavar="ARGUMENTS", help="Arguments of the script.")] = None
    module: Annotated[bool, Option("-m", help="SCRIPT is a module.")] = False
    nproc_per_node: Annotated[int | None, _option("N", "Start N ranks on this host.", min=1, max=1024)] = None
    observe_only: Annotated[bool, Option("--observe-only", help="Measure, and change nothing.")] = False
    quality: Quality = None
    allow: Allow = ""
    exchange: Annotated[str | None, _option("NAME", f"Instead of tuning: {', '.join(EXCHANGES)}.")] = None
    updates: Annotated[bool, _updates("Exchange the optimizer's updates, with --exchange.", "--updates")] = False
    every: Annotated[int, _updates("Exchange each part of the weights every N steps.")] = 1
    warmup: Annotated[int | None, _updates("Exchange gradients in 4 bits in the first N steps.")] = None
    delay: Annotated[int, _updates("Apply results N steps later.")] = 0
    plan: Annotated[Path | None, _option("FILE", "Instead of tuning: this plan.")] = None
    network: Annotated[Path | None, _option("FILE", "Network, from syncline probe.")] = None
    probe: Annotated[float, _option("SECONDS", "Longest probe of the links.")] = RUN_PROBE_S
    no_cache: Annotated[bool, Option("--no-cache", help="Do not remember probed links.")] = False
    timeout: Annotated[float | None, _option("SECONDS", "Timeout of all collectives.")] = None
    out: Annotated[Path, _option("FOLDER", "Folder for records and report.")] = RUN_FOLDER
    quiet: Annotated[bool, Option("--quiet", help="Print nothing.")] = False
