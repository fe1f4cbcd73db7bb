"""A tiny tokenizer and chat template in the manner of Qwen3's, written as a Hugging Face folder."""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ċ Ċ", "o k")
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"

# Earlier thinking is dropped up to the last user message; results of tools share one user block.
TEMPLATE = """\
{%- set ns = namespace(asked=-1) %}
{%- for message in messages %}
  {%- if message.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}
  {{- '<|im_start|>system\\n' }}
  {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{% endif %}
  {%- for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}
  {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
    {{- '\\n[result] ' + message.content }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
  {%- elif message.role == 'assistant' %}
    {%- set content = message.content %}
    {%- if loop.index0 < ns.asked %}
      {%- set content = content.split('</think>')[-1] %}
      {%- if content != message.content %}{% set content = content.lstrip('\\n') %}{% endif %}
    {%- endif %}
    {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
  {%- elif message.role == 'user' or not tools %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\\n' }}
  {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""


def write_chat_folder(folder: Path) -> Path:
    """Writes `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *(merge.replace(" ", "") for merge in MERGES)]
    merges = [tuple(merge.split()) for merge in MERGES]
    fast = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(token, special=True) for token in CONTROL])
    fast.add_tokens([AddedToken(token, special=False) for token in MARKS])
    fast.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": {"__type": "AddedToken", "content": "<|endoftext|>", "special": True},
        "added_tokens_decoder": {
            str(fast.token_to_id(token)): {"content": token, "special": token in CONTROL}
            for token in (*CONTROL, *MARKS)
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
