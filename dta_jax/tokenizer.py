"""Text to token ids and back, by a folder's `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers

from dta_jax.errors import InputError
from dta_jax.hf_config import read_json

TOKENIZER_FILE: Final = "tokenizer.json"
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
_SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer that adds nothing: neither a first token nor padding nor truncation.

    Attributes:
      folder: where it is from; errors name it.
      special: text of `bos_token`, `eos_token`, ... as far as the folder names them.
    """

    folder: Path
    special: Mapping[str, str]
    _fast: tokenizers.Tokenizer

    def encode(self, text: str) -> np.ndarray:
        """Token ids int32[n]. Control tokens in the text, like `<|im_end|>`, become control tokens."""
        return np.array(self._fast.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray, *, skip_special: bool = False) -> str:
        """The text of token ids; bytes that are no UTF-8 become replacement characters."""
        return self._fast.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def token_id(self, token: str) -> int:
        """The id of one token, e.g. `</think>`.

        Raises:
          InputError: there is no such token.
        """
        found = self._fast.token_to_id(token)
        if found is None:
            raise InputError(self.folder / TOKENIZER_FILE, token, expected="a token", actual="no such token")
        return found


def load_tokenizer(folder: str | Path, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer of a Hugging Face folder.

    Args:
      folder: a folder with `tokenizer.json` and, usually, `tokenizer_config.json`.
      vocab_size: the model's; None if there is none to compare with.

    Raises:
      InputError: no tokenizer or a damaged one, an id that the model has no embedding for, or an added token
        on which the two files disagree.
    """
    folder = Path(folder)
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise InputError(folder, TOKENIZER_FILE, expected="a tokenizer", actual="no such file")
    try:
        fast = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise InputError(folder, TOKENIZER_FILE, expected="a tokenizer", actual=error) from None
    fast.no_truncation()
    fast.no_padding()
    highest = max(fast.get_vocab(with_added_tokens=True).values(), default=-1)
    if vocab_size is not None and highest >= vocab_size:
        expected = f"ids below the model's vocab_size={vocab_size}"
        raise InputError(folder, TOKENIZER_FILE, expected=expected, actual=f"id {highest}")
    values = read_tokenizer_config(folder)
    for key, token in (values.get("added_tokens_decoder") or {}).items():
        found = fast.token_to_id(_text(token))
        if found != int(key):
            field = f"added token {_text(token)!r}"
            expected = f"id {key}, as in {TOKENIZER_CONFIG_FILE}"
            raise InputError(path, field, expected=expected, actual=f"id {found}")
    special = {name: _text(values[name]) for name in _SPECIAL if values.get(name) is not None}
    return Tokenizer(folder, special, fast)


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """The contents of `tokenizer_config.json`; empty if there is none."""
    if not (folder / TOKENIZER_CONFIG_FILE).exists():
        return {}
    return read_json(folder / TOKENIZER_CONFIG_FILE, "a tokenizer config")


def _text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]
