"""Writes trained weights as a Hugging Face folder: config.json, model.safetensors, tokenizer.json, tokenizer_config.json.

    python training/export.py WEIGHTS.pt TOKENIZER.json FOLDER
    q27app convert FOLDER q27app/data/demo.q27 --tier q8

The folder is named `q27app-demo` by its config, so that it gets q27app's own chat template with tool calls in JSON; it
carries no template of its own. Matrices are stored in float16 or float32 as they come, A_log and norms in float32.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from model import Config

NAME = "q27app-demo"
TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One shard: length of the header, header, then the tensors' bytes in order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())


def export(weights: Mapping[str, Tensor], config: Config, tokenizer: str, folder: Path) -> None:
    """weights: state_dict of `Network`. tokenizer: tokenizer.json text. The folder is made if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    control = {token["content"]: token["id"] for token in json.loads(tokenizer)["added_tokens"]}
    values = config.to_hf() | {
        "_name_or_path": NAME, "eos_token_id": control["<|im_end|>"], "pad_token_id": control["<|endoftext|>"],
    }
    (folder / "config.json").write_text(json.dumps(values, indent=1) + "\n")
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    side = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(side, indent=1) + "\n")
    write_safetensors(folder / "model.safetensors", weights)


def main(arguments: list[str]) -> None:
    weights_path, tokenizer_path, folder = map(Path, arguments)
    saved = torch.load(weights_path, map_location="cpu", weights_only=False)
    export(saved["weights"], saved["config"], tokenizer_path.read_text(encoding="utf-8"), folder)


if __name__ == "__main__":
    main(sys.argv[1:])
