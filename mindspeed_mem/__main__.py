"""``python -m mindspeed_mem``: see tools/main.py. This file is read before anything is known about the Python."""

from __future__ import annotations

import sys

from mindspeed_mem import requirements


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    reason = requirements.old_python()  # first: what is imported below would not even be parsed
    if reason is not None:
        print(f"mindspeed_mem: {reason}", file=sys.stderr)
        return 1
    from mindspeed_mem.tools import main

    return main.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
