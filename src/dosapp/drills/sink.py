"""A server that refuses everything and does nothing: the control of the floods.

A flood that is sent here takes what its own processes need of the processors, and nothing of the
service. Like a service it answers at a limited rate, so that the flood is not invited to send more
than it could send to the service. `python -m dosapp.drills.sink` prints its port. Imports no torch.
"""

import asyncio
import os
import sys

from dosapp.service.http.limits import Pacer

MAX_HEAD = 32_768  # bytes of a request's head


async def run() -> None:
    """Listen at a free port until the process is ended."""
    answers = Pacer(rate=20, burst=40)  # as those of a service, here by the first line of requests

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            has_body = False
            while not has_body:
                head = await reader.readuntil(b"\r\n\r\n")
                has_body = b"content-length" in head.lower()
                await asyncio.sleep(answers.delay(head.partition(b"\r\n")[0].decode("latin-1")))
                ending = b"Connection: close\r\n" if has_body else b""
                writer.write(b"HTTP/1.1 429 Busy\r\nContent-Length: 0\r\n%s\r\n" % ending)
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0, limit=MAX_HEAD, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    os.nice(10)  # as the floods
    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        sys.exit(0)
