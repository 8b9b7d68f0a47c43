"""The server: requests come in, are decoded by the manager, and are answered whole or as a stream."""

import asyncio
import contextlib
import logging
import math
import queue
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from jinja2 import TemplateError
from starlette.requests import ClientDisconnect

from hf_drafthead.serving.answers import Choice, Delta
from hf_drafthead.serving.formats import Chat, Completions, Responses
from hf_drafthead.serving.served import Served

CALLS = {"/v1/completions": Completions, "/v1/chat/completions": Chat, "/v1/responses": Responses}
OF_CLIENTS = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, TemplateError, OSError)
FAULTS = re.compile(r"(Value|Type|Key|Index|Attribute|Overflow)Error: ")  # of clients, in results of the manager
# How the names of metrics begin that are no counters.
GAUGES = ("waiting", "running", "tokens_per", "seconds", "learning_first", "learning_tokens")
LAST_SECONDS = 5  # for connections to be closed, once nothing is decoded for them any more
STOPPED = "the server was stopped: this answer is not complete."
STOPPING = ("the server was stopped", "the manager was stopped")  # how errors begin of what may be asked again later
Grown = AsyncIterator[tuple[Choice, Delta]]


class Failed(Exception):
    """A request that was ended before its answer was whole."""


class Room:
    """A model and the manager that decodes for all clients."""

    def __init__(self, served: Served):
        self.served, self.turn = served, asyncio.Lock()
        self.open: set[asyncio.Queue[Any]] = set()
        given = {name: getattr(served.options, name) for name in ("slots", "max_queue_size", "lookup_answers")}
        texts = {"lookup_texts": served.options.texts, "tokenizer": served.decoder}
        self.manager = served.model.init_continuous_batching(**given, **texts)
        if served.options.learn:
            try:
                self.manager.learn(everybody=False)
            except ValueError as problem:
                logging.getLogger("uvicorn.error").warning("--learn: %s", problem)
        self.manager.warmup()
        self.manager.start()

    def stop(self) -> None:
        """End all requests, with an error."""
        for results in self.open:  # before the manager, which reads a prompt to its end
            results.put_nowait(None)
        self.manager.stop(block=False, hard_stop=True)

    async def grown(self, call: Completions) -> Grown:
        """What the choices of a call grow by; whoever stops listening has cancelled them."""
        results: asyncio.Queue[Any] = asyncio.Queue()
        running, stream = set(), bool(call.body.get("stream"))
        self.open.add(results)
        try:
            for choice in call.choices:
                told = {"streaming": stream, "learn": bool(call.body.get("store"))}
                self.manager.add_request(choice.prompt.ids, choice.id, **told, **choice.settings)
                running.add(choice.id)
                self.manager.register_result_handler(choice.id, lambda *got, to=choice: results.put_nowait((to, *got)))
            while running:
                if (taken := await results.get()) is None:
                    raise Failed(STOPPED)
                choice, result = taken
                if result.error is not None:
                    raise Failed(result.error)
                if result.is_finished():
                    running.remove(choice.id)
                yield choice, choice.take(result)
        finally:
            self.open.discard(results)
            for name in running:
                self.manager.cancel_request(name)

    async def answer(self, request: Request) -> Response:
        """The answer to one request, whole or as a stream that has its first token."""
        body = await request.json()
        async with self.turn:  # a tokenizer serves one thread at a time
            call = await asyncio.to_thread(CALLS[request.url.path], self.served, body)
        grown, stream = self.grown(call), call.body.get("stream")
        ready = asyncio.ensure_future(begun(grown, not stream))
        gone = asyncio.ensure_future(request.receive())  # of a request that was read its client says no more
        await asyncio.wait({ready, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            await asyncio.wait({ready})
            raise ClientDisconnect
        gone.cancel()
        if stream:
            return StreamingResponse(events(call, ready.result(), grown), media_type="text/event-stream")
        ready.result()
        return JSONResponse(call.whole())


async def begun(grown: Grown, whole: bool) -> Any:
    """What comes first; or, once all has come, nothing, since each choice has what it has grown by."""
    async for pair in grown:
        if not whole:
            return pair


async def events(call: Completions, first: tuple[Choice, Delta], grown: Any) -> AsyncIterator[str]:
    """The events of a stream, of which an error is the last."""
    try:
        async with contextlib.aclosing(grown):
            for text in call.grown(*first):
                yield text
            async for choice, delta in grown:
                for text in call.grown(choice, delta):
                    yield text
        for text in call.end():
            yield text
    except Exception as problem:
        for text in call.failed(described(problem)[1]):
            yield text


def described(problem: Exception) -> tuple[int, dict[str, Any]]:
    """The status of an error, and what OpenAI's API says of it."""
    later = isinstance(problem, queue.Full) or str(problem).startswith(STOPPING)
    theirs = isinstance(problem, OF_CLIENTS) or isinstance(problem, Failed) and FAULTS.match(str(problem))
    status = 503 if later else 400 if theirs else 500
    if status == 500:
        logging.getLogger("uvicorn.error").error("a request has failed", exc_info=problem)
    named = isinstance(problem, (Failed, queue.Full)) or hasattr(problem, "field")
    message = " ".join(f"{'' if named else type(problem).__name__ + ': '}{problem}".split())
    error = {"message": message, "type": "invalid_request_error" if status == 400 else "server_error"}
    return status, error | {"param": getattr(problem, "field", None), "code": getattr(problem, "code", None)}


def build(room: Room) -> FastAPI:
    """The application."""
    app, served = FastAPI(docs_url=None, redoc_url=None, openapi_url=None), room.served
    model = {"id": served.name, "object": "model", "created": int(time.time()), "owned_by": "hf-drafthead"}
    model["max_model_len"] = served.context
    if served.options.cors:
        app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])

    async def answer(request: Request) -> Response:
        try:
            return await room.answer(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as problem:
            status, error = described(problem)
            return JSONResponse({"error": error}, status, headers={"Retry-After": "1"} if status == 503 else None)

    for path in CALLS:
        app.add_api_route(path, answer, methods=["POST"], response_model=None)

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}", response_model=None)
    def one_model(name: str) -> Any:
        return model if name == served.name else JSONResponse({"error": {"message": f"no model {name!r}"}}, 404)

    @app.post("/load_model")
    def load_model() -> PlainTextResponse:  # as transformers' chat asks before it begins
        return PlainTextResponse('data: {"status": "ready", "cached": true}\n\n', media_type="text/event-stream")

    @app.get("/health")
    def health() -> Response:
        return Response(status_code=200 if room.manager.is_running() else 503)

    @app.get("/metrics")
    def metrics() -> PlainTextResponse:
        lines = []
        for name, value in room.manager.metrics().items():
            kind, end = ("gauge", "") if name.startswith(GAUGES) else ("counter", "_total")
            lines.append(f"# TYPE hf_drafthead_{name}{end} {kind}\nhf_drafthead_{name}{end} {value}\n")
        return PlainTextResponse("".join(lines), media_type="text/plain; version=0.0.4")

    return app


def run(options: Any) -> None:
    """Serve until the process is interrupted; answers that are not whole within a time are ended, and say so."""
    room = Room(Served(options))
    most = math.ceil(options.stop_within) + LAST_SECONDS
    where = {"host": options.host, "port": options.port, "log_level": options.log_level}
    server = uvicorn.Server(uvicorn.Config(build(room), **where, timeout_graceful_shutdown=most))
    close = server.shutdown

    async def shutdown(sockets: Any = None) -> None:
        stop = asyncio.get_running_loop().call_later(options.stop_within, room.stop)
        await close(sockets)
        stop.cancel()

    server.shutdown = shutdown  # type: ignore[method-assign]
    try:
        server.run()
    finally:
        room.stop()
