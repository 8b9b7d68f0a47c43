"""The server: requests come in, are decoded by the manager, and are answered whole or as a stream."""

import asyncio
import logging
import math
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException as AnyHTTPException

from hf_drafthead.serving.answers import Chat, Completions, Responses
from hf_drafthead.serving.requests import Refused
from hf_drafthead.serving.served import Served

CALLS = {"/v1/completions": Completions, "/v1/chat/completions": Chat, "/v1/responses": Responses}
# How errors begin that are faults of clients, and those of what may be asked again later.
FAULTS = re.compile(r"(Value|Type|Key|Index|Attribute|Overflow)Error: ")
LATER = re.compile(r"Full: |(RuntimeError: )?the manager was stopped")
# How the names of metrics begin that are no counters.
GAUGES = ("waiting", "running", "tokens_per", "seconds", "learning_first", "learning_tokens")
LAST_SECONDS = 5  # for connections to be closed, once nothing is decoded for them any more


class Answer(StreamingResponse):
    """Is cancelled when its client goes away; what fails before its first piece has a status of its own."""

    async def stream_response(self, send: Any) -> None:
        held = []

        async def send_with_first_piece(message: Any) -> None:
            held.append(message)
            while held and message["type"] == "http.response.body":
                await send(held.pop(0))

        await super().stream_response(send_with_first_piece)


def failure(problem: Any) -> HTTPException:
    """What clients are told, as OpenAI's API has it, of an exception, or of an error that the manager tells."""
    if isinstance(problem, AnyHTTPException):
        status, about = problem.status_code, problem.detail
    else:
        about = problem if isinstance(problem, str) else f"{type(problem).__name__}: {problem}"
        status = 503 if LATER.match(about) else 400 if FAULTS.match(about) else 500
        if status == 500:
            logging.getLogger("uvicorn.error").error("a request has failed: %s", about)
    told: Any = about if isinstance(about, dict) else {"message": " ".join(about.split()), "param": None, "code": None}
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return HTTPException(status, {"type": kind, **told}, {"Retry-After": "1"} if status == 503 else None)


async def answer(served: Served, call: Completions) -> AsyncIterator[str]:
    """All of an answer at once, or the events of a stream, of which an error is the last."""
    results: asyncio.Queue[Any] = asyncio.Queue()
    running, begun = dict[str, Any](), False
    served.open.add(results)
    try:
        for choice in call.choices:
            told = {"streaming": call.stream, "learn": call.body.get("store", False)}
            served.manager.add_request(choice.prompt, choice.id, **told, **choice.settings)
            running[choice.id] = choice
            served.manager.register_result_handler(choice.id, results.put_nowait)
        while running:
            result = await results.get()
            if result.error is not None:
                raise failure(result.error)
            choice = running.pop(result.request_id) if result.is_finished() else running[result.request_id]
            first = () if begun else call.begin()
            choice.take(result)
            for event in [*first, *call.grown(choice)]:
                if call.stream:
                    begun = True
                    yield event
        for event in call.end():
            yield event
    except Exception as problem:
        if not begun:
            raise failure(problem) from problem
        error: Any = failure(problem).detail
        for event in call.end(error):
            yield event
    finally:
        served.open.discard(results)
        for name in running:
            served.manager.cancel_request(name)


def build(served: Served) -> FastAPI:
    """The application."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    model = {"id": served.name, "object": "model", "created": int(time.time()), "owned_by": "hf-drafthead"}
    model["max_model_len"] = served.context

    @app.exception_handler(AnyHTTPException)
    async def refuse(request: Request, problem: AnyHTTPException) -> Response:
        told = failure(problem)
        return JSONResponse({"error": told.detail}, told.status_code, told.headers)

    async def called(request: Request) -> Response:
        read, field = CALLS[request.url.path], "body"
        try:
            body, field = await request.json(), read.field
            call = await asyncio.get_running_loop().run_in_executor(served.reader, read, served, body)
        except HTTPException:
            raise
        except KeyError as missing:
            raise Refused(field, f"{missing} is missing.") from missing
        except Exception as problem:  # whatever a tokenizer or a template says of it
            raise Refused(field, f"{type(problem).__name__}: {problem}") from problem
        return Answer(answer(served, call), media_type="text/event-stream" if call.stream else "application/json")

    for path in CALLS:
        app.add_api_route(path, called, methods=["POST"], response_model=None)

    @app.get("/v1/models{name:path}")
    def models(name: str) -> dict[str, Any]:
        if name not in ("", "/", f"/{served.name}"):
            raise HTTPException(404, f"there is no model {name[1:]!r} here: {served.name!r} is served.")
        return {"object": "list", "data": [model]} if len(name) < 2 else model

    @app.get("/health")
    def health() -> Response:
        return Response(status_code=200 if served.manager.is_running() else 503)

    @app.get("/metrics")
    def metrics() -> PlainTextResponse:
        lines = []
        for name, value in served.manager.metrics().items():
            kind, end = ("gauge", "") if name.startswith(GAUGES) else ("counter", "_total")
            lines.append(f"# TYPE hf_drafthead_{name}{end} {kind}\nhf_drafthead_{name}{end} {value}\n")
        return PlainTextResponse("".join(lines), media_type="text/plain; version=0.0.4")

    return app


class Server(uvicorn.Server):
    """Ends answers that are not whole within a time, and says so to their clients."""

    def __init__(self, options: Any):
        self.served, most = Served(options), math.ceil(options.stop_within) + LAST_SECONDS
        where = {"host": options.host, "port": options.port, "log_level": options.log_level}
        super().__init__(uvicorn.Config(build(self.served), **where, timeout_graceful_shutdown=most))

    async def shutdown(self, sockets: Any = None) -> None:
        asyncio.get_running_loop().call_later(self.served.options.stop_within, self.served.stop)
        await super().shutdown(sockets)
