"""Users for locust: short chats, whole and streamed, and completions; an answer without text is a failure."""

from __future__ import annotations

import json

from locust import HttpUser, constant, task

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


class Talker(HttpUser):
    """Asks again as soon as it has an answer."""

    wait_time = constant(0)

    @task(2)
    def chat(self) -> None:
        body = {"messages": QUESTION, "temperature": 0, "max_tokens": 8}
        with self.client.post("/v1/chat/completions", json=body, catch_response=True) as found:
            if not found.ok or "Paris" not in found.json()["choices"][0]["message"]["content"]:
                found.failure(f"no answer: {found.text[:200]}")

    @task(2)
    def stream(self) -> None:
        body = {"messages": QUESTION, "temperature": 0, "max_tokens": 8, "stream": True}
        with self.client.post(
            "/v1/chat/completions", json=body, stream=True, catch_response=True, name="/v1/chat/completions (stream)"
        ) as found:
            lines = [line.removeprefix(b"data: ") for line in found.iter_lines() if line]
            if not found.ok or lines[-1] != b"[DONE]" or "error" in json.loads(lines[-2]):
                found.failure(f"the stream did not end as it should: {lines[-1:]!r}")

    @task(1)
    def complete(self) -> None:
        body = {"prompt": "One, two, three,", "max_tokens": 4, "temperature": 0}
        with self.client.post("/v1/completions", json=body, catch_response=True) as found:
            if not found.ok or "four" not in found.json()["choices"][0]["text"]:
                found.failure(f"no completion: {found.text[:200]}")
