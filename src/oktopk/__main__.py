"""Run the command line: `python -m oktopk` is the same as `oktopk`."""

import sys

from oktopk.cli import main

sys.exit(main())
