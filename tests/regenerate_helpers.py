"""Prompts, a tokenizer with a chat template, and a stub of a chat server."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from generation_helpers import character_tokenizer

from dspark_hf.training import read_prompts

TEMPLATE = """{% for m in messages %}{% if m.role == 'assistant' %} A{% endif %}{{ m.content }}{% endfor %}{%
if enable_thinking is defined %}{{ '+' if enable_thinking else '-' }}{% endif %}{%
if add_generation_prompt %} A{% endif %}"""
TEXTS = ("Tom has 3 boxes.", "How many?", "A train goes 60 miles in", "Ann", "5 + 7")
DIALOGUES = [
    {"turns": ["Tom has 3 boxes.", "How many?", "Why?"]},
    {"turns": ["Ann"]},
    {"messages": [{"role": "system", "content": "Sum. "}, {"role": "user", "content": "5 + 7"},
                  {"role": "assistant", "content": "not the target's"}, {"role": "user", "content": "Sure?"}]},
]  # fmt: skip


def tokenizer(template=TEMPLATE):
    result = character_tokenizer()
    result.chat_template = template
    return result


def prompts(tmp_path, *rows, name="prompts.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows or [{"turns": [text]} for text in TEXTS]))
    return read_prompts([path])


def rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


class Server:
    """A chat endpoint that answers with the last message reversed. `failures` are served first: a status, a status with
    the seconds after which to ask again, "drop" (the connection) or "wait" (too long); `refuses` says 400 to it always.
    """

    def __init__(self, failures=(), refuses=None, together=None, message=None):
        self.failures, self.refuses, self.message = list(failures), refuses, message
        self.barrier = threading.Barrier(together) if together else None
        self.requests, self.lock, self.under_way, self.most = [], threading.Lock(), 0, 0
        self.released = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    server.requests.append((self.path, self.headers["Authorization"], body))
                    server.under_way += 1
                    server.most = max(server.most, server.under_way)
                    failure = server.failures.pop(0) if server.failures else None
                try:
                    self.reply(body, failure)
                finally:
                    with server.lock:
                        server.under_way -= 1

            def reply(self, body, failure):
                text = body["messages"][-1]["content"]
                if text == server.refuses:
                    failure = 400
                if failure == "drop":
                    self.close_connection = True
                    return
                if failure == "wait":
                    server.released.wait(10)
                    return
                status, after = failure if isinstance(failure, tuple) else (failure or 200, None)
                if server.barrier:
                    server.barrier.wait(timeout=10)
                message = server.message or {"role": "assistant", "content": text[::-1]}
                reply = {"choices": [{"message": message}], "usage": {"completion_tokens": len(text)}}
                content = json.dumps(reply if status == 200 else {"error": "not now"}).encode()
                self.send_response(status)
                if after:
                    self.send_header("Retry-After", after)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.released.set()
        self.http.shutdown()
        self.http.server_close()
