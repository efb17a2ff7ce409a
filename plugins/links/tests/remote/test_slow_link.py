"""The proxy of the examples carries every byte, and no faster than its bandwidth."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "slow_link.py"


def test_bytes_arrive_whole_and_slowly() -> None:
    data = bytes(range(256)) * 400  # 102,400 bytes, at 0.5 MB a second and direction
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo() -> None:
            connection, _ = server.accept()
            with connection:
                while chunk := connection.recv(2**16):
                    connection.sendall(chunk)

        threading.Thread(target=echo, daemon=True).start()
        target = f"127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, str(SCRIPT), "--listen", "0", "--to", target, "--mbit", "4"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as proxy:
            assert proxy.stdout is not None
            port = int(proxy.stdout.readline().split()[0].rpartition(":")[2])
            began, arrived = time.monotonic(), b""
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(data)
                client.shutdown(socket.SHUT_WR)
                while chunk := client.recv(2**16):
                    arrived += chunk
            proxy.kill()
    assert arrived == data
    assert time.monotonic() - began > 0.3  # 0.2 s of bandwidth, twice 50 ms
