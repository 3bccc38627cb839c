"""Emulated links: their rate and burst, racks and trunks, and the bytes that were sent."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from syncline.cluster import ClusterSpec, Rank, launch, why_not_shaped
from syncline.cluster.environment import MASTER_PORT
from syncline.cluster.isolation import running_hosts

pytestmark = pytest.mark.skipif(why_not_shaped() is not None, reason=f"no namespaces: {why_not_shaped()}")


def token_buckets() -> dict[str, tuple[int, int]]:
    """Return the rate in bit/s and the burst in bytes of each interface in this namespace."""
    from pyroute2 import IPRoute

    with IPRoute() as netlink:
        names = {link["index"]: link.get_attr("IFLA_IFNAME") for link in netlink.get_links()}
        return {
            names[qdisc["index"]]: _rate_and_burst(qdisc)
            for qdisc in netlink.get_qdiscs()
            if qdisc.get_attr("TCA_KIND") == "tbf"
        }


def _rate_and_burst(qdisc: Any) -> tuple[int, int]:
    options = qdisc.get_attr("TCA_OPTIONS")
    parameters = options.get_attr("TCA_TBF_PARMS")
    rate = parameters["rate"]
    ticks_per_us = _ticks_per_us()
    return rate * 8, round(parameters["buffer"] / ticks_per_us * rate / 1e6)


def _ticks_per_us() -> float:
    """Return the length of the kernel's ticks, in which it counts a burst at the link's rate."""
    with open("/proc/net/psched") as file:  # noqa: PTH123
        ticks_to_us, us_to_ticks, _, _ = (int(field, 16) for field in file.read().split())
    return ticks_to_us / us_to_ticks


@pytest.mark.parametrize("rate_bps", [100_000_000, 1_000_000_000, 10_000_000_000])
def test_a_hosts_end_of_its_link_has_the_rate_and_burst_that_are_reported(rate_bps: int) -> None:
    from syncline.cluster import links

    found = launch(ClusterSpec(hosts=2, rate_bps=rate_bps), lambda _: token_buckets())
    for buckets in found:
        assert buckets.keys() == {links.HOST_INTERFACE}
        rate, burst = buckets[links.HOST_INTERFACE]
        assert rate == rate_bps
        assert burst == pytest.approx(links.burst_bytes(rate_bps), rel=0.01)


def test_both_ends_of_every_link_and_trunk_are_shaped(monkeypatch: pytest.MonkeyPatch) -> None:
    from syncline.cluster import links

    read_end, write_end = os.pipe()
    build = links.build_switches

    def build_and_tell(spec: ClusterSpec, pids: list[int]) -> None:
        build(spec, pids)
        os.write(write_end, repr({name: rate for name, (rate, _) in token_buckets().items()}).encode())

    monkeypatch.setattr(links, "build_switches", build_and_tell)
    spec = ClusterSpec(hosts=3, rate_bps=200_000_000, racks=2, trunk_rate_bps=50_000_000)
    try:
        with running_hosts(spec, lambda _: 0, shaped=True) as hosts:
            assert hosts.wait(30) == 0
            rates = eval(os.read(read_end, 65536))  # noqa: S307 - our own repr
    finally:
        os.close(read_end)
        os.close(write_end)
    ports = dict.fromkeys(["host0", "host1", "host2"], 200_000_000)
    assert rates == ports | dict.fromkeys(["trunk0", "core0", "trunk1", "core1"], 50_000_000)


def test_hosts_of_different_racks_reach_each_other() -> None:
    def main(rank: Rank) -> float:
        rank.init_process_group()
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    assert launch(ClusterSpec(hosts=3, racks=3, trunk_rate_bps=10**8), main) == [3, 3, 3]


def test_the_interface_counter_sees_what_was_sent_and_little_else() -> None:
    from syncline.cluster import links

    payload = 1_000_000

    def main(rank: Rank) -> int:
        rank.init_process_group()
        dist.barrier()
        before = links.sent_bytes()
        if rank.rank == 0:
            dist.send(torch.zeros(payload, dtype=torch.uint8), dst=1)
        else:
            dist.recv(torch.zeros(payload, dtype=torch.uint8), src=0)
        dist.barrier()
        return links.sent_bytes() - before

    sender, receiver = launch(ClusterSpec(hosts=2), main)
    assert payload <= sender <= 1.1 * payload  # headers
    assert receiver < 0.1 * payload  # acknowledgements


def test_ranks_of_one_host_send_nothing_over_the_link() -> None:
    from syncline.cluster import links

    def main(rank: Rank) -> int:
        rank.init_process_group()
        dist.barrier()
        before = links.sent_bytes()
        for _ in range(4):
            dist.all_reduce(torch.zeros(250_000))
        return links.sent_bytes() - before

    assert max(launch(ClusterSpec(hosts=1, per_host=(2,)), main)) < 100_000


def test_the_counter_raises_without_an_emulated_link() -> None:
    from syncline.cluster import links

    if "eth0" in {name for _, name in socket.if_nameindex()}:
        pytest.skip("this machine has an eth0 of its own")
    with pytest.raises(LookupError, match="links are not emulated"):
        links.sent_bytes()


def test_a_reshaped_link_holds_its_new_rate() -> None:
    from syncline.cluster import links

    def main(rank: Rank) -> list[tuple[int, int]]:
        found = []
        for rate_bps in (20_000_000, 400_000_000):
            links.reshape(rate_bps if rank.rank == 0 else 200_000_000)
            found.append(token_buckets()[links.HOST_INTERFACE])
        rank.init_process_group()
        links.reshape(20_000_000 if rank.rank == 0 else 200_000_000)
        payload = torch.zeros(500_000, dtype=torch.uint8)
        dist.barrier()
        began_s = time.monotonic()
        if rank.rank == 0:
            dist.send(payload, dst=1)
        else:
            dist.recv(payload, src=0)
            assert time.monotonic() - began_s > 0.8 * (payload.numel() - links.MIN_BURST_BYTES) / 2_500_000
        return found

    first, second = launch(ClusterSpec(hosts=2), main)
    assert [rate for rate, _ in first] == [20_000_000, 400_000_000]
    assert [burst for _, burst in first] == [pytest.approx(links.burst_bytes(rate), rel=0.01) for rate, _ in first]
    assert [rate for rate, _ in second] == [200_000_000] * 2


def test_a_cut_link_carries_nothing_and_breaks_nothing_until_it_is_mended() -> None:
    """As with a pulled cable, ranks of one host still reach each other, and TCP connections continue afterwards."""
    from syncline.cluster import links

    def main(rank: Rank) -> tuple[float, float]:
        rank.init_process_group()
        on_my_host = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank.host]
        everyone, neighbours = torch.ones(1), torch.ones(1)
        dist.all_reduce(everyone)
        dist.all_reduce(neighbours, group=on_my_host)
        mended_s = 0.0
        if rank.rank == 2:
            links.cut()
        meeting = dist.all_reduce(everyone, async_op=True)
        dist.all_reduce(neighbours, group=on_my_host)
        assert neighbours.item() == 4
        if rank.rank == 2:
            with pytest.raises(TimeoutError):
                socket.create_connection((links.host_address(0), MASTER_PORT), timeout=0.5)
            assert not meeting.is_completed()
            mended_s = time.monotonic()
            links.mend()
        meeting.wait()
        assert everyone.item() == 16
        return mended_s, time.monotonic()

    ends = launch(ClusterSpec(hosts=2, per_host=(2, 2)), main)
    mended_s = ends[2][0]
    assert all(met_s > mended_s for _, met_s in ends)


@pytest.mark.parametrize("change", ["cut", "mend", "reshape"])
def test_only_an_emulated_hosts_link_is_changed(change: str) -> None:
    from syncline.cluster import links

    with pytest.raises(LookupError, match="links are not emulated"):
        links.reshape(10**6) if change == "reshape" else getattr(links, change)()
