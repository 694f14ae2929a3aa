"""Prompts answered through a stub of an OpenAI-compatible server: retries, concurrency, what comes back."""

import time

import pytest
from regenerate_helpers import DIALOGUES, TEXTS, Server, prompts, rows

from dspark_hf.training import AnswerSettings, EndpointAnswerer, regenerate_answers


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def client(server, settings=None, **options):
    return EndpointAnswerer(server.url, "tiny", settings or AnswerSettings(), **{"backoff": 0.01} | options)


def test_endpoint_answers_after_failures(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    path, settings = tmp_path / "answers.jsonl", AnswerSettings(64, 0.5, 0.9, 20, thinking=False)
    with Server([429, 500, "drop", 503, "wait"]) as server:
        done = regenerate_answers(
            prompts(tmp_path, *DIALOGUES), path, client(server, settings, timeout=0.5, concurrency=2)
        )
    assert len(server.requests) == 5 + 6 and done.answered == 3
    said = {row["index"]: [message["content"] for message in row["messages"]] for row in rows(path)}
    assert said == {
        0: ["Tom has 3 boxes.", ".sexob 3 sah moT", "How many?", "?ynam woH", "Why?", "?yhW"],
        1: ["Ann", "nnA"],
        2: ["Sum. ", "5 + 7", "7 + 5", "Sure?", "?eruS"],
    }
    assert done.tokens == sum(len(text) for text in ["Tom has 3 boxes.", "How many?", "Why?", "Ann", "5 + 7", "Sure?"])
    for where, authorization, body in server.requests:
        assert where == "/v1/chat/completions" and authorization == "Bearer secret"
        asked = {key: value for key, value in body.items() if key not in ("messages", "seed")}
        assert asked == {"model": "tiny", "max_tokens": 64, "temperature": 0.5, "top_p": 0.9, "top_k": 20,
                         "chat_template_kwargs": {"enable_thinking": False}}  # fmt: skip
    histories = {tuple(m["content"] for m in body["messages"]): body["seed"] for _, _, body in server.requests}
    assert len(histories) == len(set(histories.values())) == 6
    assert ("Sum. ", "5 + 7", "7 + 5", "Sure?") in histories


def test_endpoint_settings_left_out(tmp_path):
    with Server() as server:
        regenerate_answers(
            prompts(tmp_path)[:1], tmp_path / "a", EndpointAnswerer(server.url + "/v1/", "tiny", AnswerSettings())
        )
    ((where, authorization, body),) = server.requests
    assert where == "/v1/chat/completions" and authorization is None
    assert body.keys() == {"model", "messages", "max_tokens", "temperature", "top_p", "seed"}


def test_endpoint_is_asked_by_several_threads(tmp_path):
    """The server replies only when three requests have come together, and never sees more."""
    with Server(together=3) as server:
        asked = prompts(tmp_path, *({"turns": [str(i)]} for i in range(9)))
        regenerate_answers(asked, tmp_path / "a", client(server, concurrency=3))
    assert server.most == 3 and len(rows(tmp_path / "a")) == 9


def test_waits_grow(tmp_path):
    with Server([500, 500, 500]) as server:
        start = time.monotonic()
        regenerate_answers(prompts(tmp_path)[:1], tmp_path / "a", client(server, backoff=0.1))
        assert time.monotonic() - start > 0.7
    with Server([(429, "1")]) as server:
        start = time.monotonic()
        regenerate_answers(prompts(tmp_path)[:1], tmp_path / "b", client(server))
        assert time.monotonic() - start > 1


def test_endpoint_gives_up_and_goes_on_later(tmp_path):
    path, given = tmp_path / "answers.jsonl", prompts(tmp_path)
    with Server(refuses=TEXTS[2]) as server:
        with pytest.raises(ValueError, match=r"row 2 of prompts\.jsonl: 400 .*not now"):
            regenerate_answers(given, path, client(server, concurrency=1))
        assert len(server.requests) == 3
    with Server([500] * 20) as server:
        with pytest.raises(ConnectionError, match=r"row 2 of prompts\.jsonl: 500 .* at try 3 of 3"):
            regenerate_answers(given, path, client(server, concurrency=1, retries=2))
        assert len(server.requests) == 3
    with pytest.raises(ConnectionError, match="row 2 of .*refused.* at try 1 of 1"):
        regenerate_answers(given, path, client(server, concurrency=1, retries=0))
    assert [row["index"] for row in rows(path)] == [0, 1]
    with Server() as server:
        assert regenerate_answers(given, path, client(server)).present == 2
        assert len(server.requests) == 3
    assert {row["index"] for row in rows(path)} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ({"content": "4", "reasoning_content": "2 + 2"}, {"content": "4", "reasoning_content": "2 + 2"}),
        ({"content": None, "reasoning": "2 + 2"}, {"content": "", "reasoning_content": "2 + 2"}),
        ({"content": ""}, {"content": ""}),
        ({"content": None}, None),
        (["4"], None),
    ],
)
def test_replies_of_other_forms(tmp_path, message, wanted):
    with Server(message=message) as server:
        if wanted is None:
            with pytest.raises(ValueError, match=r"row 0 of prompts\.jsonl: .*expected a chat completion"):
                regenerate_answers(prompts(tmp_path)[:1], tmp_path / "a", client(server))
        else:
            regenerate_answers(prompts(tmp_path)[:1], tmp_path / "a", client(server))
            assert rows(tmp_path / "a")[0]["messages"][1] == {"role": "assistant"} | wanted


@pytest.mark.parametrize(("url", "options"), [("localhost", {}), ("http://a", {"concurrency": 0})])
def test_refused_endpoints(url, options):
    with pytest.raises(ValueError, match="expected an http"):
        EndpointAnswerer(url, "tiny", AnswerSettings(), **options)
