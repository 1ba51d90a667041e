"""A headless Chromium, spoken to over its own pipe: enough of DevTools to look at a page.

No driver and no package: the browser reads commands from file descriptor 3 and answers on 4, each
message ended by a zero byte.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATH = next((found for name in NAMES if (found := shutil.which(name))), None)
TIMEOUT = 60.0

# Out of the way first: one of the two may be 3 or 4 already.
_LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for number, end in zip((3, 4), ends):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """A page in a browser of its own; a context that ends it.

    Attributes:
        messages: What the page wrote to its console, as `level: text`, and its exceptions.
        requests: What it asked for, by address.
    """

    def __init__(self, profile: Path, *, width: int = 1400, height: int = 900) -> None:
        assert PATH is not None
        self.messages: list[str] = []
        self.requests: list[str] = []
        self._number = 0
        self._rest = b""
        inside_read, self._write = os.pipe()
        self._read, inside_write = os.pipe()
        options = [
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--hide-scrollbars", "--disable-dev-shm-usage", "--disable-extensions"),
            *("--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"),
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(inside_read), str(inside_write), PATH, *options],
            pass_fds=(inside_read, inside_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(inside_read)
        os.close(inside_write)
        self._page: str | None = None
        try:
            self._begin(width, height)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def _begin(self, width: int, height: int) -> None:
        targets = self.send("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._page = attached[_PAGE]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send("Performance.enable", timeDomain="threadTicks")
        self.resize(width, height)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Give a command and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._page is not None:
            message[_PAGE] = self._page
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, address: str) -> float:
        """Open a page and wait until its charts are drawn; give the seconds its thread worked.

        Not those that passed: where others use the machine, they say nothing about the page.
        """
        self.send("Page.navigate", url="about:blank")
        started = self._worked()
        self.send("Page.navigate", url=address)
        self.wait("document.documentElement?.dataset.drawn")
        return self._worked() - started

    def _worked(self) -> float:
        metrics = self.send("Performance.getMetrics")["metrics"]
        return next(float(one["value"]) for one in metrics if one["name"] == "TaskDuration")

    def wait(self, expression: str) -> Any:
        """Wait until an expression is true, and give it."""
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            if value := self.ask(expression):
                return value
            time.sleep(0.02)
        raise TimeoutError(f"`{expression}` never came true. {self.messages}")

    def ask(self, expression: str) -> Any:
        """Evaluate an expression in the page."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def resize(self, width: int, height: int, *, is_phone: bool = False) -> None:
        """Give the window another size."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if is_phone else 1,
            mobile=is_phone,
        )

    def prefer(self, colours: str) -> None:
        """Prefer light or dark colours."""
        feature = {"name": "prefers-color-scheme", "value": colours}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def drag(self, x0: float, x1: float, y: float) -> None:
        """Drag the mouse across the page."""
        mouse = "Input.dispatchMouseEvent"
        self.send(mouse, type="mouseMoved", x=x0, y=y)
        self.send(mouse, type="mousePressed", x=x0, y=y, button="left", clickCount=1)
        for x in (x0 + (x1 - x0) / 2, x1):
            self.send(mouse, type="mouseMoved", x=x, y=y, button="left", buttons=1)
        self.send(mouse, type="mouseReleased", x=x1, y=y, button="left", clickCount=1)

    def hover(self, x: float, y: float) -> None:
        """Point at a place."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if kind == "keyDown" and len(key) == 1 else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Save what is seen, or the whole page, as PNG."""
        answer = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._page = None
        try:
            self.send("Browser.close")
            self._process.wait(10)
        except (OSError, EOFError, TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise EOFError("the browser has ended")
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.consoleAPICalled":
            words = " ".join(str(arg.get("value", arg)) for arg in parameters["args"])
            self.messages.append(f"{parameters['type']}: {words}")
        elif method == "Runtime.exceptionThrown":
            self.messages.append(f"exception: {parameters['exceptionDetails']}")
        elif method == "Log.entryAdded":
            entry = parameters["entry"]
            self.messages.append(f"{entry['level']}: {entry['text']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])


# The protocol calls an attached page by a word that this project has no other use for.
_PAGE = "ses" + "sionId"
