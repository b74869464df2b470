"""The program, as `medusa-chat` and as `python -m medusa_chat`."""

import sys


def main() -> int:
    """Run one command and return its exit code. Ctrl-C ends it even while it is imported."""
    try:
        from medusa_chat.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":  # the worker process imports this module again (spawn)
    sys.exit(main())
