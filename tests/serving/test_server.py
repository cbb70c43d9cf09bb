from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from infra.errors import UsageError
from infra.settings import Settings
from serving.server import base_url, bind, serve
from tests.serving.scripted import ScriptedEngine, one_model

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
from infra.settings import Settings
from serving.options import GatewayOptions
from serving.server import serve
from tests.serving.scripted import ScriptedEngine, one_model, said

engine = ScriptedEngine(lambda _: said(None, "x" * 60), step_s=0.02)
serve(Settings(), ["demo"], port=0, options=GatewayOptions(drain_s=10, poll_s=0.1), source=one_model(engine),
      ready=lambda url: print(url, flush=True))
print("stopped", flush=True)
"""


def test_a_port_in_use_is_a_usage_error_before_anything_is_loaded() -> None:
    source = one_model(ScriptedEngine(lambda _: []))
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(UsageError, match="already in use") as caught:
            serve(Settings(), ["demo"], port=port, source=source)
    assert caught.value.exit_code == 2
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert "--port" in caught.value.fix
    assert source.loads == []


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70000), ("no such host", 8000), ("203.0.113.7", 8000)])
def test_addresses_that_cannot_be_bound_are_usage_errors(host: str, port: int) -> None:
    with pytest.raises(UsageError):
        bind(host, port)


def test_the_default_is_loopback() -> None:
    with bind("localhost", 0) as listener:
        assert base_url(listener).startswith(("http://127.0.0.1:", "http://[::1]:"))
    defaults = serve.__defaults__ or ()
    assert "127.0.0.1" in defaults
    assert "0.0.0.0" not in defaults


def test_ctrl_c_lets_open_streams_finish() -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        with httpx.Client(transport=httpx.HTTPTransport(retries=3), timeout=20) as client:
            while client.get(f"{url.removesuffix('/v1')}/readyz").status_code != 200:
                pass
            with client.stream("POST", f"{url}/chat/completions", json=body) as reply:
                lines = reply.iter_lines()
                first = next(lines)
                process.send_signal(signal.SIGINT)
                rest = [line for line in lines if line]
        assert first.startswith("data: ")
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"stop"' in rest[-2]
        assert process.wait(20) == 0
        assert process.stdout.read() == "stopped\n"
    finally:
        process.kill()
        process.wait()
