"""The page's tabs: Chat, Compare, Models and Tune under one header, over one session."""

from collections.abc import Sequence

import gradio as gr

from medusa_chat.runtime.history import History
from medusa_chat.runtime.recent_models import RecentModels
from medusa_chat.runtime.session import Session
from medusa_chat.ui.access.share import Share
from medusa_chat.ui.chat.controller import ChatController
from medusa_chat.ui.chat.tab import build_chat
from medusa_chat.ui.compare.tab import build_compare
from medusa_chat.ui.header import build_header
from medusa_chat.ui.models.controller import ModelsController
from medusa_chat.ui.models.rows import offer
from medusa_chat.ui.models.tab import build_models
from medusa_chat.ui.tune.tab import build_tune


def build_app(
    session: Session,
    trees: Sequence[str],
    share: Share,
    history: History | None = None,
    recent: RecentModels | None = None,
) -> tuple[gr.Blocks, ChatController]:
    """The page over a session, and its chat controller. trees: presets offered beside "auto"."""
    models = ModelsController(session, recent=recent)
    with gr.Blocks(title="medusa-chat", analytics_enabled=False, fill_width=True) as blocks:
        build_header(session, share, models, recent)
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Chat", id="chat", elem_id="chat"):
                controller, state = build_chat(session, trees, history, offer())
                share.on_end.append(controller.sessions.end_guests)
            with gr.Tab("Compare", id="compare", elem_id="compare-tab"):
                build_compare(session, trees, state, controller.last_message)
            with gr.Tab("Models", id="models", elem_id="models-tab"):
                build_models(models)
            with gr.Tab("Tune", id="tune", elem_id="tune-tab"):
                build_tune(session)
    return blocks, controller
