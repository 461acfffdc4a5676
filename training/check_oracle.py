"""Compares the PyTorch network with golden values of an independent implementation.

    python training/check_oracle.py CHECKPOINT GOLDEN.npz

CHECKPOINT is a flat (text-only) Hugging Face folder of the family. Prints the largest differences; exits 1 above 1e-4.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import numpy as np
import torch

from model import Config, Network


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    types = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    tensors = {}
    for name, entry in json.loads(raw[8:8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        data = torch.frombuffer(bytearray(raw[8 + length + begin:8 + length + end]), dtype=types[entry["dtype"]])
        tensors[name] = data.reshape(entry["shape"]).float()
    return tensors


def config_of(values: dict) -> Config:
    return Config(
        vocab_size=values["vocab_size"], hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"], num_hidden_layers=values["num_hidden_layers"],
        num_attention_heads=values["num_attention_heads"], num_key_value_heads=values["num_key_value_heads"],
        head_dim=values["head_dim"], linear_num_key_heads=values["linear_num_key_heads"],
        linear_num_value_heads=values["linear_num_value_heads"], tie_word_embeddings=values["tie_word_embeddings"],
    )


def main(folder: Path, golden_path: Path) -> int:
    network = Network(config_of(json.loads((folder / "config.json").read_text())))
    network.load_state_dict(read_safetensors(folder / "model.safetensors"), strict=True)
    golden = np.load(golden_path)
    tokens = torch.tensor(golden["tokens"].astype(np.int64))[None]
    after = torch.tensor(np.append(golden["tokens"][1:], golden["greedy"][0]).astype(np.int64))[None]
    with torch.no_grad():
        final = network.hidden(tokens)
        draft = network.draft(final, after)
        found = {"final": final, "logits": network.head(final), "mtp_hidden": draft, "mtp_logits": network.head(draft)}
    worst = 0.0
    for name, value in found.items():
        difference = float(np.abs(value[0].numpy() - golden[name]).max())
        worst = max(worst, difference)
        print(f"{name:<11} largest difference {difference:.2e}")
    return 0 if worst < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
