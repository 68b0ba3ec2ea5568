"""Routes requests to one prefill and one decode engine: it takes OpenAI completions, and kvgrpc moves the KV.

    python examples/router/router.py --prefill http://127.0.0.1:8100 --prefill-lead 127.0.0.1:50051
        --decode http://127.0.0.1:8200 --decode-lead 127.0.0.1:50052 --port 8300 --mode pull

Every request gets its own transfer key, which `kvgrpc_intent` tells both engines. In a pull the prefill leg comes
first, and its `kv_transfer_params` go to the decode leg unread. In a push both legs start at once, and the decode leg
is told the address of the prefill engine. If a leg fails or the client hangs up, the router ends the other leg. It also
ends everything under that key, with one call to each lead, in any state of the transfer.

It needs aiohttp, which comes with vLLM.
"""

import argparse
import asyncio
import base64
import logging
import os
from typing import Any

from aiohttp import ClientError, ClientSession, web

from kvgrpc.client import CleanUp, Client, clean_up, connect
from kvgrpc.errors import KVGrpcError

Body = dict[str, Any]
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
DECODE = {"do_remote_decode": False, "do_remote_prefill": True}
LENGTHS = ("max_tokens", "max_completion_tokens", "min_tokens", "stream_options", "n")

_log = logging.getLogger("router")


class Router:
    """Sends each request through both engines."""

    def __init__(self, options: argparse.Namespace, session: ClientSession, leads: dict[str, Client]) -> None:
        self._options = options
        self._session = session
        self._leads = leads

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Serves one request. It is cancelled if its client hangs up."""
        body, key = await request.json(), os.urandom(16)
        try:
            if self._options.mode == "push":
                return await self._push(request, body, key)
            return await self._pull(request, body, key)
        except (ClientError, web.HTTPException) as error:
            await self._cancel(key, f"a leg failed: {error}")
            raise
        except asyncio.CancelledError:
            # The clean-up is shielded, because it must not be cancelled with the request.
            await asyncio.shield(self._cancel(key, "the client hung up"))
            raise

    async def _pull(self, request: web.Request, body: Body, key: bytes) -> web.StreamResponse:
        prefilled = await self._prefill(request, body, PREFILL | intent(key, "PULL"))
        params = prefilled.get("kv_transfer_params")
        if not params:
            raise web.HTTPBadGateway(text="the prefill engine handed nothing over")
        return await self._decode(request, body, params)

    async def _push(self, request: web.Request, body: Body, key: bytes) -> web.StreamResponse:
        source = {"peer": {"address": self._options.prefill_lead}}
        destination = {"peer": {"address": self._options.decode_lead}}
        decode = asyncio.create_task(self._decode(request, body, DECODE | intent(key, "PUSH", **source)))
        prefill = asyncio.create_task(self._prefill(request, body, PREFILL | intent(key, "PUSH", **destination)))
        try:
            answer, _ = await asyncio.gather(decode, prefill)
        finally:
            decode.cancel()
            prefill.cancel()
        return answer

    async def _prefill(self, request: web.Request, body: Body, params: Body) -> Body:
        """Sends the prefill leg for one token, and discards that token."""
        short = {name: value for name, value in body.items() if name not in LENGTHS}
        short |= {"max_tokens": 1, "stream": False, "kv_transfer_params": params}
        url = self._options.prefill + request.path
        async with self._session.post(url, json=short, headers=trace_of(request)) as answer:
            await check(answer, "prefill")
            found: Body = await answer.json()
            return found

    async def _decode(self, request: web.Request, body: Body, params: Body) -> web.StreamResponse:
        """Sends the decode leg, and streams its answer to the client."""
        whole = body | {"kv_transfer_params": params}
        url = self._options.decode + request.path
        async with self._session.post(url, json=whole, headers=trace_of(request)) as answer:
            await check(answer, "decode")
            relayed = web.StreamResponse(headers={"content-type": answer.content_type})
            await relayed.prepare(request)
            async for chunk in answer.content.iter_any():
                await relayed.write(chunk)
            await relayed.write_eof()
            return relayed

    async def _cancel(self, key: bytes, message: str) -> None:
        """Ends everything under a key, on both sides, and makes both refuse later calls under it."""
        said = await clean_up([CleanUp(lead, key) for lead in self._leads.values()], message=message)
        for name, outcome in zip(self._leads, said, strict=True):
            if isinstance(outcome, KVGrpcError):
                _log.warning("%s: %s", name, outcome)


def trace_of(request: web.Request) -> dict[str, str]:
    """Returns the headers that add both legs, and the engines' transfers, to the client's trace."""
    return {name: request.headers[name] for name in ("traceparent", "tracestate") if name in request.headers}


def intent(key: bytes, mode: str, **more: Any) -> Body:
    """Returns what both engines are told about a request."""
    return {"kvgrpc_intent": {"transferKey": base64.b64encode(key).decode(), "mode": f"TRANSFER_MODE_{mode}", **more}}


async def check(answer: Any, leg: str) -> None:
    """Raises HTTPBadGateway for an answer that is not a success."""
    if answer.status != 200:
        raise web.HTTPBadGateway(text=f"the {leg} engine answered {answer.status}: {await answer.text()}")


async def main() -> None:
    """Serves until it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--prefill", "--decode", "--prefill-lead", "--decode-lead"):
        parser.add_argument(name, required=True)
    parser.add_argument("--port", type=int, default=8300)
    parser.add_argument("--mode", choices=["pull", "push"], default="pull")
    options = parser.parse_args()
    async with (
        ClientSession() as session,
        connect(options.prefill_lead) as prefill_lead,
        connect(options.decode_lead) as decode_lead,
    ):
        router = Router(options, session, {"prefill": prefill_lead, "decode": decode_lead})
        app = web.Application()
        app.router.add_post("/v1/completions", router.completions)
        app.router.add_post("/v1/chat/completions", router.completions)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", options.port).start()
        print(f"router: {options.mode} at http://127.0.0.1:{options.port}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
