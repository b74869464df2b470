"""The page's looks: style sheets, icon, system fonts, a theme of Medusa green on green greys."""

from typing import Any

import gradio as gr

from medusa_chat.paths import asset

STYLES = (
    "page.css",
    "share.css",
    "chat.css",
    "conversations.css",
    "tree.css",
    "compare.css",
    "models.css",
    "tune.css",
)
SHADES = ("c50", "c100", "c200", "c300", "c400", "c500", "c600", "c700", "c800", "c900", "c950")


def _color(name: str, hex_values: str) -> gr.themes.Color:
    """hex_values: one a shade, light first."""
    return gr.themes.Color(name=name, **dict(zip(SHADES, hex_values.split(), strict=True)))


GREEN = _color(
    "medusa",
    "#effcf4 #dcfae7 #bbf3d0 #86e5ad #4acb81 #1fae5f #138c4a #0f7040 #105935 #0e492d #062917",
)
GREY = _color(
    "medusa-grey",
    "#f6f8f7 #eef3f0 #dbe3df #b8c5be #8fa199 #64736c #55645d #2b3833 #1b2622 #141c19 #0d1311",
)
FONT = ("system-ui", "Segoe UI", "Roboto", "Helvetica Neue", "Noto Sans", "Arial", "sans-serif")
MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace")
VARIABLES = {  # of Gradio's style sheet
    "body_background_fill": "#f6f8f7",
    "body_background_fill_dark": "#0d1311",
    "background_fill_primary": "#ffffff",
    "background_fill_primary_dark": "#141c19",
    "background_fill_secondary": "#f1f5f3",
    "background_fill_secondary_dark": "#1a2420",
    "block_background_fill": "*background_fill_primary",
    "block_border_width": "0px",
    "block_shadow": "none",
    "block_title_background_fill": "none",
    "block_title_background_fill_dark": "none",
    "border_color_primary": "#dbe3df",
    "border_color_primary_dark": "#2b3833",
    "input_background_fill": "#ffffff",
    "input_background_fill_dark": "#101815",
    "input_placeholder_color": "#64736c",
    "input_placeholder_color_dark": "#8fa199",
    "input_border_width": "1px",
    "input_border_color": "#84938c",
    "input_border_color_dark": "#64776f",
    "input_border_color_focus": "*primary_600",
    "input_border_color_focus_dark": "*primary_400",
    "body_text_color": "#16211c",
    "body_text_color_dark": "#e6eeea",
    "body_text_color_subdued": "#55645d",
    "body_text_color_subdued_dark": "#9fb0a8",
    "button_primary_background_fill": "*primary_700",
    "button_primary_background_fill_hover": "*primary_800",
    "button_primary_background_fill_dark": "*primary_700",
    "button_primary_background_fill_hover_dark": "*primary_800",
    "button_primary_text_color": "#ffffff",
    "button_secondary_background_fill": "#ffffff",
    "button_secondary_background_fill_hover": "#eef3f0",
    "button_secondary_background_fill_dark": "#1b2622",
    "button_secondary_background_fill_hover_dark": "#24332d",
    "button_secondary_border_color": "#b8c5be",
    "button_secondary_border_color_dark": "#41524b",
    "button_secondary_text_color": "*body_text_color",
    "button_border_width": "1px",
    "slider_color": "*primary_600",
    "slider_color_dark": "*primary_400",
    "checkbox_border_color": "#84938c",
    "checkbox_border_color_dark": "#64776f",
    "checkbox_background_color_selected": "*primary_700",
    "checkbox_background_color_selected_dark": "*primary_600",
    "checkbox_border_color_selected": "*primary_700",
    "checkbox_border_color_selected_dark": "*primary_600",
}


def theme() -> gr.themes.Base:
    """The page's theme. Named fonts of the system: nothing is fetched from elsewhere."""
    return gr.themes.Base(
        primary_hue=GREEN,
        secondary_hue=GREEN,
        neutral_hue=GREY,
        radius_size=gr.themes.sizes.radius_lg,
        font=[gr.themes.Font(name) for name in FONT],
        font_mono=[gr.themes.Font(name) for name in MONO],
    ).set(**VARIABLES)


def looks() -> dict[str, Any]:
    """What Gradio draws the page with: arguments of `launch`."""
    styles = [asset("css", name).read_text(encoding="utf-8") for name in STYLES]
    icon = str(asset("icons", "medusa.svg"))
    return {"theme": theme(), "css": "\n".join(styles), "footer_links": [], "favicon_path": icon}
