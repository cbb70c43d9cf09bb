"""The gateway over HTTP, with the official client; every engine is scripted."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from infra.errors import UsageError
from infra.inference.renderers.tiny import TinyRenderer
from serving.options import GatewayOptions
from serving.turn import TurnReader
from tests.serving.scripted import ScriptedEngine, ScriptedSource, gateway, one_model, said, text_ids, wait_until

USER: list[Any] = [{"role": "user", "content": "hi"}]
TOOL: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
ENDLESS = said("z" * 5000)


def extra(reply: ChatCompletion | ChatCompletionChunk) -> dict[str, Any]:
    return reply.model_extra or {}


def joined(chunks: list[ChatCompletionChunk], field: str) -> str:
    return "".join(getattr(c.choices[0].delta, field, None) or "" for c in chunks if c.choices)


def test_whole_and_streamed_replies_agree() -> None:
    engine = ScriptedEngine(lambda _: said("twelve bytes", "42 🌍\n\u2028क्षि"))
    with gateway(one_model(engine)) as running:
        create = running.client.chat.completions.create
        whole = create(model="demo", messages=USER, seed=1)
        chunks = list(create(model="demo", messages=USER, seed=1, stream=True, stream_options={"include_usage": True}))
    message = whole.choices[0].message
    assert message.content == "42 🌍\n\u2028क्षि" == joined(chunks, "content")
    assert (message.model_extra or {})["reasoning"] == "twelve bytes" == joined(chunks, "reasoning")
    assert (message.model_extra or {})["reasoning_content"] == "twelve bytes" == joined(chunks, "reasoning_content")
    assert (whole.choices[0].finish_reason, chunks[-2].choices[0].finish_reason) == ("stop", "stop")
    assert [c.choices[0].delta.role for c in chunks if c.choices][:2] == ["assistant", None]
    assert chunks[-1].choices == []
    assert all(c.usage is None for c in chunks[:-1])
    assert whole.usage is not None
    assert whole.usage == chunks[-1].usage
    assert whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens == 12
    assert whole.usage.completion_tokens == len(said("twelve bytes", "42 🌍\n\u2028क्षि"))
    for reply in (whole, chunks[-1]):
        assert extra(reply)["metrics"]["thinking_token_ratio"] == 12 / whole.usage.completion_tokens
        assert extra(reply)["model_version"] == "demo:1"
    assert len({c.id for c in chunks}) == 1


def test_a_stream_without_usage_still_ends_with_its_metrics() -> None:
    with gateway(one_model(ScriptedEngine(lambda _: said(None, "x")))) as running:
        chunks = list(running.client.chat.completions.create(model="demo", messages=USER, stream=True))
        raw = running.chat(stream=True)
    assert all(c.choices and c.usage is None for c in chunks)
    assert extra(chunks[-1])["metrics"]["e2e_latency_ms"] > 0
    assert raw.text.endswith("data: [DONE]\n\n")
    assert raw.text.count("[DONE]") == 1
    assert raw.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_with_the_official_client(stream: bool) -> None:
    calls = said("add them", None, ("add", '{"a":{"b":1}}'))
    engine = ScriptedEngine(lambda prompt: said(None, "2") if len(prompt) > 20 else calls)
    with gateway(one_model(engine)) as running:
        create = running.client.chat.completions.create
        if stream:
            with running.client.chat.completions.stream(model="demo", messages=USER, tools=TOOL) as events:
                for _ in events:
                    pass
                first: Any = events.get_final_completion()
        else:
            first = create(model="demo", messages=USER, tools=TOOL)
        choice = first.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        [call] = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": {"b": 1}})
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "2"}
        second = create(model="demo", messages=[*USER, choice.message, result], tools=TOOL)
    assert second.choices[0].message.content == "2"
    # What the model had sampled comes back as the very same ids.
    start = engine.prompts[0]
    assert engine.prompts[1][: len(start) + len(calls)] == (*start, *calls)


def test_max_tokens_inside_thinking() -> None:
    with gateway(one_model(ScriptedEngine(lambda _: ENDLESS))) as running:
        reply = running.client.chat.completions.create(model="demo", messages=USER, max_tokens=9)
        chunks = list(running.client.chat.completions.create(model="demo", messages=USER, max_tokens=9, stream=True))
    choice = reply.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("length", None)
    assert (choice.message.model_extra or {})["reasoning"] == "z" * 8
    assert reply.usage is not None
    assert reply.usage.completion_tokens_details is not None
    assert (reply.usage.completion_tokens, reply.usage.completion_tokens_details.reasoning_tokens) == (9, 8)
    assert extra(reply)["metrics"]["time_to_first_answer_token_ms"] is None
    assert (joined(chunks, "content"), chunks[-1].choices[0].finish_reason) == ("", "length")


def test_sampling_reaches_the_engine() -> None:
    engine = ScriptedEngine(lambda _: said(None, "x"))
    with gateway(one_model(engine)) as running:
        assert running.chat(temperature=0, top_p=0.5, top_k=7, min_p=0.1, seed=-1, max_tokens=11).status_code == 200
        assert running.chat(top_k=-1).status_code == 200
        assert running.chat(thinking_token_budget=3).status_code == 200
    first, second, third = engine.sampling
    assert (first.temperature, first.top_p, first.top_k, first.min_p) == (0, 0.5, 7, 0.1)
    assert (first.seed, first.max_tokens) == (2**63 - 1, 11)
    assert (second.temperature, second.top_p, second.top_k, second.min_p) == (1, 1, 0, 0)
    assert second.seed != third.seed
    assert second.max_tokens == 256 - len(engine.prompts[1])


def test_a_thinking_budget_is_kept_and_reported() -> None:
    def thinker(prompt: Any) -> list[int]:
        return ENDLESS if len(prompt) < 8 else [*text_ids("ok"), said(None, "")[-1]]

    with gateway(one_model(ScriptedEngine(thinker))) as running:
        reply = running.chat(thinking_token_budget=5, max_tokens=50).json()
        assert running.metric("senmon_thinking_budget_exhausted_total", domain="demo") == 1
    assert reply["choices"][0]["message"]["content"] == "ok"
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
    figures = reply["metrics"]
    assert (figures["thinking_token_budget"], figures["thinking_budget_exhausted"]) == (5, True)


def test_a_malformed_turn_is_marked() -> None:
    end = said(None, "")[-1]
    with gateway(one_model(ScriptedEngine(lambda _: [*text_ids("no block"), end]))) as running:
        choice = running.chat().json()["choices"][0]
        assert running.metric("senmon_malformed_turns_total", domain="demo") == 1
    assert (choice["finish_reason"], choice["code"], choice["message"]["content"]) == ("stop", "malformed_turn", "")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(stream: bool) -> None:
    engine = ScriptedEngine(lambda _: ENDLESS, step_s=0.05)
    body = json.dumps({"model": "demo", "messages": USER, "stream": stream, "max_tokens": 200}).encode()
    head = POST + f"Content-Length: {len(body)}\r\n\r\n".encode()
    with gateway(one_model(engine)) as running:
        port = int(running.url.split(":")[2].split("/")[0])
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(head + body)
            wait_until(lambda: engine.produced >= 3)
            assert running.metric("senmon_requests_in_flight", domain="demo") == 1
        left = time.monotonic()
        wait_until(lambda: engine.open == 0, seconds=1)
        assert time.monotonic() - left < 1
        assert engine.produced <= 10
        wait_until(lambda: running.metric("senmon_requests_total", outcome="client_closed", domain="demo") == 1)
        assert running.metric("senmon_requests_in_flight", domain="demo") == 0
        assert 3 <= running.metric("senmon_output_tokens_total", domain="demo") <= 10
        assert running.chat(max_tokens=1).status_code == 200


def test_a_client_that_leaves_the_queue_never_reaches_the_engine() -> None:
    engine = ScriptedEngine(lambda _: ENDLESS, step_s=0.01)
    with gateway(one_model(engine), GatewayOptions(poll_s=0.05, max_running=1)) as running:
        with running.client.chat.completions.create(model="demo", messages=USER, stream=True) as stream:
            next(iter(stream))
            with pytest.raises(openai.APITimeoutError):
                running.client.chat.completions.create(model="demo", messages=USER, timeout=0.2)
            wait_until(lambda: running.metric("senmon_requests_in_flight") == 1)
        wait_until(lambda: engine.open == 0)
    assert len(engine.prompts) == 1


def test_a_spent_latency_budget_cuts_the_turn() -> None:
    engine = ScriptedEngine(lambda _: ENDLESS, step_s=0.02)
    with gateway(one_model(engine)) as running:
        create = running.client.chat.completions.create
        headers = {"x-latency-budget-ms": "200"}
        reply = create(model="demo", messages=USER, extra_headers=headers)
        chunks = list(create(model="demo", messages=USER, extra_headers=headers, stream=True))
        wait_until(lambda: engine.open == 0)
        assert running.metric("senmon_latency_budget_requests_total", outcome="missed") == 2
        assert running.metric("senmon_requests_total", outcome="budget") == 2
    for choice in (reply.choices[0], chunks[-1].choices[0]):
        assert (choice.finish_reason, (choice.model_extra or {})["code"]) == ("length", "latency_budget_exceeded")
    figures = extra(reply)["metrics"]
    assert (figures["latency_budget_ms"], figures["latency_budget_met"]) == (200, False)
    assert 200 <= figures["e2e_latency_ms"] < 600


def test_a_budget_spent_before_the_first_token_is_504() -> None:
    engine = ScriptedEngine(lambda _: ENDLESS, step_s=0.4)
    with gateway(one_model(engine)) as running:
        whole = running.http.post(
            "/v1/chat/completions", json={"model": "demo", "messages": USER}, headers={"x-latency-budget-ms": "50"}
        )
        with pytest.raises(openai.APIError, match="latency budget"):
            list(
                running.client.chat.completions.create(
                    model="demo", messages=USER, stream=True, extra_headers={"x-latency-budget-ms": "50"}
                )
            )
        for text in ("0", "-1", "soon", "nan", "inf"):
            refused = running.http.post("/v1/chat/completions", json={}, headers={"x-latency-budget-ms": text})
            assert refused.status_code == 400
    assert (whole.status_code, whole.json()["error"]["code"]) == (504, "latency_budget_exceeded")


def test_a_met_budget_is_counted() -> None:
    with gateway(one_model(ScriptedEngine(lambda _: said(None, "x")))) as running:
        reply = running.client.chat.completions.create(
            model="demo", messages=USER, extra_headers={"x-latency-budget-ms": "10000"}
        )
        assert running.metric("senmon_latency_budget_requests_total", outcome="met") == 1
    assert extra(reply)["metrics"]["latency_budget_met"] is True


def test_a_model_switch_drops_no_request() -> None:
    def says(version: int) -> ScriptedEngine:
        return ScriptedEngine(lambda _: said("z" * 40, f"version {version}"), step_s=0.002)

    engines = {("demo", version): says(version) for version in (1, 2)}
    models = ScriptedSource(engines, {("demo", "production"): 1})
    seen: list[str] = []
    with gateway(models) as running:
        stop = threading.Event()

        def keep_asking() -> None:
            while not stop.is_set():
                reply = running.client.chat.completions.create(model="demo", messages=USER)
                seen.append(reply.choices[0].message.content or "")

        askers = [threading.Thread(target=keep_asking) for _ in range(4)]
        for asker in askers:
            asker.start()
        wait_until(lambda: len(seen) > 8)
        models.stages["demo", "production"] = 2
        wait_until(lambda: seen[-1] == "version 2", seconds=10)
        stop.set()
        for asker in askers:
            asker.join()
        assert running.metric("senmon_requests_total", outcome="ok") == len(seen)
        assert running.metric("senmon_model_loaded", model_version="1") == 0
    assert set(seen) == {"version 1", "version 2"}


def test_a_failing_engine_is_an_error_in_both_forms() -> None:
    engine = ScriptedEngine(lambda _: said(None, "x"))

    def explode() -> None:
        raise RuntimeError("device lost")

    with gateway(one_model(engine), GatewayOptions(poll_s=3600)) as running:
        engine.before_step = explode
        with pytest.raises(openai.APIError) as caught:
            list(running.client.chat.completions.create(model="demo", messages=USER, stream=True))
        assert "device lost" not in str(caught.value)
        wait_until(lambda: running.http.get("/readyz").status_code == 503)
        assert running.chat().status_code == 503
        assert running.metric("senmon_requests_total", outcome="engine_failed") == 1


def test_capacity_is_503_with_retry_after() -> None:
    engine = ScriptedEngine(lambda _: ENDLESS, step_s=0.01)
    with gateway(one_model(engine), GatewayOptions(poll_s=0.05, max_running=1, max_waiting=0)) as running:
        with running.client.chat.completions.create(model="demo", messages=USER, stream=True) as stream:
            next(iter(stream))
            refused = running.chat(stream=True)
        assert running.metric("senmon_admission_rejections_total", reason="engine_overloaded") == 1
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.headers["content-type"] == "application/json"


def test_errors_have_openais_form() -> None:
    with gateway(one_model(ScriptedEngine(lambda _: said(None, "x"))), GatewayOptions(max_body_bytes=5000)) as running:
        client = running.client
        with pytest.raises(openai.NotFoundError) as unknown:
            client.chat.completions.create(model="nobody", messages=USER)
        with pytest.raises(openai.BadRequestError) as unsupported:
            client.chat.completions.create(model="demo", messages=USER, n=2)
        with pytest.raises(openai.BadRequestError) as too_long:
            client.chat.completions.create(model="demo", messages=USER, max_tokens=500)
        with pytest.raises(openai.BadRequestError) as full:
            client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "x" * 300}])
        plain = running.http.post("/v1/chat/completions", content=b"{}", headers={"content-type": "text/plain"})
        large = running.chat(user="x" * 6000)
        streamed = running.http.post(
            "/v1/chat/completions", content=iter([b"x" * 3000] * 2), headers={"content-type": "application/json"}
        )
        paths = ["/", "/v1", "/docs", "/openapi.json", "/v1/completions", "/v1/chat/completions/", "/V1/Models"]
        missing = [running.http.get(path) for path in paths]
        method = running.http.get("/v1/chat/completions")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    assert (unsupported.value.code, unsupported.value.param) == ("unsupported_parameter", "n")
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "max_completion_tokens")
    assert (full.value.code, full.value.param) == ("context_length_exceeded", "messages")
    assert plain.status_code == 400
    assert [large.status_code, streamed.status_code] == [413, 413]
    assert [reply.status_code for reply in missing] == [404] * len(paths)
    assert method.status_code == 405
    for reply in (plain, large, method, *missing):
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_client_urls_in_the_body_are_never_followed() -> None:
    trap = socket.create_server(("127.0.0.1", 0))
    trap.settimeout(0.2)
    url = f"http://127.0.0.1:{trap.getsockname()[1]}/"
    with trap, gateway(one_model(ScriptedEngine(lambda _: said(None, "x")))) as running:
        assert running.chat(api_base=url).status_code == 400
        assert running.chat(base_url=url).status_code == 400
        with pytest.raises(TimeoutError):
            trap.accept()


def raw_exchange(url: str, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", int(url.split(":")[2].split("/")[0])), timeout=5) as client:
        client.sendall(request)
        received = b""
        while block := client.recv(65536):
            received += block
    return received


@pytest.mark.parametrize(
    "identity",
    [b"abc%0d%0aSet-Cookie: a=b", b"x" * 5000, b"\x1b[31mred", b"a b", b"", "é".encode()],
)
def test_harmful_request_ids_are_replaced(identity: bytes, caplog: pytest.LogCaptureFixture) -> None:
    body = json.dumps({"model": "demo", "messages": USER}).encode()
    with gateway(one_model(ScriptedEngine(lambda _: said(None, "x")))) as running, caplog.at_level(logging.INFO):
        request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        )
        request += b"Content-Length: %d\r\nX-Request-Id: %s\r\n\r\n%s" % (len(body), identity, body)
        head = raw_exchange(running.url, request).split(b"\r\n\r\n")[0].decode().lower()
        ids = [line.split(": ")[1] for line in head.splitlines() if line.startswith("x-request-id:")]
    assert len(ids) == 1
    assert ids[0].startswith("req-")
    assert "set-cookie" not in head
    [line] = [record.getMessage() for record in caplog.records if "chat_completion" in record.getMessage()]
    assert "\n" not in line
    assert json.loads(line)["request_id"] == ids[0]


def test_harmless_request_ids_are_echoed_on_every_reply() -> None:
    with gateway(one_model(ScriptedEngine(lambda _: said(None, "x")))) as running:
        for path in ("/healthz", "/nothing", "/v1/models"):
            assert running.http.get(path, headers={"x-request-id": "run-7.a_B"}).headers["x-request-id"] == "run-7.a_B"


def test_only_known_hosts_are_answered_on_loopback() -> None:
    source = one_model(ScriptedEngine(lambda _: said(None, "x")))
    with gateway(source, allowed_hosts=("127.0.0.1", "localhost", "::1")) as running:
        for host in ("x/health?", "evil.example", "127.0.0.1.evil.example", "evil.example:8000"):
            reply = running.http.get("/v1/models", headers={"host": host})
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_host")
        for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000"):
            assert running.http.get("/v1/models", headers={"host": host}).status_code == 200
        request = b"GET //health/../v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert raw_exchange(running.url, request).startswith(b"HTTP/1.1 404")


def test_models_and_health() -> None:
    models = ScriptedSource({("demo", 3): ScriptedEngine(lambda _: [])}, {("demo", "staging"): 3})
    with gateway(models) as running:
        [card] = running.client.models.list().data
        assert (card.id, card.model_extra) == ("demo", {"model_version": "demo:3"})
        assert running.client.models.retrieve("demo").id == "demo"
        with pytest.raises(openai.NotFoundError):
            running.client.models.retrieve("nobody")
        assert running.http.get("/healthz").json() == {"status": "ok"}
        assert running.http.get("/readyz").json() == {"status": "ready", "problems": {}}


def test_figures_name_the_model_and_never_the_user() -> None:
    with gateway(one_model(ScriptedEngine(lambda _: said("zz", "x")))) as running:
        running.chat(user="alice")
        running.chat(model="secret-name", user="alice")
        text = running.http.get("/metrics").text
        wanted = {"domain": "demo", "model_version": "1", "route": "/v1/chat/completions"}
        assert running.metric("senmon_requests_total", outcome="ok", **wanted) == 1
        assert running.metric("senmon_reasoning_tokens_total", **wanted) == 2
        assert running.metric("senmon_output_tokens_total", **wanted) == len(said("zz", "x"))
        assert running.metric("senmon_input_tokens_total", **wanted) == 4
        assert running.metric("senmon_admission_rejections_total", reason="model_not_found") == 1
        for name in ("time_to_first_token", "time_to_first_answer_token", "time_per_output_token", "e2e_latency"):
            assert running.metric(f"senmon_{name}_seconds_count", **wanted) == 1
        assert running.metric("senmon_thinking_token_ratio_sum", **wanted) == pytest.approx(2 / len(said("zz", "x")))
    assert "alice" not in text
    assert "secret-name" not in text


@pytest.mark.parametrize("stream", [False, True])
def test_a_mistake_of_ours_is_reported_without_its_details(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(reader: TurnReader, token: int) -> list[Any]:
        raise KeyError("inner detail")

    monkeypatch.setattr(TurnReader, "feed", explode)
    engine = ScriptedEngine(lambda _: ENDLESS, step_s=0.005)
    with gateway(one_model(engine)) as running:
        reply = running.chat(stream=stream)
        wait_until(lambda: engine.open == 0)
        assert running.metric("senmon_requests_total", outcome="internal_error") == 1
        assert running.metric("senmon_requests_in_flight") == 0
    assert reply.status_code == (200 if stream else 500)
    assert '"internal_error"' in reply.text
    assert "[DONE]" not in reply.text
    assert "inner detail" not in reply.text


def test_a_conversation_that_the_template_refuses_is_400(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(renderer: TinyRenderer, messages: Any, tools: Any) -> list[int]:
        raise UsageError("no system message after the first")

    monkeypatch.setattr(TinyRenderer, "prompt", refuse)
    with gateway(one_model(ScriptedEngine(lambda _: ENDLESS))) as running:
        reply = running.chat()
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")


def test_a_huge_conversation_is_refused_before_it_is_tokenised() -> None:
    engine = ScriptedEngine(lambda _: said("t", "a"))
    with gateway(one_model(engine)) as running:
        with pytest.raises(openai.BadRequestError) as caught:
            running.client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "x" * 6_000_000}]
            )
        assert caught.value.code == "context_length_exceeded"
        assert "6000000 characters" in str(caught.value)
        assert engine.prompts == []
        assert running.client.chat.completions.create(model="demo", messages=USER).choices[0].message.content == "a"


def test_tokenising_does_not_hold_up_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    started, go_on = threading.Event(), threading.Event()
    original = TinyRenderer.prompt

    def slow(self: TinyRenderer, *args: Any) -> list[int]:
        started.set()
        assert go_on.wait(10)
        return original(self, *args)

    with gateway(one_model(ScriptedEngine(lambda _: said("t", "a")))) as running:
        monkeypatch.setattr(TinyRenderer, "prompt", slow)
        replies: list[Any] = []
        create = running.client.chat.completions.create
        asking = threading.Thread(target=lambda: replies.append(create(model="demo", messages=USER)))
        asking.start()
        assert started.wait(10)
        assert running.client.models.list().data, "others are answered meanwhile"
        go_on.set()
        asking.join(10)
    assert replies[0].choices[0].message.content == "a"
