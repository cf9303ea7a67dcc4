"""Text to token batches: sources, tokenizers, prepared token files, packing, and the loader that says which samples form a step.

The usual way in is `prepare(config)` and then `Loader(prepared.train, ...)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.data.chat import (
        CHATML_TEMPLATE as CHATML_TEMPLATE,
        ChatEncoder as ChatEncoder,
        load_template as load_template,
        save_template as save_template,
        template_of as template_of,
        variables_of as variables_of,
    )
    from phalanx.data.contents import what_changed as what_changed
    from phalanx.data.dataset import Dataset as Dataset
    from phalanx.data.loader import Loader as Loader, MicroBatch as MicroBatch, ValidationLoader as ValidationLoader
    from phalanx.data.prefetch import Prefetch as Prefetch
    from phalanx.data.preparation import PreparedData as PreparedData, prepare as prepare
    from phalanx.data.size import token_file_bytes as token_file_bytes
    from phalanx.data.sources import resolve as resolve
    from phalanx.data.template import ChatTemplate as ChatTemplate, special_tokens as special_tokens
    from phalanx.data.tokenizer import (
        EOS as EOS,
        Beginnings as Beginnings,
        ByteTokenizer as ByteTokenizer,
        FileTokenizer as FileTokenizer,
        Tokenizer as Tokenizer,
        beginnings as beginnings,
        begun_by_flag as begun_by_flag,
        continued as continued,
        load_tokenizer as load_tokenizer,
        parse_choice as parse_choice,
        parse_tokenizer as parse_tokenizer,
        read_tokenizer_file as read_tokenizer_file,
        with_ends as with_ends,
    )
else:
    __getattr__ = lazy(__name__)
