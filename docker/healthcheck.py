"""Is the container's job alive? Exit code 0 yes, 1 no; called by the image's HEALTHCHECK.

With DALIPIPE_METRICS_PORT set, every rank of the job (ports from there on, DALIPIPE_RANKS of them, 1 by default) must
answer its Prometheus scrape. Without it there is no port to ask, and a container that runs at all is healthy.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request

_TIMEOUT_S = 3.0


def main() -> int:
    """Asks every rank and names the first that does not answer."""
    base = os.environ.get("DALIPIPE_METRICS_PORT", "")
    if not base:
        return 0
    for port in range(int(base), int(base) + int(os.environ.get("DALIPIPE_RANKS", "1"))):
        url = f"http://127.0.0.1:{port}/metrics"
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
                if b"dalipipe_" not in answer.read():
                    print(f"{url} answers, but with no metric of dalipipe")
                    return 1
        except (urllib.error.URLError, OSError) as error:
            print(f"{url} does not answer: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
