"""`python -m holdfast` is the command line."""

from holdfast.cli.entering import entry

if __name__ == "__main__":
    entry()
