"""`torchrun … -m syncline.run train.py`: what `syncline run` does, on each rank."""

import sys

from syncline.cli.run import main

if __name__ == "__main__":
    main(sys.argv[1:])
