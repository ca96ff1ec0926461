"""A headless browser for tests of pages: Chromium, by its own driver."""

import json
import re
import shutil
import subprocess
import urllib.request

EXISTS = bool(shutil.which("chromium") and shutil.which("chromedriver"))
_TAB = {"type": "key", "id": "keys", "actions": [{"type": k, "value": "\ue004"} for k in
        ("keyDown", "keyUp")]}  # fmt: skip
_POINT = {"type": "pointerMove", "x": 0, "y": 0, "duration": 0}
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element in answers


class Browser:
    """A session of WebDriver. Elements are what `find` returns."""

    def __init__(self):
        self._driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True
        )
        started = (re.search(r"successfully on port (\d+)", line) for line in self._driver.stdout)
        port = next(filter(None, started))[1]
        self._address = f"http://127.0.0.1:{port}/session"
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        options = {
            "args": ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000"]
        }
        logs = {"browser": "ALL", "performance": "ALL"}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": logs}
        session = self._send("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        self._address += f"/{session['sessionId']}"

    def _send(self, method, path, content=None):
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self._address + path, data, method=method)
        with self._open(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, path):
        self._send("POST", "/url", {"url": f"file://{path}"})

    def find(self, selector):
        found = self._send("POST", "/elements", {"using": "css selector", "value": selector})
        return [element[_ELEMENT] for element in found]

    def run(self, script, *elements):
        arguments = [{_ELEMENT: element} for element in elements]
        return self._send("POST", "/execute/sync", {"script": script, "args": arguments})

    def label(self, element):
        """What a screen reader says."""
        return self._send("GET", f"/element/{element}/computedlabel")

    def style(self, element, name):
        return self._send("GET", f"/element/{element}/css/{name}")

    def press_tab(self):
        """Returns the element that has the focus then."""
        self._send("POST", "/actions", {"actions": [_TAB]})
        return self._send("GET", "/element/active")[_ELEMENT]

    def point_at(self, element):
        move = {**_POINT, "origin": {_ELEMENT: element}}
        pointer = {"type": "pointer", "id": "mouse", "actions": [move]}
        self._send("POST", "/actions", {"actions": [pointer]})

    def command(self, name, **parameters):
        """A command of Chromium's own."""
        self._send("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def print(self):
        """Returns a PDF in base64."""
        return self._send("POST", "/print", {})

    def log(self, kind):
        return [entry["message"] for entry in self._send("POST", "/se/log", {"type": kind})]

    def requests(self):
        """The addresses that were asked for since the last call."""
        for message in self.log("performance"):
            event = json.loads(message)["message"]
            if event["method"] == "Network.requestWillBeSent":
                yield event["params"]["request"]["url"]

    def close(self):
        self._send("DELETE", "")
        self._driver.terminate()
        self._driver.wait()
        self._driver.stdout.close()
