"""`python -m oktopk` is `oktopk`."""

import sys

from oktopk.cli import main

sys.exit(main())
