"""`python -m medusa_chat` is the command line."""

import sys

from medusa_chat.cli.main import main

if __name__ == "__main__":  # the worker process imports this module again (spawn)
    sys.exit(main())
