"""Two torchrun agents, as on two machines: train, lose one agent, resume."""

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from megatron_dsv41.experiments.tracking import read_metrics
from megatron_dsv41.testing.tiny_run import tiny_run

STEPS = 16
CASE = Path(__file__).parents[2] / "data" / "parity" / "text_fp32"


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where an agent runs: what its command begins with, its address, the name of its network device."""

    prefix: tuple[str, ...]
    address: str
    device: str


LOOPBACK = [Machine((), "127.0.0.1", "lo")] * 2


@pytest.fixture
def namespaces():
    """Two machines that share nothing but a cable: network namespaces joined by a pair of virtual devices."""
    names = [f"dsv41-{os.getpid()}-{number}" for number in range(2)]
    devices, made = [f"v{os.getpid() % 10**6}{end}" for end in "ab"], []
    machines = [
        Machine(("ip", "netns", "exec", name), f"10.231.7.{n}", devices[n - 1]) for n, name in enumerate(names, 1)
    ]
    try:
        for name in names:
            if (
                shutil.which("ip") is None
                or subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode
            ):
                pytest.skip("needs the right to make network namespaces (ip netns add)")
            made.append(name)
        link = ["ip", "link", "add", devices[0], "netns", names[0], "type", "veth"]
        subprocess.run([*link, "peer", "name", devices[1], "netns", names[1]], check=True)
        for name, machine in zip(names, machines, strict=True):
            inside = ["ip", "-n", name]
            subprocess.run([*inside, "addr", "add", f"{machine.address}/24", "dev", machine.device], check=True)
            for device in (machine.device, "lo"):
                subprocess.run([*inside, "link", "set", device, "up"], check=True)
        yield machines
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=True)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_agents(machines, log, *program):
    """One agent per machine, each with one rank of `program`; what they print goes to the file `log`."""
    port = free_port()
    agents = []
    for node, machine in enumerate(machines):
        command = [*machine.prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        command += ["--nproc-per-node", "1", "--node-rank", str(node)]
        command += ["--master-addr", machines[0].address, "--master-port", str(port), *program]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": machine.device}
        with log.open("a") as output:
            agents.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
    return agents


def lose(agent):
    """Everything of one machine at once; an agent's workers are in sessions of their own."""
    processes = [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]
    for process in reversed(processes):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    agent.wait()


def test_two_agents_train_lose_one_and_resume(tmp_path):
    train_lose_resume(tmp_path, LOOPBACK)


@pytest.mark.slow
def test_two_network_namespaces(tmp_path, namespaces):
    report = tmp_path / "report.json"
    agents = start_agents(namespaces, tmp_path / "parity.log", __file__, str(report))
    assert [agent.wait(timeout=600) for agent in agents] == [0, 0], (tmp_path / "parity.log").read_text()[-3000:]
    assert json.loads(report.read_text()) == []
    train_lose_resume(tmp_path, namespaces)


def train_lose_resume(tmp_path, machines):
    run = tiny_run(tmp_path, f"train.steps={STEPS}", "batch.micro=2", "checkpoint.interval=2", "parallel.pp=2")
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(json.loads(json.dumps(run.to_dict()))))
    folder = run.checkpoint.folder
    program = ("-m", "megatron_dsv41", "train", "--config", str(config))
    agents = start_agents(machines, tmp_path / "first.log", *program)
    try:
        deadline = time.monotonic() + 300
        while not any(row["step"] >= 4 for row in read_metrics(folder)):
            assert time.monotonic() < deadline and all(agent.poll() is None for agent in agents)
            time.sleep(0.05)
    finally:
        lose(agents[0])  # one machine is gone; what is left of the other is stopped by its scheduler
        lose(agents[1])
    before = {row["step"]: row["loss"] for row in read_metrics(folder) if "loss" in row}
    agents = start_agents(machines, tmp_path / "second.log", *program)
    try:
        codes = [agent.wait(timeout=300) for agent in agents]
        assert codes == [0, 0], (tmp_path / "second.log").read_text()[-5000:]
    finally:
        for agent in agents:
            if agent.poll() is None:
                lose(agent)
    after = {row["step"]: row["loss"] for row in read_metrics(folder) if "loss" in row}
    assert list(after) == list(range(1, STEPS + 1))
    assert {step: after[step] for step in before} == before


def parity_of_two_machines(report):
    """What an agent's rank runs: one layout; the first writes what is out of tolerance."""
    from megatron_dsv41.backends.megatron import launch
    from megatron_dsv41.backends.megatron.parity import run_layouts
    from megatron_dsv41.testing.parity import ParityCase, compare

    launch.prepare_process()
    with launch.world():
        (results,) = run_layouts(CASE, ["pp=2,layout=Ettttt|tttL"])
    if results is not None:
        Path(report).write_text(json.dumps(list(compare(ParityCase.load(CASE), results).failures)))


if __name__ == "__main__":
    parity_of_two_machines(sys.argv[1])
