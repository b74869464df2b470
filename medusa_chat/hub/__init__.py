"""The Hugging Face Hub: search, plan a download, download; list and remove cached repos.

No torch, no gradio. huggingface_hub is imported by the first call.
"""

from medusa_chat.hub.cache import (
    CachedModel,
    cached,
    cached_folder,
    find,
    newest_snapshot,
    remove,
    resolve,
)
from medusa_chat.hub.client import HubError, is_offline
from medusa_chat.hub.discovery import SearchResult, last_search, search
from medusa_chat.hub.download import DownloadEvent, pull
from medusa_chat.hub.download_plan import DownloadPlan, RepoPlan, plan, plan_repo
from medusa_chat.hub.repo import HubSource
from medusa_chat.hub.repo_files import is_repo_id
from medusa_chat.units import gb
