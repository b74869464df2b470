"""medusa-chat: chat with a language model on your own GPU, and see why Medusa makes it fast."""

__version__ = "0.2.0"
