"""Emulate hosts on one Linux machine: processes in network namespaces, behind links of limited rate."""

from syncline.cluster.command import run_command
from syncline.cluster.isolation import unshaped_notice, why_not_shaped
from syncline.cluster.launch import Outcome, Rank, RankFailedError, launch, launch_outcomes
from syncline.cluster.spec import ClusterSpec, format_rate, parse_per_host, parse_rate

__all__ = [
    "ClusterSpec",
    "Outcome",
    "Rank",
    "RankFailedError",
    "format_rate",
    "launch",
    "launch_outcomes",
    "parse_per_host",
    "parse_rate",
    "run_command",
    "unshaped_notice",
    "why_not_shaped",
]
