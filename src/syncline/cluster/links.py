"""Build switches and links and shape them, through netlink.

Every link is a veth pair with a token-bucket filter at both ends, so each direction has its own rate. Latency and loss
are not emulated: few kernels ship `netem`. A process on an emulated host can change that host's link at any time, with
`reshape`, `cut` and `mend`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from syncline.cluster import processes
from syncline.cluster.spec import ClusterSpec
from syncline.errors import ClusterError

HOST_INTERFACE = "eth0"
_NETWORK = "10.77.0."
BURST_S, MIN_BURST_BYTES = 0.004, 80_000
"""A larger burst makes small messages look faster than they are. With one below 64 kB, the largest segment of TCP, the
CPU limits the rate. These are about the smallest that held the rate for every size in `benchmarks/link_rate.py`."""
QUEUE_S, MIN_QUEUE_BYTES = 0.2, 1024 * 1024
"""Queue in front of a link, in seconds at its rate: enough that it drops nothing while TCP finds its window."""


def burst_bytes(rate_bps: int) -> int:
    return max(MIN_BURST_BYTES, int(rate_bps / 8 * BURST_S))


def host_address(host: int) -> str:
    """Return the address of a host, which is valid only in the cluster's network namespaces."""
    return f"{_NETWORK}{host + 1}"


def build_switches(spec: ClusterSpec, host_pids: list[int]) -> None:
    """Add bridges, a link to each host, and trunks between racks and core; runs in the switch's namespace."""
    with _netlink() as netlink:
        _up(netlink, "lo")
        for rack in range(spec.racks):
            _add_bridge(netlink, f"rack{rack}")
        for host, pid in enumerate(host_pids):
            port = f"host{host}"
            netlink.link("add", ifname=port, kind="veth", peer={"ifname": HOST_INTERFACE, "net_ns_pid": pid})
            _up(netlink, port, master=_index(netlink, f"rack{spec.rack_of(host)}"))
            _shape(netlink, port, spec.rate_bps)
        if spec.trunk_rate_bps is not None:
            _add_bridge(netlink, "core")
            for rack in range(spec.racks):
                near, far = f"trunk{rack}", f"core{rack}"
                netlink.link("add", ifname=near, kind="veth", peer=far)
                for end, bridge in ((near, f"rack{rack}"), (far, "core")):
                    _up(netlink, end, master=_index(netlink, bridge))
                    _shape(netlink, end, spec.trunk_rate_bps)


def configure_host(spec: ClusterSpec, host: int) -> None:
    """Set the address, the rate and TCP's algorithm of a host; runs in its namespace, after its link was added."""
    with _netlink() as netlink:
        _up(netlink, "lo")
        index = _index(netlink, HOST_INTERFACE)
        netlink.addr("add", index=index, address=host_address(host), prefixlen=24)
        _shape(netlink, HOST_INTERFACE, spec.rate_bps)
        _up(netlink, HOST_INTERFACE)
    # The machine may use another algorithm, such as BBR; results must not depend on that.
    with contextlib.suppress(OSError):
        Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("cubic")


def sent_bytes() -> int:
    """Return the bytes that this host has sent since its start, headers included."""
    interfaces = psutil.net_io_counters(pernic=True, nowrap=False)
    if HOST_INTERFACE not in interfaces:
        raise LookupError(f"no interface {HOST_INTERFACE} here: links are not emulated")
    return int(interfaces[HOST_INTERFACE].bytes_sent)


def reshape(rate_bps: int) -> None:
    """Change the rate at which this host sends. The rate at which it receives stays the same."""
    with _netlink() as netlink:
        _own_link(netlink)
        _shape(netlink, HOST_INTERFACE, rate_bps, "change")


def cut() -> None:
    """Cut this host's link in both directions, as if its cable were pulled, until `mend`.

    The switch's end goes down. This host loses its carrier but keeps its address and routes, so its own ranks still
    reach each other. The other hosts notice nothing, and TCP connections stay open until a timeout.
    """
    _set_port("down")


def mend() -> None:
    """Repair the link. Pending data arrives when TCP retries: the longer the cut, the later."""
    _set_port("up")


def _set_port(state: str) -> None:
    """Set the switch's end of this host's link up or down."""
    with _netlink() as netlink:
        port = int(_own_link(netlink).get_attr("IFLA_LINK"))
    namespace = _switch_namespace()

    def set_state() -> None:
        processes.enter_network(namespace)
        with _netlink() as netlink:
            netlink.link("set", index=port, state=state)

    with concurrent.futures.ThreadPoolExecutor(1) as thread:  # a new thread, because it stays in that namespace
        thread.submit(set_state).result()


@contextlib.contextmanager
def _netlink() -> Iterator[Any]:
    from pyroute2 import IPRoute, NetlinkError  # optional, and slow to import

    try:
        with IPRoute() as netlink:
            yield netlink
    except NetlinkError as error:
        needed = "links need veth pairs, bridges and token-bucket filters (module sch_tbf)"
        raise ClusterError(f"{needed}, and this kernel refuses one of them: {os.strerror(error.code)}") from error


def _own_link(netlink: Any) -> Any:
    """Return this host's end of its link; raise if eth0 is not an emulated link but the machine's own."""
    for address in netlink.get_addr(label=HOST_INTERFACE):
        if address.get_attr("IFA_ADDRESS").startswith(_NETWORK):
            return netlink.get_links(address["index"])[0]
    raise LookupError(f"no emulated link at {HOST_INTERFACE} here: links are not emulated")


def _switch_namespace() -> Path:
    """Return the namespace of the closest ancestor that is not on this host. Its process id in /proc may be another."""
    process, here = Path("/proc/self"), Path("/proc/self/ns/net").readlink()
    while (process / "ns/net").readlink() == here:
        parent = re.findall(r"^PPid:\s*(\d+)", (process / "status").read_text(), re.MULTILINE)[0]
        if parent == "0":
            raise LookupError("no ancestor of this process is a switch: links are not emulated")
        process = Path("/proc", parent)
    return process / "ns/net"


def _add_bridge(netlink: Any, name: str) -> None:
    netlink.link("add", ifname=name, kind="bridge", br_stp_state=0)
    _up(netlink, name)


def _shape(netlink: Any, name: str, rate_bps: int, how: str = "add") -> None:
    rate, burst = rate_bps // 8, burst_bytes(rate_bps)
    limit = max(MIN_QUEUE_BYTES, int(rate * QUEUE_S)) + burst
    netlink.tc(how, "tbf", index=_index(netlink, name), handle="1:", rate=rate, burst=burst, limit=limit)


def _index(netlink: Any, name: str) -> int:
    return int(netlink.link_lookup(ifname=name)[0])


def _up(netlink: Any, name: str, **options: Any) -> None:
    netlink.link("set", index=_index(netlink, name), state="up", **options)
