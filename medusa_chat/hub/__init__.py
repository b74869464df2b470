"""The Hub: search it, tell what a download costs, download, list and remove what is cached.

Plain typed values, no torch and no gradio. huggingface_hub is imported by the first call.
"""

from medusa_chat.hub.cache import CachedModel, cached, cached_folder, find, resolve
from medusa_chat.hub.discovery import Found, last_search, search
from medusa_chat.hub.download import DownloadEvent, pull
from medusa_chat.hub.download_plan import DownloadPlan, free_bytes, plan
from medusa_chat.hub.environment import is_offline
from medusa_chat.hub.errors import HubError
from medusa_chat.hub.remote_files import HubSource
from medusa_chat.hub.removal import remove
from medusa_chat.hub.repo_files import is_repo_id
from medusa_chat.hub.repo_plan import FilePlan, RepoPlan, plan_repo
from medusa_chat.units import gb
