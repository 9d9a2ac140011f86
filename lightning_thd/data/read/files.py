"""Paths, globs, folders and addresses -> files on this machine, downloaded and unpacked if necessary."""

from __future__ import annotations

import bz2
import glob
import hashlib
import json
import lzma
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_thd._imports import require
from lightning_thd.data.store.cache import build_once, cache_folder, content_of
from lightning_thd.warnings import DataWarning, warn

Kind = Literal["JSONL", "JSON", "column", "table", "text", "refused"]
_SUFFIXES: dict[Kind, str] = {
    "JSONL": ".jsonl .ndjson",
    "JSON": ".json",
    "column": ".parquet .arrow .feather",
    "table": ".csv .tsv",
    "text": ".txt .md .rst .py .c .h .cpp .html .xml .log .tex",
    "refused": ".zip .tar .npy .npz .bin .pt .safetensors .pdf .docx .png .jpg",
}
KINDS: dict[str, Kind] = {suffix: kind for kind, row in _SUFFIXES.items() for suffix in row.split()}
# Suffix of a compressed file -> a function that returns a decompressor for one member of the file.
PACKED: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
    ".zst": lambda: require("zstandard", feature="reading .zst").ZstdDecompressor().decompressobj(),
}
# Names of files that describe the data of a folder. They must match as a whole: a longer name may be data.
_ABOUT = re.compile(
    r"(readme|licen[cs]e|citation|changelog|contributing)(\.(md|txt|rst|html))?"
    r"|(dataset_infos?|state|dataset_dict|manifest)\.json",
    re.IGNORECASE,
)
_SPLIT = re.compile(r"(?:^|[-_./])(train|validation|valid|val|dev|test|eval)(?=[-_./]|$)", re.IGNORECASE)

# Bytes of a compressed file that are unpacked at once. They may become a thousand times as many.
_BLOCK_BYTES = 1 << 14
_CHECKED_ENTRIES = 1000  # entries of a list that are examined for being paths

Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file on this machine."""

    path: Path  # the unpacked content
    name: str  # the path or address that the user gave, or a file found below it
    suffix: str  # the suffix of the content in lower case: ``.jsonl`` for ``a.JSONL.gz``
    content: str  # a hash of the content


def suffix_of(name: str) -> str:
    """Return the suffix of a file's content: ``.jsonl`` for ``a.jsonl.gz``."""
    path = Path(without_query(name).lower())
    is_packed = path.suffix in PACKED
    return Path(path.stem).suffix if is_packed else path.suffix


def without_query(name: str) -> str:
    """Return a web address without its query, and any other name as it is."""
    return re.split("[?#]", name)[0] if re.match("https?://", name) else name


def is_paths(source: object) -> bool:
    """Return whether a source is a path or a list of paths; raise if some strings of a list are no paths."""
    if isinstance(source, str | Path):
        return True
    if not isinstance(source, list | tuple) or not source:
        return False

    head = source[:_CHECKED_ENTRIES]  # to look for a million files would take seconds
    if not all(isinstance(entry, str | Path) for entry in head):
        return False

    name_files = [isinstance(entry, Path) or _looks_like_a_path(entry) for entry in head]
    if any(name_files) and not all(name_files):
        document = str(source[name_files.index(False)])
        raise ValueError(
            f"The list has {len(head)} strings, of which {sum(name_files)} name files, but "
            f"{document[:60]!r} does not. Give documents as {{'text': ...}}."
        )
    return all(name_files)


def _looks_like_a_path(text: str) -> bool:
    if len(text) > 1024 or "\n" in text:
        return False
    if re.match(r"([a-z][a-z0-9]*://|\.{0,2}/|~/)\S+$", text):
        return True  # find_files raises if the file does not exist
    if any(sign in text for sign in "*?[") and next(_matches(text), None):
        return True
    has_suffix = KINDS.get(suffix_of(text), "refused") != "refused"
    if has_suffix and " " not in text:
        return True
    return (has_suffix or "/" in text) and Path(text).exists()


def find_files(source: Paths, *, cache_dir: str | Path | None = None) -> list[SourceFile]:
    """List the files of a path, glob, folder or address in sorted order; a list of these keeps its order."""
    entries = [source] if isinstance(source, str | Path) else source
    files = [_fetched(name, cache_dir) for entry in entries for name in expand(entry)]
    times = Counter(file.path.resolve() for file in files)
    twice = [path for path, count in times.items() if count > 1]
    if twice:
        warn(f"{twice[0]} was given twice, perhaps by a link, so its records are used twice.", DataWarning)
    return files


def refuse_blank(files: Sequence[SourceFile]) -> None:
    """Raise if all files are empty or blank; warn, with their names, if some are."""
    blank = [file.name for file in files if is_blank(file.path)]
    refuse_all_blank(blank, len(files))
    if blank:
        warn(name_blank(blank, len(files)), DataWarning)


def refuse_all_blank(blank: Sequence[str], files: int) -> None:
    """Raise, with names, if all of a number of files are blank."""
    if blank and len(blank) == files:
        names = ", ".join(blank[:3])
        raise ValueError(f"{names} has no record: it is empty or blank. Give at least one line, file or row.")


def name_blank(blank: Sequence[str], files: int) -> str:
    """Return a sentence with the names of blank files."""
    names = ", ".join(blank[:3])
    return f"{len(blank)} of {files} files have no record, because they are blank: {names}"


def is_blank(path: Path) -> bool:
    """Return whether a file is empty, or has only blanks and line ends."""
    with path.open("rb") as file:
        while block := file.read(1 << 16):
            if block.strip():
                return False
    return True


def _matches(pattern: str | Path) -> Iterator[str]:
    """Yield the paths that match a glob; leading folders that exist as written are not read as patterns."""
    folder = Path()
    parts = list(Path(pattern).parts)
    while parts and (folder / parts[0]).exists():
        folder /= parts.pop(0)
    yield from glob.iglob(str(Path(glob.escape(str(folder)), *parts)), recursive=True)


def expand(source: str | Path) -> list[str]:
    """List the files of a path, glob, folder or address, in sorted order."""
    text = str(source)
    if "://" in text:
        return _expand_remote(text)
    path = Path(source).expanduser()
    if path.is_dir():
        return _in_folder(path)
    if path.is_file():
        return [str(path)]

    files = sorted(name for name in _matches(path) if Path(name).is_file())
    if not files:
        raise ValueError(f"{text} does not exist, and no file matches it. Pass a file, folder or glob.")
    return files


def _in_folder(folder: Path) -> list[str]:
    if (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file():
        raise ValueError(f"{folder} was saved by datasets. Pass datasets.load_from_disk of it.")

    paths = sorted(folder.rglob("*"))
    links = [path for path in paths if path.is_symlink() and path.is_dir()]
    if links:
        raise ValueError(f"{links[0]} is a link to a folder. Links are not followed; give it in a list.")
    return _data_files(folder.as_posix(), [path.as_posix() for path in paths if not path.is_dir()])


def _data_files(folder: str, files: list[str]) -> list[str]:
    """Return the data files among all files of a folder; raise unless they are of one kind and one split."""
    of_kinds: dict[Kind, list[str]] = {}
    left_out: list[str] = []
    for file in files:
        kind = _kind_in_folder(_name_below(folder, file))
        if kind is None:
            left_out.append(file)
        else:
            of_kinds.setdefault(kind, []).append(file)

    if left_out:
        more = " ..." if len(left_out) > 4 else ""
        rank_zero_info(
            f"{folder}: these files are left out, judged by their names: {', '.join(left_out[:4])}{more}"
        )
    if not of_kinds:
        wanted = ", ".join(name for name, kind in KINDS.items() if kind != "refused")
        raise ValueError(f"{folder} has no data files. Wanted suffixes: {wanted}.")
    if len(of_kinds) > 1:
        (first, of_first), (second, of_second), *_ = of_kinds.items()
        raise ValueError(
            f"{folder} holds {len(of_first)} {first} and {len(of_second)} {second} files. "
            "Give a glob of one kind."
        )

    [(kind, data_files)] = of_kinds.items()
    if kind != "text":  # a document may have any name
        _refuse_several_splits(folder, data_files)
    return data_files


def _name_below(folder: str, file: str) -> str:
    return file.removeprefix(f"{folder.rstrip('/')}/")


def _kind_in_folder(name: str) -> Kind | None:
    """Return the kind of a file by its path below a folder; None if it is hidden, or holds no data."""
    parts = name.split("/")
    is_hidden = any(part.startswith((".", "_")) for part in parts)
    kind = KINDS.get(suffix_of(name), "refused")
    return None if kind == "refused" or is_hidden or _ABOUT.fullmatch(parts[-1]) else kind


def _refuse_several_splits(folder: str, files: list[str]) -> None:
    """Raise if files or their folders have the names of several splits, such as train and test."""
    splits = set()
    for file in files:
        match = _SPLIT.search(_name_below(folder, file).split(".")[0])
        if match:
            splits.add(match[1].lower())
    if len(splits) > 1:
        raise ValueError(f"{folder} holds several splits: {', '.join(sorted(splits))}. Give a glob of one.")


def _expand_remote(address: str) -> list[str]:
    """List the files at an address, which may be a file, a folder or a glob, through fsspec."""
    fsspec = require("fsspec", feature=f"reading {address}")
    filesystem, path = fsspec.core.url_to_fs(address)
    if any(sign in path for sign in "*?[") and not filesystem.exists(path):
        matches = filesystem.glob(path, detail=True)
        files = sorted(name for name, info in matches.items() if info["type"] != "directory")
    elif filesystem.isdir(path):
        files = _data_files(path, sorted(filesystem.find(path)))
    else:
        files = [path] if filesystem.exists(path) else []
    if not files:
        raise ValueError(f"{address} does not exist, or holds no data. Check the address.")
    return [str(filesystem.unstrip_protocol(name)) for name in files]


def _fetched(name: str, cache_dir: str | Path | None) -> SourceFile:
    """Return a file, downloaded and unpacked into the cache if necessary."""
    suffix = suffix_of(name)
    if KINDS.get(suffix) == "refused":
        raise ValueError(
            f"{name}: {suffix} files are not read. Give .jsonl, .csv, .parquet, .arrow or text, "
            "or open the file and pass a dataset."
        )

    path = _downloaded(name, cache_dir) if "://" in name else Path(name)
    content = content_of(path)
    if path.suffix.lower() in PACKED:
        path = _unpacked_copy(path, name, suffix, content, cache_dir)
    return SourceFile(path, name, suffix, content)


def _downloaded(address: str, cache_dir: str | Path | None) -> Path:
    fsspec = require("fsspec", feature=f"reading {address}")
    filesystem, path = fsspec.core.url_to_fs(address)

    def fetch(out: BinaryIO) -> None:
        with fsspec.open(address, "rb") as file:
            shutil.copyfileobj(file, out, 1 << 22)  # 4 MiB at once

    # The information about a file holds its size, and mostly a time or hash, which change with its content.
    key = {"address": address, "info": filesystem.info(path)}
    return _cached_file(key, without_query(address), cache_dir, fetch)


def _unpacked_copy(path: Path, name: str, suffix: str, content: str, cache_dir: str | Path | None) -> Path:
    def unpack(out: BinaryIO) -> None:
        with path.open("rb") as file:
            out.writelines(unpacked(file, name, suffix=path.suffix.lower()))

    return _cached_file({"packed": content, "suffix": suffix}, f"x{suffix}", cache_dir, unpack)


def _cached_file(
    key: dict[str, Any], name: str, cache_dir: str | Path | None, write: Callable[[BinaryIO], None]
) -> Path:
    """Return the file that ``write`` makes, from the cache; it has the suffixes of ``name``."""
    text = json.dumps(key, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]
    suffixes = [part for part in Path(name.lower()).suffixes[-2:] if re.fullmatch(r"\.\w+", part)]
    path = cache_folder(cache_dir) / f"files-{digest}" / f"data{''.join(suffixes)}"

    def build(folder: Path) -> None:
        with (folder / path.name).open("wb") as out:
            write(out)

    if not path.is_file():
        build_once(path.parent, build)
    return path


def unpacked(file: BinaryIO, name: str, *, suffix: str) -> Iterator[bytes]:
    """Unpack a compressed file with all its members, and yield blocks of bytes.

    Args:
        file: the compressed file.
        name: names the file in errors.
        suffix: a key of ``PACKED``.

    Raises:
        ValueError: the file is damaged or ends too early.
    """
    damaged = f"{name} is damaged and cannot be unpacked"
    member = PACKED[suffix]()
    begun = False  # whether the member has had bytes, but has not ended

    while left := file.read(_BLOCK_BYTES):
        while True:
            if not begun:
                left = left.lstrip(b"\0")  # zeros may pad the space between members
            if not left:
                break
            begun = True
            try:
                block = member.decompress(left)
            except Exception as err:  # each library raises another type of error
                raise ValueError(f"{damaged} ({err}). Fetch or make it again.") from err
            yield block
            if not member.eof:
                break
            left = member.unused_data
            member = PACKED[suffix]()
            begun = False

    if begun:
        raise ValueError(f"{damaged} (the file ends before its last member does). Fetch or make it again.")
