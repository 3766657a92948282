"""A GGUF file as a Hugging Face directory in float32, the same weights dequantised: what the converters read.

python checkpoint.py FILE.gguf DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers


def main(gguf: Path, out: Path) -> None:
    """transformers will not save what it read from a GGUF file, so a fresh model takes the weights."""
    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    read = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = read.generation_config
    model.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
