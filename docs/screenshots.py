"""Pictures of the documents: `python docs/screenshots.py` runs the default job and photographs what it wrote.

It needs Chromium (`chromium` on the path, or its file as the only argument) and writes `docs/pictures/*.png`.
CI does not run it. Look at the pictures before you commit them.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

PICTURES = Path(__file__).parent / "pictures"
PORT = 6123
"""Port of TensorBoard while it is photographed."""


def photograph(chromium: str, address: str, name: str, width: int, height: int) -> None:
    """Write `name`.png with the first screen at `address`, `width` × `height` pixels."""
    command = [
        chromium,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size={width},{height}",
        # milliseconds of the page's own clock: charts are drawn after the first answers
        "--virtual-time-budget=30000",
        f"--screenshot={PICTURES / f'{name}.png'}",
        address,
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=180)


def main(chromium: str = "chromium") -> None:
    """Run the default job and photograph its report and TensorBoard's first screen."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        job = [sys.executable, "-m", "darts_parallel", f"hydra.run.dir={run}"]
        subprocess.run(job, check=True, capture_output=True)
        photograph(chromium, (run / "report.html").as_uri(), "report", 1100, 710)
        logs = str(run / "tensorboard")
        board = [sys.executable, "-m", "tensorboard.main", "--logdir", logs, "--port", str(PORT)]
        with subprocess.Popen(board, stderr=subprocess.DEVNULL) as server:
            time.sleep(20)  # TensorBoard reads the file before it answers
            # this tab draws lines without WebGL, which a browser without a screen may lack
            page = f"http://localhost:{PORT}/#scalars"
            photograph(chromium, page, "tensorboard", 1100, 780)
            server.terminate()


if __name__ == "__main__":
    main(*sys.argv[1:])
