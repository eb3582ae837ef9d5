"""A real browser for the tests: Debian's chromium, driven through chromedriver's HTTP interface (W3C WebDriver)."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

DRIVER, CHROMIUM = shutil.which("chromedriver"), shutil.which("chromium")
ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's id, fixed by the standard


class Browser:
    """A session: a page, clicks in it, scripts beside it, pictures of it."""

    def __init__(self, server: str) -> None:
        options = {"binary": CHROMIUM, "args": ARGUMENTS}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._base = server
        self._base = f"{server}/session/{self._call('session', capabilities={'alwaysMatch': wanted})['sessionId']}"

    def _call(self, path: str, **parameters: object) -> object:
        request = urllib.request.Request(f"{self._base}/{path}", json.dumps(parameters).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path) -> None:
        """A page in a window of the usual size; what the one before it complained of is forgotten."""
        self.resize(1000, 1300)
        self.complaints()
        self._call("url", url=page.resolve().as_uri())

    def resize(self, width: int, height: int) -> None:
        self._call("window/rect", width=width, height=height)

    def click(self, xpath: str) -> None:
        element = self._call("element", using="xpath", value=xpath)[ELEMENT]
        self._call(f"element/{element}/click")

    def run(self, script: str) -> object:
        return self._call("execute/sync", script=script, args=[])

    def complaints(self) -> list[str]:
        """What the browser has written to its console since this was called last.

        Such as a script that was not allowed to run.
        """
        return [entry["message"] for entry in self._call("se/log", type="browser")]

    def picture(self, path: Path) -> None:
        with urllib.request.urlopen(f"{self._base}/screenshot", timeout=60) as answer:
            path.write_bytes(base64.b64decode(json.load(answer)["value"]))

    def close(self) -> None:
        urllib.request.urlopen(urllib.request.Request(self._base, method="DELETE"), timeout=60).close()


@contextlib.contextmanager
def browser(home: Path) -> Iterator[Browser]:
    """A browser that keeps its profile in ``home``."""
    server = subprocess.Popen(
        [DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True, env={**os.environ, "HOME": str(home)}
    )
    try:
        port = next(found[1] for line in server.stdout if (found := re.search(r"on port (\d+)\.", line)))
        session = Browser(f"http://127.0.0.1:{port}")
        try:
            yield session
        finally:
            session.close()
    finally:
        server.terminate()
        server.wait()
        server.stdout.close()
