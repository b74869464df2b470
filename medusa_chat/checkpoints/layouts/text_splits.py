"""How text is split before a byte-level tokenizer merges it, by the names in GGUF files.

A file names the rules and does not hold them: a table of them, as the models' tokenizer.json has
them, by llama.cpp's names.
"""

from collections.abc import Mapping
from typing import Any

from medusa_chat.checkpoints.layouts.gguf_header import MODEL

SPLIT = "tokenizer.ggml.pre"
ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEFORE = r"[^\r\n\p{L}\p{N}]?"
CASED = (f"{BEFORE}{UPPER}*{LOWER}+", f"{BEFORE}{UPPER}+{LOWER}*")
CASED_ENDS = "|".join(f"{word}{ENDS}?" for word in CASED)
CASED_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
ASCII_SIGNS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
HAN = "[一-龥\u3040-ゟ゠-ヿ]+"
HAN_AND_MORE = "[一-龥\u0800-一가-\ud7ff]+"
SENTENCES = r" ?[^(\s|.,!?…。，、।۔،)]+"
THREES = r"\d{1,3}(?=(?:\d{3})*(?!\d))"  # from the right
ASIAN = (
    "[\u0e40-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u2f00-\u2fdf\u3040-\u30ff\u3400-\u4dbf"
    "\u4e00-\u9fff\ua9e0-\ua9ff\uaa60-\uaa7f\uac00-\ud7af\uf900-\ufaff\uff65-\uff9f]+"
)
HALVES = "|".join(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1))  # 512 spaces to 4

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{ENDS}|{WORD}|\p{{N}}{{1,3}}|{SIGNS}|{SPACES}"
QWEN2 = rf"{ENDS}|{WORD}|\p{{N}}|{SIGNS}|{SPACES}"
QWEN35 = rf"{ENDS}|{BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
TEKKEN = rf"{'|'.join(CASED)}|\p{{N}}|{CASED_SIGNS}|{SPACES}"
GPT4O = rf"{CASED_ENDS}|\p{{N}}{{1,3}}|{CASED_SIGNS}|{SPACES}"
DIGITS = (r"\p{N}", GPT2)
MARKED = (
    rf"{ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
)
DEEPSEEK3 = rf"{MARKED}[\r\n]*|{SPACES}"
NOT_HAN = tuple(f"{letters[:-1]}&&[^\\p{{Han}}]]" for letters in (UPPER, LOWER))
KIMI_K2 = GPT4O.replace("/", "").replace(UPPER, NOT_HAN[0]).replace(LOWER, NOT_HAN[1])
BAILING = rf"'(?i:[sdmt]|ll|ve|re)|{WORD}|\p{{N}}|{SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+"

# names -> expressions: the text is cut by the first, what comes of it by the next
RULES: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"): (GPT2,),
    ("exaone4", "gigachat", "a.x-4.0", "mellum"): (GPT2,),
    ("command-r", "refact", "smollm", "starcoder", "codeshell", "exaone"): DIGITS,
    ("minerva-7b", "mellum2"): DIGITS,
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"): (LLAMA3,),
    ("midm-2.0", "lfm2", "jina-v5-nano", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): (LLAMA3,),
    ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2"): (QWEN2,),
    ("hunyuan", "solar-open", "grok-2"): (QWEN2,),
    ("qwen35",): (QWEN35,),
    ("ufakzeka",): (QWEN2.removeprefix(f"{ENDS}|"),),
    ("laguna",): (r"[^\n]+|\n+", QWEN2),
    ("minicpm5",): (r"\p{N}{1,3}", QWEN2.replace(r"|\p{N}|", r"|\p{N}+|")),
    ("tekken",): (TEKKEN,),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): (GPT4O,),
    ("tiny_aya", "cohere2moe"): (r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O),
    ("youtu",): (
        f"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{HAN}",
        rf"{CASED_ENDS}|\p{{N}}|{CASED_SIGNS}|{SPACES}",
    ),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): (r"\p{N}{1,3}", HAN, DEEPSEEK3),
    ("spark2_5",): (r"\p{N}", HAN, rf"{MARKED}|[\r\n]|\s+(?!\S)|\s+"),
    ("afmoe",): (THREES, ASIAN, DEEPSEEK3),
    ("superbpe",): (r"\p{N}+", THREES),
    ("kimi-k2",): (rf"\p{{Han}}+|{KIMI_K2}",),
    ("chameleon",): (r"[\t\n]|    |  ", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", GPT2),
    ("deepseek-coder",): (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN_AND_MORE, r"\p{N}"),
    ("deepseek-llm",): (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",  # its list lacks the letters of formulas, and newer ones
        r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
        r"\s+$",
        HAN_AND_MORE,
        r"\p{N}+",
    ),
    ("falcon",): (r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]"),
    ("bailingmoe", "bailingmoe2", "llada-moe"): (BAILING,),
    ("seed-coder",): (rf"{ENDS}|{WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}",),
    ("exaone-moe",): (
        rf"{ENDS}|{BEFORE}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    ("jais-2",): (rf"{ENDS}|{WORD}|\p{{N}}{{1,3}}|{SIGNS}|\s*[\r\n]+|{HALVES}|\s{{1,2}}(?!\S)|\s",),
    ("poro-chat", "bloom", "gpt3-finnish"): (SENTENCES,),
    ("viking",): (SENTENCES, r"\p{N}"),
}
SPLITS = {name: rules for names, rules in RULES.items() for name in names}
# the same, for vocabularies of plain text whose spaces are \u2581, as Gemma 4's
UNSPLIT = ("gemma4", "sarvam-moe")
# a text begins with BOS where a file does not say
BEGUN = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"),
    *("lfm2", "jina-v5-nano", "tekken", "chameleon"),
)
# a piece that is itself a token is used without merges
WHOLE = (*(name for name in BEGUN if name != "chameleon"), "youtu", "minicpm5")


def unknown_split(metadata: Mapping[str, Any]) -> str:
    """A sentence for a file whose tokenizer splits text in a way that is not known; empty for
    others. metadata: of its header."""
    name = metadata.get(SPLIT)
    if metadata.get(MODEL) != "gpt2" or str(name) in (*SPLITS, *UNSPLIT):
        return ""
    rules = f"splits text by rules called {str(name)[:40]!r}, which are not known here"
    what = rules if name else "does not say how text is split"
    return f"the GGUF file {what}: it is split as GPT-2 does, and answers may be worse"
