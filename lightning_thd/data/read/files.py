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
    return Path(path.stem).suffix if path.suffix in PACKED else path.suffix


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
    named = [isinstance(entry, Path) or _looks_like_a_path(entry) for entry in head]
    if any(named) and not all(named):
        raise ValueError(
            f"The list has {len(head)} strings, of which {sum(named)} name files, but "
            f"{str(source[named.index(False)])[:60]!r} does not. Give documents as {{'text': ...}}."
        )
    return all(named)


def _looks_like_a_path(text: str) -> bool:
    if len(text) > 1024 or "\n" in text:
        return False
    if re.match(r"([a-z][a-z0-9]*://|\.{0,2}/|~/)\S+$", text):
        return True  # find_files raises if the file does not exist
    if any(sign in text for sign in "*?[") and next(_matches(text), None):
        return True
    known = KINDS.get(suffix_of(text), "refused") != "refused"
    return (known and " " not in text) or ((known or "/" in text) and Path(text).exists())


def find_files(source: Paths, *, cache_dir: str | Path | None = None) -> list[SourceFile]:
    """List the files of a path, glob, folder or address in sorted order; a list of these keeps its order."""
    entries = [source] if isinstance(source, str | Path) else source
    files = [_fetched(name, cache_dir) for entry in entries for name in expand(entry)]
    times = Counter(file.path.resolve() for file in files)
    if twice := [path for path, count in times.items() if count > 1]:
        warn(f"{twice[0]} was given twice, perhaps by a link, so its records are used twice.", DataWarning)
    return files


def refuse_blank(files: Sequence[SourceFile]) -> None:
    """Raise if all files are empty or blank; warn, with their names, if some are."""
    blank = [file for file in files if _is_blank(file.path)]
    names = ", ".join(file.name for file in blank[:3])
    if blank and len(blank) == len(files):
        raise ValueError(f"{names} has no record: it is empty or blank. Give at least one line, file or row.")
    if blank:
        warn(
            f"{len(blank)} of {len(files)} files have no record, because they are blank: {names}", DataWarning
        )


def _is_blank(path: Path) -> bool:
    with path.open("rb") as file:
        while block := file.read(1 << 16):
            if block.strip():
                return False
    return True


def _matches(pattern: str | Path) -> Iterator[str]:
    """Yield the paths that match a glob; leading folders that exist as written are not read as patterns."""
    parts, here = Path(pattern).parts, Path()
    while parts and (here / parts[0]).exists():
        here, parts = here / parts[0], parts[1:]
    yield from glob.iglob(str(Path(glob.escape(str(here)), *parts)), recursive=True)


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
    found = sorted(name for name in _matches(path) if Path(name).is_file())
    if not found:
        raise ValueError(f"{text} does not exist, and no file matches it. Pass a file, folder or glob.")
    return found


def _in_folder(folder: Path) -> list[str]:
    if (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file():
        raise ValueError(f"{folder} was saved by datasets. Pass datasets.load_from_disk of it.")
    found = sorted(folder.rglob("*"))
    if links := [file for file in found if file.is_symlink() and file.is_dir()]:
        raise ValueError(f"{links[0]} is a link to a folder. Links are not followed; give it in a list.")
    return _data_files(folder.as_posix(), [file.as_posix() for file in found if not file.is_dir()])


def _data_files(folder: str, files: list[str]) -> list[str]:
    """Return the data files among all files of a folder; raise unless they are of one kind and one split."""
    kinds: dict[Kind, list[str]] = {}
    left_out: list[str] = []
    names = {file: file.removeprefix(f"{folder.rstrip('/')}/") for file in files}
    for file, name in names.items():
        parts = name.split("/")
        hidden = any(part.startswith((".", "_")) for part in parts)
        kind = KINDS.get(suffix_of(file), "refused")
        if kind == "refused" or hidden or _ABOUT.fullmatch(parts[-1]):
            left_out.append(file)
        else:
            kinds.setdefault(kind, []).append(file)
    if left_out:
        rank_zero_info(
            f"{folder}: these files are left out, judged by their names: "
            f"{', '.join(left_out[:4])}{' ...' * (len(left_out) > 4)}"
        )
    if not kinds:
        wanted = ", ".join(name for name, kind in KINDS.items() if kind != "refused")
        raise ValueError(f"{folder} has no data files. Wanted suffixes: {wanted}.")
    if len(kinds) > 1:
        (first, some), (second, others), *_ = kinds.items()
        raise ValueError(
            f"{folder} holds {len(some)} {first} and {len(others)} {second} files. Give a glob of one kind."
        )
    [(kind, kept)] = kinds.items()
    splits = {match[1].lower() for x in kept if (match := _SPLIT.search(names[x].split(".")[0]))}
    if kind != "text" and len(splits) > 1:
        raise ValueError(f"{folder} holds several splits: {', '.join(sorted(splits))}. Give a glob of one.")
    return kept


def _expand_remote(address: str) -> list[str]:
    fsspec = require("fsspec", feature=f"reading {address}")
    filesystem, path = fsspec.core.url_to_fs(address)
    if any(sign in path for sign in "*?[") and not filesystem.exists(path):
        matches = filesystem.glob(path, detail=True)
        found = sorted(name for name, info in matches.items() if info["type"] != "directory")
    elif filesystem.isdir(path):
        found = _data_files(path, sorted(filesystem.find(path)))
    else:
        found = [path] if filesystem.exists(path) else []
    if not found:
        raise ValueError(f"{address} does not exist, or holds no data. Check the address.")
    return [str(filesystem.unstrip_protocol(name)) for name in found]


def _fetched(name: str, cache_dir: str | Path | None) -> SourceFile:
    suffix = suffix_of(name)
    if KINDS.get(suffix) == "refused":
        raise ValueError(
            f"{name}: {suffix} files are not read. Give .jsonl, .csv, .parquet, .arrow or text, "
            "or open the file and pass a dataset."
        )
    path = Path(name)
    if "://" in name:
        fsspec = require("fsspec", feature=f"reading {name}")
        filesystem, inside = fsspec.core.url_to_fs(name)

        def fetch(out: BinaryIO) -> None:
            with fsspec.open(name, "rb") as file:
                shutil.copyfileobj(file, out, 1 << 22)

        key = {"address": name, "info": filesystem.info(inside)}
        path = _cached_file(key, without_query(name), cache_dir, fetch)
    content = content_of(path)
    if path.suffix.lower() in PACKED:
        packed = path

        def unpack(out: BinaryIO) -> None:
            with packed.open("rb") as file:
                out.writelines(unpacked(file, name, suffix=packed.suffix.lower()))

        path = _cached_file({"packed": content, "suffix": suffix}, f"x{suffix}", cache_dir, unpack)
    return SourceFile(path, name, suffix, content)


def _cached_file(
    key: dict[str, Any], name: str, cache_dir: str | Path | None, write: Callable[[BinaryIO], None]
) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:24]
    suffixes = "".join(part for part in Path(name.lower()).suffixes[-2:] if re.fullmatch(r"\.\w+", part))
    place = cache_folder(cache_dir) / f"files-{digest}" / f"data{suffixes}"

    def build(folder: Path) -> None:
        with (folder / place.name).open("wb") as out:
            write(out)

    if not place.is_file():
        build_once(place.parent, build)
    return place


def unpacked(file: BinaryIO, name: str, *, suffix: str) -> Iterator[bytes]:
    """Unpack a compressed file with all its members, and yield blocks of bytes."""
    member, begun = PACKED[suffix](), False  # begun: the member has had bytes, but has not ended
    damaged = f"{name} is damaged and cannot be unpacked"
    while left := file.read(_BLOCK_BYTES):
        while left := left if begun else left.lstrip(b"\0"):  # zeros may pad the space between members
            begun = True
            try:
                block = member.decompress(left)
            except Exception as err:  # each library raises another type of error
                raise ValueError(f"{damaged} ({err}). Fetch or make it again.") from err
            yield block
            if not member.eof:
                break
            left, member, begun = member.unused_data, PACKED[suffix](), False
    if begun:
        raise ValueError(f"{damaged} (the file ends before its last member does). Fetch or make it again.")
