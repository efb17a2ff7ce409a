"""A slow network on one machine: a TCP proxy with a bandwidth and a delay, in each direction.

python slow_link.py --listen 9000 --to 127.0.0.1:8500 --mbit 8 --delay-ms 50

    rillflow join http://127.0.0.1:9000 ─> slow_link ─ bytes wait their turn, then the delay ─> 127.0.0.1:8500
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import suppress

CHUNK_BYTES = 2**14


class SlowDirection:
    """Bandwidth of one direction, shared by all connections.

    Args:
        bytes_s: bytes in a second.
        delay_s: time that a byte travels.
    """

    def __init__(self, bytes_s: float, delay_s: float) -> None:
        self._bytes_s, self._delay_s = bytes_s, delay_s
        self._free_at = 0.0

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy bytes until the reader ends; chunks that travel overlap, so a delay costs no bandwidth."""
        loop, travelling = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]](256)
        delivering = asyncio.create_task(_deliver(travelling, writer))
        try:
            while chunk := await reader.read(CHUNK_BYTES):
                begin = max(self._free_at, loop.time())
                self._free_at = begin + len(chunk) / self._bytes_s
                await asyncio.sleep(self._free_at - loop.time())
                await travelling.put((self._free_at + self._delay_s, chunk))
        finally:
            await travelling.put((0.0, b""))
            with suppress(ConnectionError):
                await delivering


async def _deliver(travelling: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
    loop = asyncio.get_running_loop()
    while True:
        arrives, chunk = await travelling.get()
        if not chunk:
            with suppress(OSError):
                writer.write_eof()
            return
        await asyncio.sleep(max(0.0, arrives - loop.time()))
        with suppress(ConnectionError):
            writer.write(chunk)
            await writer.drain()


async def serve(listen: int, host: str, port: int, mbit: float, delay_ms: float) -> None:
    """Forward connections until the process ends."""
    there, back = (SlowDirection(mbit * 125_000, delay_ms / 1000) for _ in range(2))

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        with suppress(ConnectionError):
            await asyncio.gather(there.carry(reader, far_writer), back.carry(far_reader, writer))
        far_writer.close()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", listen)
    port_here = server.sockets[0].getsockname()[1]
    print(f"127.0.0.1:{port_here} to {host}:{port}, {mbit:g} Mbit/s, {delay_ms:g} ms", flush=True)
    async with server:
        await server.serve_forever()


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--listen", type=int, default=9000, help="port on this machine (9000); 0: free")
    parser.add_argument("--to", required=True, metavar="HOST:PORT", help="where connections go")
    parser.add_argument("--mbit", type=float, default=8.0, help="Mbit in a second, each direction (8)")
    parser.add_argument("--delay-ms", type=float, default=50.0, help="delay in each direction (50)")
    arguments = parser.parse_args()
    host, _, port = arguments.to.rpartition(":")
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(arguments.listen, host, int(port), arguments.mbit, arguments.delay_ms))


if __name__ == "__main__":
    main()
