"""``python -m ferrodist``, the same as the ``ferrodist`` command."""

from __future__ import annotations

import sys

from ferrodist.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
