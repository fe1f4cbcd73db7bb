"""A server on loopback that speaks SGLang's, vLLM's and OpenAI's interfaces, and fails as told.

It runs in a thread of its own, on raw sockets, so that it can also break connections in the middle. Its model
is a pure function: `next_token(context, version)`. A token's log-probability tells the version that drew it:
`check_completion` checks every token and every stamp.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

VOCAB = 64
STOP = 63
FAULTS = (
    "500", "reset", "hang", "truncated", "garbage", "not_http", "foreign_token", "nan", "positive", "short",
    "long", "unknown_finish", "empty",
)  # fmt: skip


def next_token(context: Sequence[int], version: int) -> int:
    """The one token that the model of this version draws after this context."""
    return zlib.crc32(np.array([*context, version], np.int32).tobytes()) % VOCAB


def logprob_of(token: int, version: int) -> float:
    """What the model says of it: the version can be read off."""
    return -(1 + version) - token / 256


def check_completion(
    prompt: Sequence[int], completion, most: int, *, oldest: int = 0, stops: bool = True
) -> None:
    """Asserts that every token is the one that the stamped version draws, and that it ends as it should."""
    context, versions = list(prompt), completion.versions.tolist()
    for token, logprob, version in zip(
        completion.tokens.tolist(), completion.logprobs, versions, strict=True
    ):
        assert token == next_token(context, version)
        assert logprob == np.float32(logprob_of(token, version))
        context.append(token)
    assert versions == sorted(versions)
    assert versions[0] >= oldest
    if not stops:
        assert (completion.stop_reason, len(context)) == ("length", len(prompt) + most)
        return
    stopped = completion.tokens[-1] == STOP
    assert completion.stop_reason == ("stop" if stopped else "length")
    assert stopped or len(completion.tokens) == most
    assert STOP not in completion.tokens[:-1]


class FakeServer:
    """See the module. Attributes that begin a test's script may be set at any time.

    Attributes:
      tick: seconds per token.
      faults: what happens to the next generations, in order; None for nothing.
      fault_rate: the chance of any of `FAULTS` when `faults` is empty.
      refusals: how many times loading weights fails.
      reports: whether it knows versions of weights.
      answer: makes a choice from a call's body, instead of the model; for `/v1/` only.
      usage: goes along with it.
      requests: (path, body, headers) of every call so far.
      answered: request id of every generation that was answered well.
      running, most_running: generations now, and at most.
      drawn: tokens so far.
      overlaps: generations that ran while weights were loaded.
    """

    def __init__(self, *, version: int = 0, tick: float = 0.0, seed: int = 0):
        self.tick = tick
        self.faults: deque[str | None] = deque()
        self.fault_rate, self.refusals, self.overlaps = 0.0, 0, 0
        self.reports, self.healthy = True, True
        self.answer: Callable[[dict], dict] | None = None
        self.usage: dict | None = None
        self.requests: list[tuple[str, dict, dict[str, str]]] = []
        self.answered: list[str] = []
        self.running = self.most_running = self.drawn = 0
        self.disconnects = 0
        self._first_version = self.version = version
        self._reported: str = "default"
        self._rng = random.Random(seed)
        self._aborts = 0
        self._port = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task] = set()  # of every connection
        self._handlers: set[asyncio.Task] = set()  # those that hold a writer, and close it when cancelled
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._in_loop(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listens, on the same port as before, with the weights it was first started with."""
        self._alive = True
        self.version, self._reported = self._first_version, "default"
        self._in_loop(self._listen())

    def kill(self) -> None:
        """Stops listening and breaks every connection."""

        async def stop() -> None:
            if self._alive:
                self._loop.remove_reader(self._listener)
                self._listener.close()
            self._alive = False
            for writer in list(self._writers):
                writer.transport.abort()
            await asyncio.sleep(0.01)  # connections on their way in find nobody

        self._in_loop(stop())

    def calls_to(self, path: str) -> list[dict]:
        return [body for called, body, _ in self.requests if called.split("?")[0] == path]

    def _in_loop(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _end(self) -> None:
        """Returns when nothing is left: a connection that is just being accepted must be closed too."""
        while self._tasks:
            for handler in self._handlers:
                handler.cancel()
            await asyncio.wait(self._tasks, timeout=0.05)
        await asyncio.sleep(0.01)  # closed transports report it

    async def _listen(self) -> None:
        """Accepts by hand: an `asyncio.Server` that closes forgets connections that it has just accepted."""
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._listener.setblocking(False)
        self._port = self._listener.getsockname()[1]
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the caller has gone already
            connection, _ = self._listener.accept()
            self._tasks.add(task := self._loop.create_task(self._serve(connection)))
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        """One call per connection."""
        reader, writer = await asyncio.open_connection(sock=connection)
        self._writers.add(writer)
        handler = asyncio.current_task()
        self._handlers.add(handler)
        if not self._alive:
            writer.transport.abort()
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            method, path, _ = head.split("\r\n")[0].split(" ")
            headers = {name.lower(): value for name, value in re.findall(r"\n([\w-]+): (.*)\r", head)}
            data = await reader.readexactly(int(headers.get("content-length", 0)))
            body = json.loads(data) if data else {}
            self.requests.append((path, body, headers))
            gone = asyncio.ensure_future(reader.read(1))
            answer = asyncio.ensure_future(self._answer(method, path, body, writer))
            try:
                await asyncio.wait((gone, answer), return_when=asyncio.FIRST_COMPLETED)
                if answer.done():
                    answer.result()
                else:
                    self.disconnects += 1
            finally:
                gone.cancel()
                answer.cancel()
                await asyncio.gather(gone, answer, return_exceptions=True)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            self._handlers.discard(handler)
            writer.close()

    async def _answer(self, method: str, path: str, body: dict, writer: asyncio.StreamWriter) -> None:
        path = path.split("?")[0]
        if path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            await self._generation(path, body, writer)
            return
        status, answer = await self._control(method, path, body)
        await _send(writer, status, answer)

    async def _control(self, method: str, path: str, body: dict) -> tuple[int, object]:
        if path in ("/health", "/v1/models"):
            return (200, "") if self.healthy else (503, "starting")
        if path in ("/abort_request", "/pause"):
            self._aborts += 1
            return 200, {}
        if path in ("/resume", "/flush_cache", "/reset_prefix_cache"):
            return 200, ""
        if path == "/update_weights_from_disk":
            good = await self._load(Path(body["model_path"]))
            if good:
                self._reported = body["weight_version"]
            return (200 if good else 400), {"success": good, "message": "loaded" if good else "no"}
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            good = await self._load(Path(body["kwargs"]["weights_path"]))
            return (200 if good else 500), {"results": [None]}
        if path == "/update_weight_version" and self.reports:
            self._reported = body["new_version"]
            return 200, {"success": True}
        if path in ("/model_info", "/weight_info") and self.reports:
            return 200, {"model_path": "somewhere", "weight_version": self._reported}
        if path == "/get_model_info":
            return 200, {"model_path": "somewhere"}
        return 404, {"detail": f"no {path} here"}

    async def _load(self, folder: Path) -> bool:
        self.overlaps += self.running
        await asyncio.sleep(self.tick)
        self.overlaps += self.running
        if self.refusals:
            self.refusals -= 1
            return False
        assert {"config.json", "model.safetensors"} <= {path.name for path in folder.iterdir()}
        self.version = int(folder.name.removeprefix("version-"))
        return True

    async def _generation(self, path: str, body: dict, writer: asyncio.StreamWriter) -> None:
        fault = self._next_fault()
        if fault == "500":
            await _send(writer, 500, {"error": "out of luck"})
        elif fault == "reset":
            writer.transport.abort()
        elif fault == "hang":
            await asyncio.Event().wait()
        elif fault == "not_http":
            writer.write(b"220 ready\r\n\r\n")
            await writer.drain()
        elif fault == "garbage":
            await _send(writer, 200, "<html>not json</html>")
        else:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            try:
                answer = await (self._sglang if path == "/generate" else self._completions)(body, fault)
            finally:
                self.running -= 1
            if fault is None:
                self.answered.append(body.get("rid", ""))
            await _send(writer, 200, answer, part=fault == "truncated")

    def _next_fault(self) -> str | None:
        if self.faults:
            return self.faults.popleft()
        return self._rng.choice(FAULTS) if self._rng.random() < self.fault_rate else None

    async def _draw(self, prompt: list[int], most: int, stops: list[int]) -> tuple[list[int], str]:
        tokens: list[int] = []
        aborts = self._aborts
        while len(tokens) < most:
            if self.tick:
                await asyncio.sleep(self.tick)
            if self._aborts != aborts:
                return tokens, "abort"
            tokens.append(next_token([*prompt, *tokens], self.version))
            self.drawn += 1
            if tokens[-1] in stops:
                return tokens, "stop"
        return tokens, "length"

    async def _sampled(
        self, prompt: list[int], most: int, stops: list[int], fault: str | None
    ) -> tuple[list, list, str]:
        tokens, finish = await self._draw(prompt, most, stops)
        logprobs = [logprob_of(token, self.version) for token in tokens]
        if fault == "foreign_token":
            tokens[-1:] = [VOCAB]
        elif fault == "nan":
            logprobs[-1:] = [float("nan")]
        elif fault == "positive":
            logprobs[-1:] = [0.5]
        elif fault == "long":
            tokens, logprobs, finish = [1] * (most + 1), [-1.0] * (most + 1), "length"
        elif fault == "unknown_finish":
            finish = "tired"
        elif fault == "empty":
            tokens, logprobs, finish = [], [], "length"
        elif fault == "short":
            logprobs = logprobs[:-1]
        return tokens, logprobs, finish

    async def _sglang(self, body: dict, fault: str | None) -> dict:
        params = body["sampling_params"]
        tokens, logprobs, finish = await self._sampled(
            body["input_ids"], params["max_new_tokens"], params["stop_token_ids"], fault
        )
        reason = {"type": finish} | ({"matched": tokens[-1]} if finish == "stop" else {})
        entries = [[logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=False)]
        meta = {"id": body["rid"], "finish_reason": reason, "output_token_logprobs": entries}
        if self.reports:
            meta["weight_version"] = self._reported
        return {"text": "", "output_ids": tokens, "meta_info": meta}

    def _said(self, body: dict) -> dict:
        answer = {"choices": [{"index": 0, **self.answer(body)}]}
        return answer if self.usage is None else answer | {"usage": self.usage}

    async def _completions(self, body: dict, fault: str | None) -> dict:
        if self.answer is not None:
            return self._said(body)
        tokens, logprobs, finish = await self._sampled(
            body["prompt"], body["max_tokens"], body["stop_token_ids"], fault
        )
        choice = {
            "index": 0,
            "text": "",
            "finish_reason": finish,
            "stop_reason": tokens[-1] if finish == "stop" else None,
            "prompt_token_ids": body["prompt"],
            "token_ids": tokens,
            "logprobs": {"tokens": [f"token_id:{token}" for token in tokens], "token_logprobs": logprobs},
        }
        return {"choices": [choice]}


async def _send(writer: asyncio.StreamWriter, status: int, answer: object, *, part: bool = False) -> None:
    data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
    head = f"HTTP/1.1 {status} -\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    if part:
        writer.write(head.encode() + data[: len(data) // 2])
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.transport.abort()
        return
    writer.write(head.encode() + data)
    await writer.drain()


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Returns when the condition holds; fails after a time that no quiet machine needs."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
