"""A web service with FastAPI in front of a mesh: replicas of a model, each in its own process.

The model continues a text word by word, with the words of the founding documents of the United
States. A request goes to the replica that has the least to do.

    python examples/fastapi_service.py --replicas 2
    curl 'http://127.0.0.1:8000/complete?prompt=We+the+people&words=20'
    curl -N 'http://127.0.0.1:8000/stream?prompt=We+the+people&words=20&pause=0.2'

- A request that takes longer than --timeout is answered 504, and the replica is free again.
- A supervisor replaces a replica that is lost. Its requests are sent to another one, --tries times
  in all; then they are answered 503. A stream that has begun ends with an error line.
- A client that closes its connection ends the work on its stream.
- Ctrl-C and SIGTERM let the requests under way end, and stop the replicas.

Needs fastapi and uvicorn: pip install 'pymonarch[fastapi]'
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

try:
    import uvicorn
    from fastapi import FastAPI, HTTPException, Query
    from fastapi.responses import StreamingResponse
except ImportError as missing:
    sys.exit(f"{missing}. Try: pip install 'pymonarch[fastapi]'")

from monarch.actor import Actor, Future, Port, SupervisionError, Supervisor, endpoint, this_host
from monarch.recipes import ActorPool, stream

TEXT = Path(__file__).parent / "data" / "founding_documents.txt"
GRACE = 5  # seconds that requests under way may take at the end

T = TypeVar("T")
Prompt = Annotated[str, Query(min_length=1, max_length=1000)]
Words = Annotated[int, Query(ge=0, le=1000)]
Pause = Annotated[float, Query(ge=0, le=10)]


class Model(Actor):
    """Continues a text: each word follows the one before it somewhere in the founding documents."""

    def __init__(self) -> None:
        words = TEXT.read_text(encoding="ascii").split()
        self.following: defaultdict[str, list[str]] = defaultdict(list)
        for word, following in itertools.pairwise(words):
            self.following[word].append(following)
        self.words = words

    async def continued(self, prompt: str, words: int, pause: float) -> AsyncIterator[str]:
        chance = random.Random(prompt)
        word = (prompt.split() or self.words)[-1]
        for _ in range(words):
            word = chance.choice(self.following.get(word) or self.words)
            await asyncio.sleep(pause)  # a large model takes its time for each word
            yield word

    @endpoint
    async def complete(self, prompt: str, words: int, pause: float) -> dict[str, Any]:
        text = [word async for word in self.continued(prompt, words, pause)]
        return {"text": " ".join([prompt, *text]), "pid": os.getpid()}

    @endpoint
    async def send(self, port: Port[str], prompt: str, words: int, pause: float) -> int:
        async for word in self.continued(prompt, words, pause):
            port.send(word)
        return os.getpid()


def create_app(replicas: int = 2, timeout: float = 10.0, tries: int = 3) -> FastAPI:
    """Return the service; `uvicorn --factory` calls this as well."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with this_host().spawn_procs({"replicas": replicas}) as procs:
            app.state.supervisor = Supervisor(max_restarts=10, within=60)
            app.state.pool = ActorPool(app.state.supervisor.spawn(procs, "models", Model))
            yield

    app = FastAPI(title="Founding documents", lifespan=lifespan)

    async def answer(call: Callable[[Any], Future[T]]) -> T:
        """Return the answer of a replica; another one gets the call if the first is lost."""
        for attempt in range(tries):
            future = app.state.pool.submit(call)
            try:
                return await future
            except SupervisionError:
                # Calls to replicas that are down fail at once.
                if attempt == tries - 2:  # the last try follows
                    with contextlib.suppress(SupervisionError):  # the supervisor has given up
                        await app.state.supervisor.healthy
            finally:
                future.cancel()  # if it has not come, its replica need not go on
        raise HTTPException(503, "the replicas were lost", {"Retry-After": "1"})

    @app.get("/complete")
    async def complete(prompt: Prompt, words: Words = 20, pause: Pause = 0.0) -> dict[str, Any]:
        call = answer(lambda model: model.complete.call_one(prompt, words, pause))
        try:
            return await asyncio.wait_for(call, timeout)
        except asyncio.TimeoutError:
            raise HTTPException(504, f"no answer within {timeout:g} s") from None

    @app.get("/stream")
    async def streamed(prompt: Prompt, words: Words = 20, pause: Pause = 0.0) -> StreamingResponse:
        def call(port: Port[str]) -> Future[int]:
            pool: ActorPool[Model] = app.state.pool
            return pool.submit(lambda model: model.send.call_one(port, prompt, words, pause))

        lines = lines_of(stream(call, timeout=timeout))
        return StreamingResponse(lines, media_type="application/x-ndjson")

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"requests under way, by replica": app.state.pool.loads}

    return app


async def lines_of(words: stream[str]) -> AsyncIterator[str]:
    """Yield a line of JSON for each word, and one for the end."""
    try:
        async for word in words:
            yield json.dumps({"word": word}) + "\n"
        yield json.dumps({"pid": await words.call}) + "\n"
    except SupervisionError:
        yield json.dumps({"error": "the replica was lost"}) + "\n"
    except TimeoutError as error:
        yield json.dumps({"error": str(error)}) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve a model by HTTP, from several processes.")
    parser.add_argument("--replicas", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds for an answer (10)")
    parser.add_argument("--tries", type=int, default=3, help="replicas that a request tries (3)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one (default: 8000)")
    args = parser.parse_args()
    if min(args.replicas, args.tries, args.timeout) <= 0:
        parser.error("--replicas, --tries and --timeout must be positive")
    app = create_app(args.replicas, args.timeout, args.tries)
    uvicorn.run(app, host=args.host, port=args.port, timeout_graceful_shutdown=GRACE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
