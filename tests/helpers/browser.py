"""Drive a real browser over its DevTools protocol: click, press keys, and read the page."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE = 300.0  # seconds after which a step that hangs fails; no test measures time by it
KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "Enter": 13, "Escape": 27, "Tab": 9}


class Page:
    """The only page of a browser, with its errors and the URLs that it has requested."""

    site = ""  # the address of the tested site

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._number = socket, 0
        self.errors: list[str] = []
        self.asked: list[str] = []
        for part in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{part}.enable")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=PATIENCE))
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        about = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(about["exceptionDetails"]))
            case "Log.entryAdded" if about["entry"]["level"] == "error":
                self.errors.append(about["entry"]["text"])
            case "Network.requestWillBeSent":
                self.asked.append(about["request"]["url"])

    def open(self, address: str) -> None:
        # Visit an empty page first: a change of the hash alone would not reload the page.
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=address)
        self.wait(
            "document.readyState === 'complete' && !document.querySelector('main[aria-busy]')"
        )

    def says(self, code: str) -> Any:
        """The value of a JavaScript expression."""
        found = self._call(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, code: str, seconds: float = PATIENCE) -> None:
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + seconds
        while not self.says(f"Boolean({code})"):
            assert time.monotonic() < end, f"never: {code}; on the page: {self.text('body')}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        """The visible text of the first element that matches."""
        return self.says(f"document.querySelector({json.dumps(selector)})?.innerText")

    def texts(self, selector: str) -> list[str]:
        return self.says(
            f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)"
        )

    def point(self, selector: str, number: int = 0) -> None:
        """Move the mouse to the middle of the ``number``-th element that matches."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", **self._middle(selector, number))

    def click(self, selector: str, number: int = 0) -> None:
        place = self._middle(selector, number)
        self._call("Input.dispatchMouseEvent", type="mouseMoved", **place)
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def _middle(self, selector: str, number: int) -> dict[str, float]:
        found = self.says(
            f"(() => {{ const e = document.querySelectorAll({json.dumps(selector)})[{number}];"
            "if (!e) return null; e.scrollIntoView({block: 'center'});"
            "const r = e.getClientRects()[0];"
            "return {x: r.x + r.width / 2, y: r.y + r.height / 2}; })()"
        )
        assert found, f"There is no {selector} number {number} on the page."
        return found

    def type(self, selector: str, text: str) -> None:
        """Replace the text of a field."""
        self.click(selector)
        self.says(f"document.querySelector({json.dumps(selector)}).select()")
        self._call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = "\r" if key == "Enter" and kind == "keyDown" else ""
            self._call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, text=text,
                windowsVirtualKeyCode=KEYS[key],
            )  # fmt: skip

    def look_as(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Set the size of the screen, and a light or dark colour scheme."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def save_into(self, folder: Path) -> None:
        """Save downloads in ``folder``."""
        self._call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))


def program() -> str:
    """The path of the browser. Without a browser, skip the test."""
    named = os.environ.get("CHROMIUM")
    found = named or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("THE PAGE IS NOT TESTED: there is no Chromium here. Run: make browser")
    return found


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A browser with a new profile in ``folder``. It is closed at the end of the block."""
    words = [
        program(), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
        "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank",
    ]  # fmt: skip
    log = folder / "log"
    with log.open("wb") as said:
        process = subprocess.Popen(words, stdout=said, stderr=said)
    try:
        port = folder / "DevToolsActivePort"
        end = time.monotonic() + PATIENCE
        while not (port.is_file() and port.read_text().count("\n")):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        number, path = port.read_text().split()
        with connect(f"ws://127.0.0.1:{number}{path}", max_size=None) as control:
            control.send(json.dumps({"id": 1, "method": "Target.getTargets"}))
            found = json.loads(control.recv(timeout=PATIENCE))["result"]["targetInfos"]
            target = next(one["targetId"] for one in found if one["type"] == "page")
            address = f"ws://127.0.0.1:{number}/devtools/page/{target}"
            with connect(address, max_size=None) as socket:
                yield Page(socket)
    finally:
        process.terminate()
        process.wait(PATIENCE)
