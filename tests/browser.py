"""A page in a real browser, by the keyboard: WebDriver's own protocol, which takes no library."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TAB, ENTER = "\ue004", "\ue007"
TRIES = 3
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync"""


class Page:
    """What is open in a session of a driver at `address`."""

    def __init__(self, address: str) -> None:
        self.address = address

    def press(self, key: str) -> None:
        steps = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        asked(f"{self.address}/actions", {"actions": [{"type": "key", "id": "keys", "actions": steps}]})

    def run(self, script: str) -> Any:
        """What the script returns."""
        return asked(f"{self.address}/execute/sync", {"script": script, "args": []})


@contextlib.contextmanager
def opened(driver: str, browser: str, folder: Path, page: str) -> Iterator[Page]:
    """The page at an address, in a browser whose profile is in the folder."""
    process, port = started(driver)
    with process:
        try:
            options = {"binary": browser, "args": [*FLAGS.split(), f"--user-data-dir={folder}/profile"]}
            wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
            session = f"http://127.0.0.1:{port}/session"
            session += "/" + asked(session, wanted)["sessionId"]
            try:
                asked(f"{session}/url", {"url": page})
                yield Page(session)
            finally:
                asked(session, method="DELETE")
        finally:
            process.terminate()


def started(driver: str) -> tuple[subprocess.Popen[str], str]:
    """A driver that listens, and its port. One that ends before it does, as was seen once, is followed by another."""
    said: list[str] = []
    for _ in range(TRIES):
        process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout
        for line in process.stdout:
            if found := re.search(r"on port (\d+)\.$", line.rstrip()):
                return process, found[1]
            said.append(line)
        process.wait()
    raise RuntimeError(f"{driver} does not listen: {''.join(said)}")


def asked(address: str, body: Any = None, method: str = "POST") -> Any:
    """The value of the driver's answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["value"]
