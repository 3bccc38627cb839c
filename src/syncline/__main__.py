"""Entry point of `syncline` and of `python -m syncline`."""

from syncline import startup


def main() -> None:
    startup.begin()
    from syncline.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
