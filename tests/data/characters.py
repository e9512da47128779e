"""A Hugging Face tokenizer with a token for each character; `$` ends a sequence."""

import string

from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

END = "$"


def character_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    characters = sorted({*string.printable, END})
    vocabulary = {c: i for i, c in enumerate(["?", *(c for c in characters if c != "?")])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="?", eos_token=END, chat_template=template
    )
