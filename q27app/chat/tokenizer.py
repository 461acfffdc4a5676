"""Text -> token ids -> text, byte-exact. The only user of the `tokenizers` library.

The library's model holds the ordinary tokens alone, so no text can ever become a control token by way of it. Control
tokens are matched here, leftmost first and longest first, and only where the caller says that text is scaffold. Text
between two control tokens is encoded as one stretch, also across the border of scaffold and content: that is what the
reference tokenizer does with the whole prompt.
"""

from __future__ import annotations

import codecs
import json
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from q27app.chat.tok_file import read_tok
from q27app.chat.vocabulary import (
    ABSENT, CONTROL, ORDINARY, Vocabulary, byte_alphabet, metadata_eos, vocabulary_from_gguf, vocabulary_from_json,
)
from q27app.errors import FileFormatError, ModelError, why

CACHE_CHARS = 4 << 20
"""Characters of encoded stretches that are remembered: a warm turn encodes only what is new."""


class Tokenizer:
    """Byte-level BPE over one vocabulary. Safe to use from several threads.

    control_ids: string -> id of every control or added token. eos_ids: ids that end a generation. vocab_size: highest
    id + 1 (a checkpoint's matrix may have more rows). identity: sha256 of the vocabulary and its rules.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.control_ids = vocabulary.control
        self.eos_ids = vocabulary.eos_ids
        self.vocab_size = len(vocabulary.tokens)
        self._vocabulary = vocabulary
        self._model = _build_model(vocabulary)
        longest_first = sorted(self.control_ids, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._byte_of = {ord(text): value for value, text in byte_alphabet().items()}
        self._cache: OrderedDict[str, array] = OrderedDict()
        self._cache_chars = 0
        self._lock = threading.Lock()

    # ------------------------------------------------------------------ sources

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From a checkpoint's metadata: `tokenizer.huggingface.json`, else the `tokenizer.ggml.*` arrays."""
        text = metadata.get("tokenizer.huggingface.json")
        if isinstance(text, (str, bytes)):
            return cls(vocabulary_from_json(text, metadata_eos(metadata)))
        if "tokenizer.ggml.tokens" in metadata:
            return cls(vocabulary_from_gguf(metadata))
        raise ModelError(
            "the checkpoint's metadata holds no tokenizer (tokenizer.huggingface.json or tokenizer.ggml.tokens).",
            "Put its NAME.tok or NAME.tokenizer.json beside the file.",
        )

    @classmethod
    def from_json_file(cls, path: Path | str) -> Tokenizer:
        """From a tokenizer.json file."""
        try:
            return cls(vocabulary_from_json(Path(path).read_bytes()))
        except OSError as error:
            raise FileFormatError(f"{path}: cannot be read: {why(error)}.") from error

    @classmethod
    def from_tok_file(cls, path: Path | str) -> Tokenizer:
        """From a `.tok` file."""
        return cls(read_tok(path))

    @classmethod
    def from_file(cls, path: Path | str, read_metadata: Callable[[Path], Mapping[str, Any]] | None = None) -> Tokenizer:
        """By ending: .json, .tok; any other file goes through `read_metadata`, which opens a .gguf or .q27."""
        path = Path(path)
        if path.suffix == ".json":
            return cls.from_json_file(path)
        if path.suffix == ".tok":
            return cls.from_tok_file(path)
        if read_metadata is None:
            raise FileFormatError(f"{path}: not a tokenizer file; expected one that ends in .json or .tok.")
        return cls.from_metadata(read_metadata(path))

    # ------------------------------------------------------------------ text -> ids

    @property
    def identity(self) -> str:
        return self._vocabulary.identity

    def encode(self, text: str, control: bool = False) -> list[int]:
        """Ids of `text`. control: the strings of control tokens become them; otherwise nothing ever does."""
        return self.encode_pieces([(text, control)])

    def encode_pieces(self, pieces: Iterable[tuple[str, bool]]) -> list[int]:
        """Ids of the joined text of (text, is_scaffold) pieces.

        A control token arises only from a string that lies wholly in neighbouring scaffold pieces. For content without
        such strings the result equals encode(joined text, control=True).
        """
        runs: list[tuple[list[str], bool]] = []
        for text, is_scaffold in pieces:
            if runs and runs[-1][1] == is_scaffold:
                runs[-1][0].append(text)
            else:
                runs.append(([text], is_scaffold))
        stretches: list[list[str]] = [[]]
        controls: list[int] = []
        for parts, is_scaffold in runs:
            text, start = "".join(parts), 0
            if is_scaffold and self._control is not None:
                for match in self._control.finditer(text):
                    stretches[-1].append(text[start : match.start()])
                    stretches.append([])
                    controls.append(self.control_ids[match.group()])
                    start = match.end()
            stretches[-1].append(text[start:])
        encoded = self._encode_stretches(["".join(parts) for parts in stretches])
        ids = list(encoded[0])
        for control, stretch in zip(controls, encoded[1:], strict=True):
            ids.append(control)
            ids.extend(stretch)
        return ids

    def _encode_stretches(self, texts: list[str]) -> list[Sequence[int]]:
        """Ids of texts without control tokens; remembered ones are not encoded again."""
        found: dict[str, Sequence[int]] = {"": ()}
        with self._lock:
            for text in texts:
                known = self._cache.get(text)
                if known is not None:
                    self._cache.move_to_end(text)
                    found[text] = known
        missing = [text for text in dict.fromkeys(texts) if text not in found]
        if missing:
            clean = [_without_surrogates(text) for text in missing]
            results = self._model.encode_batch_fast(clean, add_special_tokens=False)
            fresh = {text: array("I", result.ids) for text, result in zip(missing, results, strict=True)}
            found.update(fresh)
            self._remember(fresh)
        return [found[text] for text in texts]

    def _remember(self, fresh: Mapping[str, array]) -> None:
        with self._lock:
            for text, ids in fresh.items():
                if text not in self._cache and len(text) <= CACHE_CHARS // 2:
                    self._cache[text] = ids
                    self._cache_chars += len(text) + 64
            while self._cache_chars > CACHE_CHARS:
                text, _ = self._cache.popitem(last=False)
                self._cache_chars -= len(text) + 64

    # ------------------------------------------------------------------ ids -> text

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, maybe a part of a character; b"" for control tokens and unknown ids."""
        kinds = self._vocabulary.kinds
        if not 0 <= token < len(kinds) or kinds[token] in (CONTROL, ABSENT):
            return b""
        text = self._vocabulary.tokens[token]
        if kinds[token] == ORDINARY:
            try:
                return bytes(map(self._byte_of.__getitem__, map(ord, text)))
            except KeyError:
                pass
        return text.encode("utf-8", "replace")

    def token_name(self, token: int) -> str:
        """A token for people to read: control tokens by name, parts of a character as U+FFFD."""
        if 0 <= token < self.vocab_size and self._vocabulary.kinds[token] == CONTROL:
            return self._vocabulary.tokens[token]
        return self.token_bytes(token).decode("utf-8", "replace")

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; control tokens give nothing, invalid UTF-8 gives U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")


class Detokenizer:
    """Ids -> text as they arrive: never a part of a character, joined pieces equal `decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text that these ids complete."""
        return self._decoder.decode(b"".join(map(self._token_bytes, ids)))

    def flush(self) -> str:
        """The end: an unfinished character becomes one U+FFFD."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def _without_surrogates(text: str) -> str:
    """Text that has a UTF-8 form: surrogate pairs are joined, lone ones become U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _build_model(vocabulary: Vocabulary) -> Any:
    """The library's tokenizer over the ordinary tokens. Raises FileFormatError with the library's reason."""
    import tokenizers

    frame = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": vocabulary.normalizer, "pre_tokenizer": vocabulary.pre_tokenizer,
        "post_processor": None, "decoder": None, "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    try:
        model = tokenizers.Tokenizer.from_str(json.dumps(frame))
        model.model = tokenizers.models.BPE(
            vocab=vocabulary.ordinary, merges=vocabulary.merges, **vocabulary.options
        )
    except Exception as error:  # the library raises bare Exception
        raise FileFormatError(
            f"the tokenizer cannot be built: {str(error)[:300]}.",
            "The vocabulary, its merges or its rules are damaged.",
        ) from error
    return model
