"""What tells tokenizers apart."""

import hashlib
import json
from typing import Any


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """The same for tokenizers that give text the same token ids: 32 hexadecimal digits of what they are made of."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
