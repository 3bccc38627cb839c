"""`torchrun … -m syncline.run train.py`: run `syncline run` on each rank."""

import sys

from syncline import startup

if __name__ == "__main__":
    startup.begin()
    from syncline.cli.app import run_script

    run_script(sys.argv[1:])
