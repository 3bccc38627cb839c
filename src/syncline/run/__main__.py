"""`torchrun … -m syncline.run train.py`: run `syncline run` on each rank."""

import sys

from syncline import startup

if __name__ == "__main__":
    startup.begin()
    from syncline.cli.commands.run import main

    main(sys.argv[1:])
