"""Headless Chromium, spoken to over two pipes, without another package."""

import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time

CHROMIUM = shutil.which("chromium")
# Chromium reads commands from file descriptor 3, and writes answers to 4. A separate Python process
# connects them, because a process with JAX's threads must not be forked.
_CONNECT = """
import os, sys
ends = [os.dup2(int(number), 100 + int(number)) for number in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
  """One window. Use it in a `with` statement."""

  def __init__(self, width, height, folder):
    command_read, self._commands = os.pipe()
    self._answers, answer_write = os.pipe()
    ends = command_read, answer_write
    self._process = subprocess.Popen(
      [
        sys.executable,
        "-c",
        _CONNECT,
        *map(str, ends),
        CHROMIUM,
        "--headless",
        "--no-sandbox",  # Containers have no namespaces for it. The pages are our own.
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--remote-debugging-pipe",
        f"--user-data-dir={folder}",
        f"--window-size={width},{height}",
      ],
      pass_fds=ends,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )
    os.close(command_read)
    os.close(answer_write)
    self._ids = itertools.count(1)
    self._rest = b""
    self.events = []
    target = self.call("Target.createTarget", url="about:blank")["targetId"]
    attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
    self._session = attached["sessionId"]
    for domain in ("Page", "Network", "Runtime"):
      self.call(f"{domain}.enable")
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    self.call("Emulation.setDeviceMetricsOverride", **size)

  _session = None

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self._process.terminate()
    self._process.wait(30)
    os.close(self._commands)
    os.close(self._answers)

  def call(self, method, **params):
    """Calls a command of the DevTools protocol, and returns its result. Events are kept."""
    number = next(self._ids)
    message = {"id": number, "method": method, "params": params}
    if self._session:
      message["sessionId"] = self._session
    os.write(self._commands, json.dumps(message).encode() + b"\0")
    while True:
      answer = self._next_message(60)
      if answer.get("id") == number:
        assert "error" not in answer, answer
        return answer["result"]
      self.events.append(answer)

  def _next_message(self, seconds):
    end = time.monotonic() + seconds
    while b"\0" not in self._rest:
      ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
      assert ready, "Chromium does not answer"
      piece = os.read(self._answers, 1 << 20)
      assert piece, "Chromium ended"
      self._rest += piece
    message, _, self._rest = self._rest.partition(b"\0")
    return json.loads(message)

  def before_each_page(self, source):
    """Adds JavaScript that runs before the scripts of every page."""
    self.call("Page.addScriptToEvaluateOnNewDocument", source=source)

  def open(self, url):
    """Opens a page, and returns when it has loaded."""
    self.events.clear()
    assert "errorText" not in self.call("Page.navigate", url=url)
    while not any(event["method"] == "Page.loadEventFired" for event in self.events):
      self.events.append(self._next_message(60))

  def evaluate(self, source):
    """The value of an expression of JavaScript, or of a promise."""
    options = {"returnByValue": True, "awaitPromise": True}
    result = self.call("Runtime.evaluate", expression=source, **options)
    assert "exceptionDetails" not in result, result
    return result["result"].get("value")

  def wait_for(self, source, seconds=30):
    """Waits until an expression is true; returns whether it became so."""
    end = time.monotonic() + seconds
    while not self.evaluate(source):
      if time.monotonic() > end:
        return False
      time.sleep(0.1)
    return True

  def requests(self):
    """The addresses that the page requested, and those that failed."""
    named = {}
    for event in self.events:
      if event["method"] == "Network.requestWillBeSent":
        named[event["params"]["requestId"]] = event["params"]["request"]["url"]
    failed = [
      named.get(event["params"]["requestId"], "?")
      for event in self.events
      if event["method"] == "Network.loadingFailed"
    ]
    return list(named.values()), failed
