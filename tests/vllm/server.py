"""vLLM's server for tests, and TRL's client of it with another hand-over of weights: TRL's own needs NCCL, so a GPU."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from safetensors.torch import save_file
from torch import Tensor
from trl.generation.vllm_client import VLLMClient

#: Seconds that a server has to start.
PATIENCE = 600


@dataclass
class Server:
    url: str
    process: subprocess.Popen[Any]

    def kill(self) -> None:
        """With the processes that it has started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def serving(model: Path, *options: str) -> Iterator[Server]:
    """A server of a model in float32, with what TRL asks for; as `vllm serve`, which vLLM's CPU build lacks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--weight-transfer-config", '{"backend": "nccl"}', "--logprobs-mode", "processed_logprobs", *options]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    log_path = model.parent / "server.log"
    with log_path.open("w") as log:
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=log, stderr=log, start_new_session=True
        )
    server = Server(f"http://127.0.0.1:{port}", process)
    try:
        deadline = time.monotonic() + PATIENCE
        while not answers(server.url):
            assert process.poll() is None and time.monotonic() < deadline, log_path.read_text()[-4000:]
            time.sleep(1)
        yield server
    finally:
        server.kill()


def answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=10).ok
    except requests.RequestException:
        return False


class FileClient(VLLMClient):
    """Hands weights over by a file that the server loads, which works on a CPU too."""

    folder: Path

    def init_communicator(self, device: Any = 0) -> None:
        """There is no group of processes to join."""

    def update_named_params(self, metadata: Any, named_params: Iterator[tuple[str, Tensor]]) -> None:
        weights = {name: weight.detach().clone() for name, weight in named_params}
        save_file(weights, self.folder / "model.safetensors")
        rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(self.folder)}}
        self._post(f"{self.base_url}/collective_rpc", json=rpc)
