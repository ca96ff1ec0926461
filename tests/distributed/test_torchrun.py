"""The example for torchrun: two processes on one host, and on two.

A second host is a second launcher, or a network of its own (a namespace), which only a pair of
virtual interfaces connects with the first.
"""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = str(ROOT / "docs/examples/torchrun_ddp.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LIMIT = 300  # seconds; for a launcher that hangs


def start(command, **variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GLOO_")}
    return subprocess.Popen(
        command,
        env={**environment, "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def output(*launchers):
    """What they print. All that they started ends with them."""
    printed = ""
    try:
        for launcher in launchers:
            out, err = launcher.communicate(timeout=LIMIT)
            assert launcher.returncode == 0, out + err
            printed += out
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                # torchrun ends its workers then, which are in sessions of their own.
                os.killpg(launcher.pid, signal.SIGTERM)
                launcher.communicate(timeout=LIMIT)
    return printed


def check(printed, places):
    """Two ranks, in these places, that have learnt the same."""
    found = re.findall(r"^rank (\d) of 2 \((.*)\): loss (\S+ to \S+)$", printed, re.M)
    assert sorted(rank for rank, _, _ in found) == ["0", "1"], printed
    assert sorted(place for _, place, _ in found) == places
    assert found[0][2] == found[1][2]


@pytest.mark.slow
def test_torchrun_example_runs_as_two_processes():
    launcher = start([*TORCHRUN, "--standalone", "--nproc-per-node", "2", EXAMPLE])
    check(output(launcher), ["host 0, openreg:0", "host 0, openreg:1"])


def on_two_hosts(endpoint, *more):
    """torchrun's command, the same on both."""
    command = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    return [*command, "--rdzv-endpoint", endpoint, "--rdzv-id", "7", *more, EXAMPLE]


@pytest.mark.slow
def test_torchrun_example_runs_under_two_launchers(free_port):
    command = on_two_hosts(f"localhost:{free_port}", "--local-addr", "localhost")
    printed = output(*[start(command) for _ in range(2)])
    check(printed, ["host 0, openreg:0", "host 1, openreg:0"])


@pytest.fixture
def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


# The first host is the script's own network, the second that of a process which sleeps in it.
TWO_NETWORKS = """
unshare --net sleep {limit} >/dev/null 2>&1 & second=$!
trap 'kill $second' EXIT
while [ "$(readlink /proc/$second/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
on_second="nsenter --net=/proc/$second/ns/net"
ip link add openreg0 type veth peer name openreg1 netns $second
ip addr add 10.77.0.1/24 dev openreg0
$on_second ip addr add 10.77.0.2/24 dev openreg1
for interface in lo openreg0; do ip link set $interface up; done
for interface in lo openreg1; do $on_second ip link set $interface up; done
"""


def in_new_network(script):
    """Runs a script in a network of its own, as root there."""
    own = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]
    return [*own, "sh", "-euc", TWO_NETWORKS.format(limit=LIMIT) + script]


@pytest.fixture
def namespaces():
    missing = [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"network namespaces need {', '.join(missing)}")
    tried = subprocess.run(in_new_network(""), capture_output=True, text=True, timeout=LIMIT)
    if tried.returncode != 0:
        pytest.skip(f"no network namespaces here: {tried.stderr.strip()}")


@pytest.mark.slow
def test_torchrun_example_runs_over_two_networks(namespaces):
    """Hosts whose names say nothing of the network between them: torchrun and Gloo are told."""

    def on_host(number):
        own = ["--local-addr", f"10.77.0.{number + 1}", "--rdzv-conf", f"is_host={1 - number}"]
        command = shlex.join(map(str, on_two_hosts("10.77.0.1:29400", *own)))
        return f"GLOO_SOCKET_IFNAME=openreg{number} {command}"

    script = f"$on_second env {on_host(1)} & {on_host(0)}; wait $!"
    check(output(start(in_new_network(script))), ["host 0, openreg:0", "host 1, openreg:0"])
