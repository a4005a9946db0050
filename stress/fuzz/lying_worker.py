"""One process of the fuzzer of reductions with a lying rank; see stress.fuzz.worker.

python -m stress.fuzz.lying_worker FIRST LAST PLACE
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path

from stress.fuzz.lying import LawBroken, case, outcome, outcome_and_reductions
from stress.fuzz.worker import tell

WARM_UP = 40


def _outcome(number: int) -> tuple[str, str, int]:
    made = case(number)
    return made.kind, *outcome_and_reductions(made)


if __name__ == "__main__":
    logging.disable()  # ranks warn of skipped steps, thousands of times
    for early in range(WARM_UP):  # every kernel is compiled before somebody looks at the clock
        with suppress(LawBroken):
            outcome(case(early))
    tell(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), _outcome)
