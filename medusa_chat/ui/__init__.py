"""The page. Gradio and huggingface_hub read these switches at import, so they are set before."""

import os

for name, value in {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}.items():
    os.environ[name] = value
for name in ("GRADIO_SHARE", "GRADIO_ALLOWED_PATHS", "GRADIO_LOCAL_DEV_MODE", "GRADIO_DEBUG"):
    os.environ.pop(name, None)  # each would open the page wider than the command line said
