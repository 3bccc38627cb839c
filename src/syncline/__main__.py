"""`syncline`, and `python -m syncline` for where the console script is not on the path."""

from syncline import startup


def main() -> None:
    startup.begin()
    from syncline.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
