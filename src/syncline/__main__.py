"""`python -m syncline`, for where the console script is not on the path."""

from syncline.cli import main

if __name__ == "__main__":
    main()
