"""The page. Gradio and huggingface_hub read these switches at import, so they are set before."""

import os

from medusa_chat.ui.temporary_files import own_folder

for name, value in {
    # Its usual one may be another user's, and is shared with every other Gradio app.
    "GRADIO_TEMP_DIR": str(own_folder()),
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}.items():
    os.environ[name] = value
for name in ("GRADIO_SHARE", "GRADIO_ALLOWED_PATHS", "GRADIO_LOCAL_DEV_MODE", "GRADIO_DEBUG"):
    os.environ.pop(name, None)  # each would open the page wider than the command line said
