"""`Page`: clicks, types and reads in a browser page as a user does, and records errors on it."""

from __future__ import annotations

import base64
import json
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.browser.chromium import RESPONSE_TIMEOUT_S, BrowserError, Chromium

WAIT_S = 30.0
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowUp": 38, "ArrowDown": 40, "ArrowLeft": 37, "ArrowRight": 39}
WIDE, NARROW = (1280, 860), (400, 800)

_FIND = """(selector, text) => [...document.querySelectorAll(selector)].find(node =>
  node.checkVisibility({visibilityProperty: true}) && node.textContent.includes(text))"""
_CENTRE = """(() => { const node = (%s)(%s, %s); if (!node) return null;
  node.scrollIntoView({block: "center", inline: "center", behavior: "instant"});
  const box = node.getClientRects()[0], x = box.x + box.width / 2, y = box.y + box.height / 2;
  const top = document.elementFromPoint(x, y);
  return top && (node.contains(top) || top.contains(node)) ? [x, y] : null; })()"""
_AIM = """(() => { const node = (%s)(%s, %s), aim = document.elementFromPoint(%f, %f); window.clickArrived = false;
  document.addEventListener("click", event => {
    window.clickArrived ||= event.target === aim || Boolean(node?.contains(event.target)); }, {capture: true}); })()"""
_UNTIL = """new Promise(resolve => { const end = performance.now() + %d; (function look() {
  let value; try { value = (%s); } catch {}
  if (!value && performance.now() < end) setTimeout(look, 15);
  else resolve(value instanceof Node ? true : value ?? null); })(); })"""


class Page:
    """A browser page; the fixture `page` creates it and asserts at the end that there were no errors."""

    def __init__(self, browser: Chromium) -> None:
        self._browser = browser
        self._context = browser.ask("Target.createBrowserContext")["browserContextId"]
        target = browser.ask("Target.createTarget", url="about:blank", browserContextId=self._context)
        attached = browser.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session: str = attached["sessionId"]
        self.requests: list[str] = []
        self._wrong: list[str] = []
        self._allowed: list[str] = []
        browser.hears[self._session].append(self._hear)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")
        self.look()

    def _ask(self, method: str, within_s: float = RESPONSE_TIMEOUT_S, /, **params: Any) -> Any:
        return self._browser.ask(method, self._session, within_s, **params)

    def _hear(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self._wrong.append("console: " + " ".join(str(arg.get("value", "")) for arg in params["args"]))
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self._wrong.append(details.get("exception", {}).get("description") or details["text"])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                entry = params["entry"]
                self._wrong.append(f"{entry['text']} {entry.get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Network.loadingFailed" if not params.get("canceled"):
                self._wrong.append(f"a request failed: {params['errorText']} {params.get('blockedReason', '')}")

    @property
    def wrong(self) -> list[str]:
        """Console errors and failed requests, except those that the test allows."""
        self.js("0")  # once this is answered, all earlier events have arrived
        return [message for message in self._wrong if not any(re.search(pattern, message) for pattern in self._allowed)]

    @property
    def hosts(self) -> set[str]:
        """The hosts of all requests."""
        split = (urlsplit(url) for url in self.requests)
        return {url.netloc for url in split if url.scheme not in ("data", "blob", "about")}

    def allow(self, pattern: str) -> None:
        """Allows errors that match; for expected error responses, which browsers log to the console."""
        self._allowed.append(pattern)

    def open(self, url: str) -> None:
        loaded = self._ask("Page.navigate", url=url)
        if "errorText" in loaded:
            raise BrowserError(f"{url}: {loaded['errorText']}")
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def js(self, expression: str, within_s: float = RESPONSE_TIMEOUT_S) -> Any:
        """Evaluates a JavaScript expression, awaiting a promise."""
        request = {"expression": expression, "awaitPromise": True, "returnByValue": True, "userGesture": True}
        answer = self._ask("Runtime.evaluate", within_s, **request)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    def until(self, expression: str, within_s: float = WAIT_S) -> Any:
        """Waits until an expression is true, and returns its value."""
        deadline = time.monotonic() + within_s
        value = None
        while not value:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise BrowserError(
                    f"never true: {expression}\nthe page says:\n{self.text('body')[:3000]}\n{self._wrong}"
                )
            try:
                # The page gives up first, so that what it shows then can still be read.
                value = self.js(_UNTIL % (left_s * 1000, expression), left_s + RESPONSE_TIMEOUT_S)
            except BrowserError as failed:
                if "navigat" not in str(failed) and "context" not in str(failed):
                    raise
        return value

    def sees(self, text: str, within: str = "body") -> None:
        """Waits until a text is visible."""
        self.until(f"document.querySelector({json.dumps(within)})?.innerText.includes({json.dumps(text)})")

    def text(self, selector: str = "body") -> str:
        return str(self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def count(self, selector: str) -> int:
        return int(self.js(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def hover(self, selector: str, text: str = "") -> tuple[float, float]:
        """Moves the pointer over the first visible element that matches and contains the text."""
        place = _CENTRE % (_FIND, json.dumps(selector), json.dumps(text))
        x, y = self.until(place)
        self._ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        return x, y

    def click(self, selector: str, text: str = "") -> None:
        """Clicks an element, again if the page moved or replaced it in the meantime."""
        deadline = time.monotonic() + WAIT_S
        while not self._click_once(selector, text):
            if time.monotonic() > deadline:
                raise BrowserError(f"no click arrived at {selector} {text}\n{self._wrong}")

    def _click_once(self, selector: str, text: str) -> bool:
        x, y = self.hover(selector, text)
        self.js(_AIM % (_FIND, json.dumps(selector), json.dumps(text), x, y))
        for kind in ("mousePressed", "mouseReleased"):
            self._ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        return bool(self.js("window.clickArrived !== false"))  # undefined where the click opened another document

    def type(self, selector: str, text: str) -> None:
        """Replaces the text of a field."""
        self.until(f"document.querySelector({json.dumps(selector)})?.checkVisibility()")
        self.js(f"(node => {{ node.focus(); node.select?.(); }})(document.querySelector({json.dumps(selector)}))")
        self._ask("Input.insertText", text=text)

    def choose(self, selector: str, value: str) -> None:
        """Selects an option; dispatches the change event itself, because a native list is not part of the page."""
        self.until(f"document.querySelector({json.dumps(selector)})?.checkVisibility()")
        self.js(
            f"(node => {{ node.value = {json.dumps(value)}; node.dispatchEvent(new Event('input', {{bubbles: true}}));"
            f" node.dispatchEvent(new Event('change', {{bubbles: true}})); }})"
            f"(document.querySelector({json.dumps(selector)}))"
        )

    def press(self, key: str, *, shift: bool = False) -> None:
        code = KEYS.get(key) or ord(key.upper()[0])
        written = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        common = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self._ask("Input.dispatchKeyEvent", type="keyDown", **common, **written)
        self._ask("Input.dispatchKeyEvent", type="keyUp", **common)

    def look(self, scheme: str = "light", size: tuple[int, int] = WIDE, scale: float = 1) -> None:
        """Sets the colour scheme and window size."""
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self._ask("Emulation.setEmulatedMedia", features=features)
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": scale, "mobile": False}
        self._ask("Emulation.setDeviceMetricsOverride", **metrics)

    def spent_s(self) -> float:
        """Time that the page's main thread has worked since the first call of this."""
        self._ask("Performance.enable", timeDomain="threadTicks")
        metrics = self._ask("Performance.getMetrics")["metrics"]
        return float(next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration"))

    def shot(self, file: Path) -> None:
        """A PNG of the visible part."""
        self.js("document.fonts.ready.then(() => new Promise(requestAnimationFrame))")
        file.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self._browser.hears.pop(self._session, None)
        self._browser.ask("Target.disposeBrowserContext", browserContextId=self._context)
