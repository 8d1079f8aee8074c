"""`python -m holdfast` is the command line."""

from holdfast.cli.main import entry

if __name__ == "__main__":
    entry()
