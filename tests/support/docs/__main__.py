"""List the blocks of the documents that do not run, and count the others."""

from tests.support.docs.blocks import all_blocks
from tests.support.docs.report import describe, sort

if __name__ == "__main__":
    print("\n".join(describe(sort(all_blocks()))))
