"""The weights of a replica: what an exchange has not applied is not lost when other replicas are there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline
from syncline.dist.local_comm import LocalComm, run_ranks
from syncline.elastic.weights import Result, Weights
from syncline.exchange import WORLD, Exchange, Level, Topology, Tree
from syncline.updates.policy import checked_policy

SIZE = 4096


def topology(hosts: tuple[tuple[int, ...], ...]) -> Topology:
    ranks = sum(map(len, hosts))
    return Topology(Level(WORLD, (tuple(range(ranks)),)), Tree.given(hosts, ranks).levels)


def replica(exchange: Exchange) -> tuple[nn.Parameter, Weights]:
    parameter = nn.Parameter(torch.zeros(SIZE))
    policy = checked_policy(exchange, 1, 5, 0, 0, None)
    return parameter, Weights({"w": parameter}, {}, torch.optim.SGD([parameter], lr=1.0), policy)


def exchanged(replicas: list[tuple[nn.Parameter, Weights]], among: Any, number: int) -> None:
    """One exchange of replicas, in the order of their ranks."""

    def main(comm: LocalComm) -> None:
        _, weights = replicas[comm.rank]
        real: Any = comm
        with torch.no_grad():
            weights.forget_states()
            weights.prepare(real)
            sent = weights.gathered()
            means = weights.updates(sent)
            finite = [weights.exchange(index, flat, number, real) for index, flat in enumerate(means)]
            result = Result(0, sent, means, finite, list(weights.fragments))
            weights.commit(result, 0)

    run_ranks(among, main)


SPARSE = syncline.OkTopk(density=0.01, mean="ranks", decay=1.0)
LOSSY = {"sparse": SPARSE, "4 bits": syncline.Quantized(bits=4)}


def steps(replicas: list[tuple[nn.Parameter, Weights]], number: int) -> Tensor:
    """Change the weights of all replicas, and return the mean of their updates."""
    total = torch.zeros(SIZE, dtype=torch.float64)
    for index, (parameter, _) in enumerate(replicas):
        update = torch.randn(SIZE, generator=torch.Generator().manual_seed(10 * number + index))
        with torch.no_grad():
            parameter.sub_(update)
        total += update
    return total / len(replicas)


def kept(replicas: list[tuple[nn.Parameter, Weights]]) -> Tensor:
    kinds = [kinds for _, weights in replicas for kinds in weights._residuals[0].values() if kinds]
    return sum((kinds["residual"].double() for kinds in kinds), torch.zeros(SIZE, dtype=torch.float64))


@pytest.mark.parametrize("across", LOSSY.values(), ids=LOSSY)
def test_a_residual_is_kept_when_another_replica_leads_those_of_its_host(across: Exchange) -> None:
    replicas = [replica(syncline.Hierarchical(across=across)) for _ in range(3)]
    hosts, sent = topology(((0, 1), (2,))), torch.zeros(SIZE, dtype=torch.float64)
    for number, order in enumerate(([0, 1, 2], [1, 0, 2])):
        sent += steps(replicas, number)
        exchanged([replicas[rank] for rank in order], hosts, number)
    assert all(torch.equal(replicas[0][0], parameter) for parameter, _ in replicas)
    assert float((kept(replicas) - replicas[0][0].detach() - sent).abs().max()) < 1e-4


@pytest.mark.parametrize("exchange", LOSSY.values(), ids=LOSSY)
def test_a_replica_that_is_left_alone_applies_its_residual(exchange: Exchange) -> None:
    replicas = [replica(exchange) for _ in range(2)]
    sent = steps(replicas, 0)
    exchanged(replicas, 2, 0)
    lost = kept(replicas[1:])
    sent += steps(replicas[:1], 1)
    exchanged(replicas[:1], 1, 1)
    assert float((kept(replicas[:1]) + lost - replicas[0][0].detach() - sent).abs().max()) < 1e-4
