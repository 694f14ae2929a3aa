"""Answers from an OpenAI-compatible endpoint (`/v1/chat/completions`): a served target, asked by several threads."""

import json
import os
import queue
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from .regenerate import Answer, AnswerSettings, Prompt, round_seed

LONGEST_WAIT = 60.0
"""Seconds between two tries, at most."""


class EndpointAnswerer:
    """Answers of a served target, `concurrency` at a time. The key in OPENAI_API_KEY, if there is one, is sent along.

    Too many requests (429), server errors (5xx), failed connections and timeouts are tried again, after a wait that
    doubles each time, or as long as the server asks.

    Args:
        url: of the server, with or without `/v1`.
        model: its name there.
        settings: of the answers; `top_k` and `thinking`, which not every server takes, are sent only where set.
        concurrency: requests under way.
        retries: after a first try.
        backoff: seconds before the second try.
        timeout: seconds without a reply.
    """

    def __init__(
        self,
        url: str,
        model: str,
        settings: AnswerSettings,
        concurrency: int = 8,
        retries: int = 6,
        backoff: float = 1.0,
        timeout: float = 600.0,
    ):
        if not url.startswith(("http://", "https://")) or concurrency < 1 or retries < 0:
            raise ValueError(
                f"endpoint {url!r}, concurrency {concurrency}, retries {retries}: expected an http(s) address, "
                "at least 1 and at least 0"
            )
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self.concurrency, self.retries, self.backoff, self.timeout = concurrency, retries, backoff, timeout
        # Not the address: the same model may be served elsewhere when a run goes on.
        self.record = {"backend": "endpoint", "target": model, **asdict(settings)}
        self.body: dict[str, Any] = {
            "model": model,
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
        }
        if settings.top_k:
            self.body["top_k"] = settings.top_k
        if settings.thinking is not None:
            self.body["chat_template_kwargs"] = {"enable_thinking": settings.thinking}

    def batches(self, prompts: dict[str, Prompt]) -> list[list[str]]:
        """One prompt each: the server does its own batching."""
        return [[key] for key in prompts]

    def answers(self, prompts: dict[str, Prompt], batches: list[list[str]]) -> Iterator[Answer]:
        """
        Raises:
            ValueError: for a request that the server refuses, or a reply of another form.
            ConnectionError: when the last try failed.
        """
        tasks, results, stop = queue.SimpleQueue(), queue.SimpleQueue(), threading.Event()
        for (key,) in batches:
            tasks.put(key)

        def work():
            while not stop.is_set():
                try:
                    key = tasks.get_nowait()
                except queue.Empty:
                    return
                try:
                    results.put(self._answer(key, prompts[key], stop))
                except Exception as error:  # raised again below, in the thread that the caller sees
                    results.put(error)

        # Daemons, which do not keep an interrupted process alive until the server has replied.
        for _ in range(min(self.concurrency, len(batches))):
            threading.Thread(target=work, daemon=True).start()
        try:
            for _ in batches:
                result = results.get()
                if isinstance(result, Exception):
                    raise result
                yield result
        finally:
            stop.set()

    def _answer(self, key: str, prompt: Prompt, stop: threading.Event) -> Answer:
        chat, tokens = [], 0
        for number, messages in enumerate(prompt.rounds()):
            chat += messages
            place = f"{self.url}, row {prompt.index} of {prompt.source}"
            reply = self._post(self.body | {"messages": chat, "seed": round_seed(key, number)}, place, stop)
            answer, count = _read_completion(reply, place)
            chat.append(answer)
            tokens += count
        return Answer(key, {"messages": chat}, tokens)

    def _post(self, body: dict[str, Any], place: str, stop: threading.Event) -> bytes:
        headers = {"Content-Type": "application/json"}
        if os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {os.environ['OPENAI_API_KEY']}"
        request = Request(self.url, json.dumps(body).encode(), headers)
        for attempt in range(self.retries + 1):
            wait = self.backoff * 2**attempt
            try:
                with urlopen(request, timeout=self.timeout) as reply:
                    return reply.read()
            except HTTPError as error:
                said = f"{error.code} {error.read(300).decode(errors='replace')}"
                if error.code != 429 and error.code < 500:
                    raise ValueError(f"{place}: {said}, expected a chat completion") from error
                asked = error.headers.get("Retry-After", "")
                problem, wait = said, max(wait, float(asked)) if asked.isdigit() else wait
            except (OSError, HTTPException) as error:
                problem = repr(error)
            if attempt < self.retries and stop.wait(min(wait, LONGEST_WAIT)):
                break
        raise ConnectionError(f"{place}: {problem} at try {attempt + 1} of {self.retries + 1}")


def _read_completion(reply: bytes, place: str) -> tuple[dict[str, str], int]:
    """The assistant message of a reply, and its tokens where the server counts them, else 0."""
    try:
        said = json.loads(reply)
        message, usage = said["choices"][0]["message"], said.get("usage") or {}
        text, thought = message.get("content"), message.get("reasoning_content") or message.get("reasoning")
        count = usage.get("completion_tokens") or 0
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{place}: {reply[:200]!r}, expected a chat completion") from error
    if thought:  # an answer cut while thinking has no text
        return {"role": "assistant", "content": text or "", "reasoning_content": thought}, count
    if not isinstance(text, str):
        raise ValueError(f"{place}: {reply[:200]!r}, expected a chat completion with text")
    return {"role": "assistant", "content": text}, count
