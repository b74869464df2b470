"""Tiny random vision-language models, as their families' own classes write them."""

import torch
import transformers

from support.checkpoints import TEMPLATE, VOCABULARY
from support.families import COMMON, SHARED
from support.tokenizers import byte_tokenizer

TEXT = COMMON | {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "eos_token_id": 255,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "embed_dim": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": TEXT["hidden_size"],
}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
HALF = ROPE | {"mrope_section": [1, 1], "partial_rotary_factor": 0.5}
GLM_VISION = QWEN_VISION | {"intermediate_size": 16, "image_size": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
CLIP = {"model_type": "clip_vision_model", "projection_dim": 16}
QWEN = {"rope_parameters": ROPE}, QWEN_VISION
# family -> (class, its text part's config, its vision part's)
FAMILIES = {
    "llava": ("Llava", {"model_type": "llama"}, CLIP),
    "pixtral": ("Llava", {"model_type": "mistral", "head_dim": 8}, {"model_type": "pixtral"}),
    "llava-next": ("LlavaNext", {"model_type": "mistral"}, CLIP),
    "mistral3": ("Mistral3", {"model_type": "mistral", "head_dim": 8}, {"model_type": "pixtral"}),
    "idefics3": ("Idefics3", {"model_type": "llama"}, {}),
    "smolvlm": ("SmolVLM", {"model_type": "llama"}, {}),
    "internvl": (
        *("InternVL", {"model_type": "qwen2"}),
        {"image_size": [8, 8], "patch_size": [4, 4]},
    ),
    "qwen2-vl": ("Qwen2VL", *QWEN),
    "qwen2.5-vl": ("Qwen2_5_VL", *QWEN),
    "qwen3-vl": (
        *("Qwen3VL", {"head_dim": 8, "rope_parameters": ROPE | {"mrope_interleaved": True}}),
        QWEN_VISION | {"deepstack_visual_indexes": [0]},
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        EXPERTS | {"head_dim": 8, "rope_parameters": ROPE | {"mrope_interleaved": True}},
        QWEN_VISION | {"deepstack_visual_indexes": [0]},
    ),
    "glm4v": ("Glm4v", {"head_dim": 8, "rope_parameters": HALF}, GLM_VISION),
    "glm4v-moe": (
        "Glm4vMoe",
        EXPERTS
        | {"n_routed_experts": 4, "head_dim": 8, "rope_parameters": HALF}
        | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
        GLM_VISION,
    ),
    "gemma3": (
        *("Gemma3", MIXED | {"head_dim": 8, "tie_word_embeddings": True}),
        {"model_type": "siglip_vision_model"},
    ),
    "gemma4": (
        "Gemma4",
        SHARED
        | {"global_head_dim": 16, "use_double_wide_mlp": True, "tie_word_embeddings": True}
        | {"vocab_size_per_layer_input": VOCABULARY},
        {"head_dim": 8},
    ),
}


def tiny_vision_language(family: str):
    """A random model of `family` in fp32."""
    name, text, vision = FAMILIES[family]
    vision = vision if "depth" in vision else VISION | vision
    config = getattr(transformers, f"{name}Config")(text_config=TEXT | text, vision_config=vision)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    model.generation_config.eos_token_id = 255
    return model.eval().requires_grad_(False)


def write_vision_language(folder, family: str):
    """A folder with a model of `family` and a tokenizer of bytes; the model."""
    model = tiny_vision_language(family)
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return model
