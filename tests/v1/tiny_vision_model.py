# SPDX-License-Identifier: Apache-2.0
"""A vision-language model in miniature, with nothing but JSON and made-up images.

Qianfan-OCR is InternVL's encoder before any language model. vLLM itself brings its
configuration and its image processor, which imports torchvision, so that it wants no
file but a tokenizer's; and every image is one tile, so its tokens are known beforehand.
"""

import numpy as np
from PIL import Image

from tests.v1.owner_rows import TARGET

_SIDE = 32  # of a tile, in pixels
_PATCH = 8

# Four patches make a token.
TOKENS = (_SIDE // _PATCH) ** 2 // 4
LAYERS = 2

CONFIG = {
    "architectures": ["QianfanOCRForConditionalGeneration"],
    "model_type": "qianfan_ocr",
    "text_config": TARGET,
    "vision_config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "image_size": _SIDE,
        "patch_size": _PATCH,
    },
    "force_image_size": _SIDE,
    "dynamic_image_size": False,
}

# The image's place in a prompt, and what the processor puts there.
_WORDS = ["<unk>", "<image>", "<img>", "</img>", "<IMG_CONTEXT>"]
_AS_IT_IS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
IMAGE = _WORDS.index("<image>")
TOKENIZER = {
    "version": "1.0",
    "model": {
        "type": "WordLevel",
        "vocab": {word: number for number, word in enumerate(_WORDS)},
        "unk_token": "<unk>",
    },
    "added_tokens": [
        {"id": number, "content": word, "special": True, **_AS_IT_IS}
        for number, word in enumerate(_WORDS)
    ],
}


def images(count: int) -> list[Image.Image]:
    """Different ones, the same each time."""
    pixels = np.random.default_rng(0).integers(
        0, 256, (count, _SIDE, _SIDE, 3), dtype=np.uint8
    )
    return [Image.fromarray(image) for image in pixels]
