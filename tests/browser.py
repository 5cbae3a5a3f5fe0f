"""A real browser without a window, for tests of pages: what it draws, and how wide the page is that
it lays out.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest


def chromium() -> str:
    """The browser; the test is skipped, and says so, where there is none."""
    found = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if found is None:
        pytest.skip(
            "no chromium here: pages are not looked at in a browser (apt-get install chromium)"
        )
    return found


def run(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Open a page in it, with options of its own."""
    common = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--virtual-time-budget=2000",
    ]
    command = [chromium(), *common, "--window-size=1280,1200", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def overflow_of(page: Path, width: int) -> tuple[int, int]:
    """(width of the window, width that its content needs) as the browser lays the page out.

    A page of ours runs no script: it is shown in a frame of another page, which measures it.
    """
    text = page.read_text().replace("&", "&amp;").replace('"', "&quot;")
    outer = page.with_name(f"outer-{width}.html")
    outer.write_text(
        '<!doctype html><body style="margin:0"><iframe id="f"'
        f' style="border:0;width:{width}px;height:900px" srcdoc="{text}"></iframe><p'
        ' id="out"></p><script>onload=()=>{const'
        ' d=document.getElementById("f").contentDocument.documentElement;document.getElementById("out").textContent=`${d.clientWidth}'  # noqa: E501
        " ${d.scrollWidth}`}</script>",
        encoding="utf-8",
    )
    found = re.search(r'<p id="out">(\d+) (\d+)</p>', run(outer, "--dump-dom").stdout)
    assert found is not None, "the browser did not lay the page out"
    return int(found[1]), int(found[2])
