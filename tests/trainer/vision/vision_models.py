"""Tiny vision models, as folders and in memory, and images for them."""

from __future__ import annotations

import functools
import io
import json
from pathlib import Path
from random import Random
from typing import Any

import torch
from PIL import Image as Pictures
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from gateway.types import Image
from tests.trainer.tokenizer_families import VISION_FAMILIES, save_tokenizer_folder
from trainer.engine.torch.torch_engine import TorchEngine
from trainer.template import Template
from trainer.vision.image_processor import ImageProcessor

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
PATCH = 4
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
}
EYES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"in_chans": 3, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
    "qwen2_5_vl": {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "fullatt_block_indexes": [1]},
    "qwen3_vl": {
        "hidden_size": 32,
        "out_hidden_size": 32,
        "intermediate_size": 48,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    },
}


def seeing_model(
    folder: Path, kind: str = "qwen2_5_vl", template: str = "seeing", *, patch: int = PATCH, frames: int = 1
) -> Path:
    """A model's folder as `save_pretrained` writes it, its weights random. A patch is a square of so many pixels, of so
    many frames at once."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer_folder(VISION_FAMILIES[template], folder)
    told = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(told | {"pad_token": "<|endoftext|>"}))
    made = Template.load(folder, "hermes")
    names = made.tokenizer.control_ids
    text = dict(TEXT, vocab_size=max(names.values()) + 1, eos_token_id=names["<|im_end|>"])
    if kind == "qwen3_vl":
        text |= {"head_dim": 8, "rope_parameters": TEXT["rope_parameters"] | {"mrope_interleaved": True}}
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        text_config=text,
        vision_config={
            "depth": 2,
            "num_heads": 2,
            "patch_size": patch,
            "spatial_merge_size": 2,
            "temporal_patch_size": frames,
            "initializer_range": 0.3,
            **EYES[kind] | ({"window_size": 4 * patch} if kind == "qwen2_5_vl" else {}),
        },
        image_token_id=names["<|image_pad|>"],
        video_token_id=names["<|video_pad|>"],
        vision_start_token_id=names["<|vision_start|>"],
        vision_end_token_id=names["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    model = AutoModelForImageTextToText.from_config(config)  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    model.save_pretrained(folder)
    sizes = {
        "patch_size": patch,
        "merge_size": 2,
        "temporal_patch_size": frames,
        "image_processor_type": "Qwen2VLImageProcessor",
    }
    bounds = {"size": {"shortest_edge": 4 * patch**2, "longest_edge": 256 * patch**2}}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes | bounds))
    return folder


def picture(seed: int = 0, width: int = 16, height: int = 16) -> Image:
    """Of noise, so that no two are alike."""
    return _file(Pictures.frombytes("RGB", (width, height), Random(seed).randbytes(3 * width * height)), "PNG")


def odd_pictures(width: int = 56, height: int = 84) -> dict[str, Image]:
    """Of noise, in files that programs open in ways of their own, each by what is odd about it."""
    noise = [Pictures.frombytes("L", (width, height), Random(seed).randbytes(width * height)) for seed in range(4)]
    grey, red, green, clear = noise
    turned = Pictures.Exif()
    turned[274] = 6  # its orientation: held upright, the camera lay on its side
    shares = [level * 257 for level in grey.tobytes()]
    wide = Pictures.frombytes("I;16", (width, height), b"".join(share.to_bytes(2, "little") for share in shares))
    palette = Pictures.merge("RGB", (grey, red, green)).quantize(16)
    return {
        "RGBA": _file(Pictures.merge("RGBA", (grey, red, green, clear)), "PNG"),
        "LA": _file(Pictures.merge("LA", (grey, clear)), "PNG"),
        "palette": _file(palette, "PNG", transparency=3),
        "one clear colour": _file(Pictures.merge("RGB", (grey, grey, grey)), "PNG", transparency=(7, 7, 7)),
        "sixteen bits": _file(wide, "PNG"),
        "turned": _file(Pictures.merge("RGB", (grey, red, green)), "JPEG", exif=turned),
    }


def _file(made: Pictures.Image, form: str, **options: Any) -> Image:
    out = io.BytesIO()
    made.save(out, format=form, **options)
    return Image(out.getvalue(), f"image/{form.lower()}")


@functools.cache
def loaded(folder: Path) -> PreTrainedModel:
    from trainer.model import load_model

    return load_model(folder)


def engine_of(folder: Path, eyes: ImageProcessor | None = None, **settings: Any) -> TorchEngine:
    return TorchEngine(loaded(folder), image_processor=eyes or ImageProcessor.load(folder), **settings)


@torch.no_grad()
def logprobs(folder: Path, eyes: ImageProcessor, ids: tuple[int, ...], images: list[Image]) -> list[float]:
    """Of all ids but the first, pictures as wide as they are, by the model's own way from pixels to logits."""
    model = loaded(folder)
    sight = eyes.prepare_prompt(ids, images)
    wide = torch.tensor([[token if token >= 0 else eyes.family.image_id for token in sight.ids]])
    pictures = [eyes.prepare(image) for image in images]
    seen: dict[str, Any] = {}
    if pictures:
        seen["pixel_values"] = torch.cat([one.pixels for one in pictures])
        seen["image_grid_thw"] = torch.tensor([one.grid for one in pictures])
        seen["mm_token_type_ids"] = (wide == eyes.family.image_id).int()
    logits = model(input_ids=wide, **seen).logits[0, :-1].float()
    return [float(value) for value in logits.log_softmax(-1).gather(1, wide[0, 1:, None])[:, 0]]
