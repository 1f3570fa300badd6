"""Two torchrun agents, as on two machines: train, lose one agent, resume."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time

import psutil
import yaml

from megatron_dsv41.experiments.tracking import read_metrics
from megatron_dsv41.testing.tiny_run import tiny_run

STEPS = 16


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_agents(config, log):
    """One agent per "machine", each with one rank; what they print goes to the file `log`."""
    port = free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return [
        subprocess.Popen(
            [*command, "--node-rank", str(node), "-m", "megatron_dsv41", "train", "--config", str(config)],
            env=environment,
            stdout=log.open("a"),
            stderr=subprocess.STDOUT,
        )
        for node in range(2)
    ]


def lose(agent):
    """Everything of one machine at once; an agent's workers are in sessions of their own."""
    processes = [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]
    for process in reversed(processes):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    agent.wait()


def test_two_agents_train_lose_one_and_resume(tmp_path):
    run = tiny_run(tmp_path, f"train.steps={STEPS}", "batch.micro=2", "checkpoint.interval=2", "parallel.pp=2")
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(json.loads(json.dumps(run.to_dict()))))
    folder = run.checkpoint.folder
    agents = start_agents(config, tmp_path / "first.log")
    try:
        deadline = time.monotonic() + 300
        while not any(row["step"] >= 4 for row in read_metrics(folder)):
            assert time.monotonic() < deadline and all(agent.poll() is None for agent in agents)
            time.sleep(0.05)
    finally:
        lose(agents[0])  # one machine is gone; what is left of the other is stopped by its scheduler
        lose(agents[1])
    before = {row["step"]: row["loss"] for row in read_metrics(folder) if "loss" in row}
    agents = start_agents(config, tmp_path / "second.log")
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
