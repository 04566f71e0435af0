"""The explorer as a picture, `docs/images/explorer.png`: starts it, opens the page in Chromium, and saves what is seen.

    python examples/explorer_screenshot.py docs/images/explorer.png

It needs Playwright (`pip install playwright`) and a Chromium of the system's.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

WIDTH, HEIGHT = 1280, 1120
SHOWN = 1000  # pixels of the picture's width


def photographed(address: str) -> Image.Image:
    """The page as it opens."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(address)
        page.wait_for_selector("#picture-answer .ca-value", timeout=120_000)
        page.wait_for_timeout(1000)  # for what moves in
        taken = Image.open(io.BytesIO(page.screenshot()))
        browser.close()
    return taken


def main(path: Path) -> None:
    command = [sys.executable, "-m", "clipaware.cli", "explore", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = re.search(r"http://\S+", server.stdout.readline())
            assert address is not None, "the explorer did not start"
            taken = photographed(address[0])
        finally:
            server.terminate()
    small = taken.convert("RGB").resize((SHOWN, SHOWN * HEIGHT // WIDTH), Image.Resampling.LANCZOS)
    small.quantize(256).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "explorer.png"))
