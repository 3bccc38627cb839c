"""Switches, links and their shaping, through netlink.

Every link is a veth pair with a token-bucket filter at both ends, so each direction holds its rate on its own.
Latency and loss are not emulated: few kernels ship `netem`.

**The burst is the trap.** A bucket's burst is credit that an idle link hands to the next message for free, so a large
one flatters small and sparse messages. Below 64 kB, the largest segment that TCP hands to a link in one piece, the
kernel cuts every segment into packets and the CPU, not the link, sets the pace. `BURST_S` and `MIN_BURST_BYTES` are
about the smallest that held the rate at every size in `benchmarks/link_rate.py`, from a standing start and back to
back.

A process on an emulated host can change that host's link while it is used: `reshape` it, `cut` it, `mend` it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute, NetlinkError

from syncline.cluster import linux
from syncline.cluster.spec import ClusterSpec
from syncline.errors import ClusterError

HOST_INTERFACE = "eth0"
BURST_S = 0.004
MIN_BURST_BYTES = 80_000
QUEUE_S = 0.2
"""Room for this much traffic in front of a link: a switch that does not drop while TCP finds its window."""
MIN_QUEUE_BYTES = 1024 * 1024


def burst_bytes(rate_bps: int) -> int:
    return max(MIN_BURST_BYTES, int(rate_bps / 8 * BURST_S))


def host_address(host: int) -> str:
    """Addresses live in the cluster's own network namespaces and mean nothing outside of them."""
    return f"10.77.0.{host + 1}"


def build_switches(spec: ClusterSpec, host_pids: list[int]) -> None:
    """In the switch's namespace: bridges, one link to each host, trunks between racks and core."""
    with IPRoute() as netlink:
        _up(netlink, "lo")
        for rack in range(spec.racks):
            _add_bridge(netlink, f"rack{rack}")
        for host, pid in enumerate(host_pids):
            port = f"host{host}"
            with _asking_the_kernel_for("a veth pair"):
                netlink.link("add", ifname=port, kind="veth", peer={"ifname": HOST_INTERFACE, "net_ns_pid": pid})
            _plug(netlink, port, f"rack{spec.rack_of(host)}")
            _shape(netlink, port, spec.rate_bps)
        if spec.trunk_rate_bps is not None:
            _add_bridge(netlink, "core")
            for rack in range(spec.racks):
                near, far = f"trunk{rack}", f"core{rack}"
                netlink.link("add", ifname=near, kind="veth", peer=far)
                _plug(netlink, near, f"rack{rack}")
                _plug(netlink, far, "core")
                for end in (near, far):
                    _shape(netlink, end, spec.trunk_rate_bps)


def configure_host(spec: ClusterSpec, host: int) -> None:
    """In a host's namespace, once its link exists: address, shaping, and the TCP that hosts run by default."""
    with IPRoute() as netlink:
        _up(netlink, "lo")
        index = _index(netlink, HOST_INTERFACE)
        netlink.addr("add", index=index, address=host_address(host), prefixlen=24)
        _shape(netlink, HOST_INTERFACE, spec.rate_bps)
        _up(netlink, HOST_INTERFACE)
    _use_common_tcp()


def sent_bytes() -> int:
    """Bytes that this host has put on its link since it exists, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == HOST_INTERFACE:
            return int(counters.split()[8])
    raise LookupError(f"no interface {HOST_INTERFACE} here: links are not emulated")


def reshape(rate_bps: int) -> None:
    """From now on this host sends at another rate; what it receives, the switch's end of the link still decides."""
    with IPRoute() as netlink:
        _own_link(netlink)
        _shape(netlink, HOST_INTERFACE, rate_bps, "change")


def cut() -> None:
    """Pulls this host's cable out of the switch: nothing passes any more, in neither direction, until `mend`.

    It is done at the switch's end, because that is what a pulled cable looks like. This host loses its carrier and
    keeps its address and routes, so that its own ranks still reach each other; the other hosts see nothing at all; and
    every TCP connection stays open until somebody's timeout.
    """
    _set_port("down")


def mend() -> None:
    """Puts the cable back. What was sent meanwhile arrives when TCP tries again: the later, the longer it was out."""
    _set_port("up")


def _set_port(state: str) -> None:
    with IPRoute() as netlink:
        port = int(_own_link(netlink).get_attr("IFLA_LINK"))

    def set_state() -> None:
        with IPRoute() as netlink:
            netlink.link("set", index=port, state=state)

    _at_the_switch(set_state)


def _own_link(netlink: IPRoute) -> Any:
    """This host's end, if this is an emulated host. Elsewhere an eth0 is the machine's own, and nobody's to change."""
    found = netlink.link_lookup(ifname=HOST_INTERFACE)
    if found and any(
        address.get_attr("IFA_ADDRESS").startswith(host_address(0).rpartition(".")[0])
        for address in netlink.get_addr(index=found[0], family=socket.AF_INET)
    ):
        return netlink.get_links(found[0])[0]
    raise LookupError(f"no emulated link at {HOST_INTERFACE} here: links are not emulated")


def _at_the_switch(action: Callable[[], None]) -> None:
    """In the switch's network namespace, that of the first of our ancestors that is not on our host."""
    namespace = _switch_namespace()

    def there() -> None:
        linux.enter(namespace, linux.CLONE_NEWNET)
        action()

    with concurrent.futures.ThreadPoolExecutor(1) as thread:  # a thread of its own: it does not come back
        thread.submit(there).result()


def _switch_namespace() -> Path:
    """Process numbers are those of the /proc that is mounted here, whichever it is."""
    process = Path("/proc/self")
    here = Path("/proc/self/ns/net").readlink()
    while (process / "ns/net").readlink() == here:
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        parent = int(status["PPid"])
        if parent == 0:
            raise LookupError("none of our ancestors is a switch: links are not emulated")
        process = Path(f"/proc/{parent}")
    return process / "ns/net"


def _use_common_tcp() -> None:
    # The machine underneath may run BBR or tiny buffers; an emulated host should not depend on that.
    for algorithm in ("cubic", "reno"):
        with contextlib.suppress(OSError):
            Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(algorithm)
            return


def _add_bridge(netlink: IPRoute, name: str) -> None:
    with _asking_the_kernel_for("a bridge"):
        netlink.link("add", ifname=name, kind="bridge", br_stp_state=0)
    _up(netlink, name)


def _plug(netlink: IPRoute, port: str, bridge: str) -> None:
    netlink.link("set", index=_index(netlink, port), master=_index(netlink, bridge), state="up")


def _shape(netlink: IPRoute, name: str, rate_bps: int, how: str = "add") -> None:
    rate = rate_bps // 8
    queue = max(MIN_QUEUE_BYTES, int(rate * QUEUE_S))
    with _asking_the_kernel_for("a token-bucket filter (module sch_tbf)"):
        netlink.tc(
            how,
            "tbf",
            index=_index(netlink, name),
            handle="1:",
            rate=rate,
            burst=burst_bytes(rate_bps),
            limit=queue + burst_bytes(rate_bps),
        )


@contextlib.contextmanager
def _asking_the_kernel_for(what: str) -> Iterator[None]:
    try:
        yield
    except NetlinkError as error:
        raise ClusterError(f"this kernel refuses {what}: {os.strerror(error.code)}") from error


def _index(netlink: IPRoute, name: str) -> int:
    return int(netlink.link_lookup(ifname=name)[0])


def _up(netlink: IPRoute, name: str) -> None:
    netlink.link("set", index=_index(netlink, name), state="up")
