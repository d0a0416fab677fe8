"""One page as a person has it: it is clicked, typed into and looked at; and whatever goes wrong on it is kept."""

from __future__ import annotations

import base64
import json
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.browser.chromium import Chromium, Failed

WAIT_S = 30.0
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowUp": 38, "ArrowDown": 40, "ArrowLeft": 37, "ArrowRight": 39}
WIDE, NARROW = (1280, 860), (400, 800)

_FIND = """(selector, text) => [...document.querySelectorAll(selector)].find(node =>
  node.checkVisibility({visibilityProperty: true}) && node.textContent.includes(text))"""
_PLACE = """(() => { const node = (%s)(%s, %s); if (!node) return null;
  node.scrollIntoView({block: "center", inline: "center", behavior: "instant"});
  const box = node.getClientRects()[0], x = box.x + box.width / 2, y = box.y + box.height / 2;
  const top = document.elementFromPoint(x, y);
  return top && (node.contains(top) || top.contains(node)) ? [x, y] : null; })()"""
_UNTIL = """new Promise(resolve => { const end = performance.now() + %d; (function look() {
  let value; try { value = (%s); } catch {}
  if (!value && performance.now() < end) setTimeout(look, 15);
  else resolve(value instanceof Node ? true : value ?? null); })(); })"""


class Page:
    """Made by the fixture `page`, which asserts at the end that nothing went `wrong`."""

    def __init__(self, browser: Chromium) -> None:
        self._browser = browser
        self._context = browser.ask("Target.createBrowserContext")["browserContextId"]
        made = browser.ask("Target.createTarget", url="about:blank", browserContextId=self._context)
        attached = browser.ask("Target.attachToTarget", targetId=made["targetId"], flatten=True)
        self._session: str = attached["sessionId"]
        self.requests: list[str] = []
        self._wrong: list[str] = []
        self._allowed: list[str] = []
        browser.hears[self._session].append(self._hear)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")
        self.look()

    def _ask(self, method: str, **params: Any) -> Any:
        return self._browser.ask(method, self._session, **params)

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
        """What the console said and what failed, but for what the test has allowed."""
        self.js("0")  # whatever happened before this has been heard once it is answered
        return [one for one in self._wrong if not any(re.search(pattern, one) for pattern in self._allowed)]

    @property
    def hosts(self) -> set[str]:
        """Who was asked for anything."""
        split = (urlsplit(url) for url in self.requests)
        return {url.netloc for url in split if url.scheme not in ("data", "blob", "about")}

    def allow(self, pattern: str) -> None:
        """A refusal that is part of the test: browsers write every one of them to the console."""
        self._allowed.append(pattern)

    def open(self, url: str) -> None:
        loaded = self._ask("Page.navigate", url=url)
        if "errorText" in loaded:
            raise Failed(f"{url}: {loaded['errorText']}")
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def js(self, expression: str) -> Any:
        """The value of an expression; a promise is waited for."""
        asked = {"expression": expression, "awaitPromise": True, "returnByValue": True, "userGesture": True}
        answer = self._ask("Runtime.evaluate", **asked)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise Failed(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    def until(self, expression: str, within_s: float = WAIT_S) -> Any:
        """Waits until an expression is true, and gives its value."""
        deadline = time.monotonic() + within_s
        value = None
        while not value:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise Failed(f"never true: {expression}\nthe page says:\n{self.text('body')[:3000]}\n{self._wrong}")
            try:
                value = self.js(_UNTIL % (left_s * 1000, expression))
            except Failed as failed:
                if "navigat" not in str(failed) and "context" not in str(failed):
                    raise
        return value

    def sees(self, text: str, within: str = "body") -> None:
        """Waits until a text can be read."""
        self.until(f"document.querySelector({json.dumps(within)})?.innerText.includes({json.dumps(text)})")

    def text(self, selector: str = "body") -> str:
        return str(self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def count(self, selector: str) -> int:
        return int(self.js(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def hover(self, selector: str, text: str = "") -> tuple[float, float]:
        """The pointer goes over the first such element that can be seen and holds the text."""
        place = _PLACE % (_FIND, json.dumps(selector), json.dumps(text))
        x, y = self.until(place)
        self._ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        return x, y

    def click(self, selector: str, text: str = "") -> None:
        x, y = self.hover(selector, text)
        for kind in ("mousePressed", "mouseReleased"):
            self._ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        """Into a field, in place of what stands there."""
        self.until(f"document.querySelector({json.dumps(selector)})?.checkVisibility()")
        self.js(f"(node => {{ node.focus(); node.select?.(); }})(document.querySelector({json.dumps(selector)}))")
        self._ask("Input.insertText", text=text)

    def choose(self, selector: str, value: str) -> None:
        """One of a list; what a native list opens is not part of the page, so its change is told as browsers do."""
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
        """The reader's choice of light or dark, and their window."""
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self._ask("Emulation.setEmulatedMedia", features=features)
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": scale, "mobile": False}
        self._ask("Emulation.setDeviceMetricsOverride", **metrics)

    def spent_s(self) -> float:
        """What the page's main thread has worked so far; counted from the first time that it is asked."""
        self._ask("Performance.enable", timeDomain="threadTicks")
        told = self._ask("Performance.getMetrics")["metrics"]
        return float(next(one["value"] for one in told if one["name"] == "TaskDuration"))

    def shot(self, file: Path, *, whole: bool = False) -> None:
        """What is seen now, or the page in its whole length, as a PNG."""
        self.js("document.fonts.ready.then(() => new Promise(requestAnimationFrame))")
        shot = self._ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        file.write_bytes(base64.b64decode(shot["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self._ask("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def close(self) -> None:
        self._browser.hears.pop(self._session, None)
        self._browser.ask("Target.disposeBrowserContext", browserContextId=self._context)
