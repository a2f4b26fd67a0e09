"""Opens a local page in headless Chromium and returns its console output, its size, or a picture."""

import json
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

# SVG elements, and elements that scroll themselves, do not widen the page.
MEASURE = """<script>
const found = {width: document.documentElement.scrollWidth, height: document.documentElement.scrollHeight,
  window: window.innerWidth, wide: []};
for (const e of document.querySelectorAll("body *:not(svg *)")) {
  const right = e.getBoundingClientRect().right;
  if (right > window.innerWidth + 1 && !e.closest(".wide")) found.wide.push(e.tagName + " " + e.className);
}
const output = document.createElement("pre");
output.id = "measured";
output.textContent = JSON.stringify(found);
document.body.appendChild(output);
</script>"""


def chromium() -> str | None:
    """Returns the program's path, or None if no Chromium is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass(frozen=True)
class Browser:
    """A browser, started again for each call.

    Attributes:
        program: Path of Chromium.
        width: Window width in pixels.
    """

    program: str
    width: int = 1200

    def console(self, page: Path) -> list[str]:
        """Returns the page's console messages, e.g. about a blocked resource."""
        log = self._run(page, "--enable-logging=stderr", "--log-level=0", "--dump-dom").stderr
        return [line for line in log.splitlines() if "CONSOLE" in line]

    def measured(self, page: Path) -> dict[str, Any]:
        """Returns width and height of the page, and the elements wider than the window.

        Measures a copy of the page, because the page itself blocks scripts.
        """
        html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text("utf-8"))
        copy = page.with_suffix(".measured.html")
        copy.write_text(html.replace("</body>", f"{MEASURE}</body>"), "utf-8")
        dom = self._run(copy, "--dump-dom").stdout
        found = re.search(r'<pre id="measured">(.*?)</pre>', dom, re.DOTALL)
        assert found is not None, "the page could not be measured"
        return json.loads(unescape(found[1]))

    def picture(self, page: Path, png: Path, height: int) -> None:
        """Writes a picture of the page's upper part."""
        self._run(page, f"--screenshot={png}", "--hide-scrollbars", height=height)

    def _run(self, page: Path, *options: str, height: int = 900) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            command = [self.program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
            command += [f"--user-data-dir={profile}", f"--window-size={self.width},{height}", *options]
            command.append(page.resolve().as_uri())
            return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
