import sys
from oktopk.cli import main
sys.exit(main(["train", *sys.argv[1:]]))
