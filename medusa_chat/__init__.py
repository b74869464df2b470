"""medusa-chat: chat with a language model on your own GPU, and see how Medusa speeds it up."""

__version__ = "0.3.0"
