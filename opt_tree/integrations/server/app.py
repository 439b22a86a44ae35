"""The routes: OpenAI's chat completions, completions and list of models, over a `Service`.

Owns the way between the event loop and the engine's thread, and that a client which goes away ends its work.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException

from opt_tree.errors import one_line
from opt_tree.generation import Generation
from opt_tree.integrations.server.engine import Full, Job, NewText
from opt_tree.integrations.server.replies import Json, Reply, problem
from opt_tree.integrations.server.requests import BaseRequest, Chat, Completion, Refused, first_mistake
from opt_tree.integrations.server.service import Service

BODY = 1 << 20
"""Bytes of a request at most."""


def new_app(service: Service) -> FastAPI:
    """Make the app of a service. Its engine ends with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.engine.close)

    app = FastAPI(title="opt-tree serve", lifespan=lifespan, max_body_size=BODY)

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return JSONResponse(problem(error), error.status, {"Retry-After": "1"} if error.status == 429 else None)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return await refused(request, first_mistake(error.errors()))

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        return await refused(request, Refused(error.status_code, str(error.detail)))

    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [_described(service)]}

    @app.post("/v1/chat/completions")
    async def chat(asked: Chat, request: Request) -> Response:
        return await _answer(service, asked, request)

    @app.post("/v1/completions")
    async def completions(asked: Completion, request: Request) -> Response:
        return await _answer(service, asked, request)

    return app


def _described(service: Service) -> Json:
    """The one model, and what a request of it may name."""
    limits = service.limits
    own = {
        "drafters": [*service.drafters],
        "tree": limits.tree.model_dump(),
        "max_nodes": limits.nodes,
        "max_new_tokens": limits.new_tokens,
        "context": service.context,
        "under_way": service.engine.open,
    }
    return {"id": service.name, "object": "model", "created": int(time.time()), "owned_by": "opt_tree", "opt_tree": own}


async def _answer(service: Service, asked: BaseRequest, request: Request) -> Response:
    """Have a request answered, whole or as a stream."""
    jobs = service.jobs(asked)
    told: asyncio.Queue[Any] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for index, job in enumerate(jobs):
        job.tell = partial(_tell, loop, told, index)
    try:
        service.engine.submit(jobs)
    except Full as error:
        raise Refused(429, str(error), code="queue_full") from error
    reply = Reply(service, jobs, isinstance(asked, Chat))
    if asked.stream:
        usage = asked.stream_options is not None and asked.stream_options.include_usage
        left_behind = BackgroundTask(service.engine.cancel, jobs)  # by a client that left before the first event
        events = _events(service, jobs, reply, told, usage)
        return StreamingResponse(events, media_type="text/event-stream", background=left_behind)
    finished, left = asyncio.ensure_future(_finish(reply, told)), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((finished, left), return_when=asyncio.FIRST_COMPLETED)
        if not finished.done():
            return Response(status_code=499)  # nobody reads it
        finished.result()
        return JSONResponse(reply.whole())
    finally:
        service.engine.cancel(jobs)
        for task in (finished, left):
            task.cancel()


def _tell(loop: asyncio.AbstractEventLoop, told: asyncio.Queue[Any], index: int, what: Any) -> None:
    """Hand something over from the engine's thread."""
    loop.call_soon_threadsafe(told.put_nowait, (index, what))


async def _pieces(reply: Reply, told: asyncio.Queue[Any]) -> AsyncIterator[Json]:
    """The pieces of all choices as they come, until all are over. Raises Refused for an error of the engine's."""
    while any(choice.generation is None for choice in reply.choices):
        index, what = await told.get()
        if not isinstance(what, (NewText, Generation)):
            raise Refused(500, one_line(what)) from what
        if (piece := reply.choices[index].take(what)) is not None:
            yield piece


async def _finish(reply: Reply, told: asyncio.Queue[Any]) -> None:
    async for _ in _pieces(reply, told):
        pass


async def _left(request: Request) -> None:
    """Wait until the client has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(
    service: Service, jobs: Sequence[Job], reply: Reply, told: asyncio.Queue[Any], usage: bool
) -> AsyncIterator[str]:
    """A reply as server-sent events. Where the client goes away, the server closes this, and the jobs end."""
    try:
        if (opening := reply.opening()) is not None:
            yield _event(opening)
        async for piece in _pieces(reply, told):
            yield _event(reply.chunk([piece]))
        if usage:
            yield _event(reply.chunk([], reply.usage()))
        yield "data: [DONE]\n\n"
    except Refused as error:
        yield _event(problem(error))
    finally:
        service.engine.cancel([*jobs])


def _event(what: Json) -> str:
    return f"data: {json.dumps(what, ensure_ascii=False)}\n\n"
