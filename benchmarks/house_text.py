"""The text of the package -> what a reader has to know beside it: each count with the places that it found.

Every count reads syntax trees of ``lightning_thd/``, so that it also counts a checkout that cannot be
imported. The definitions are the functions below; ``benchmarks/house.py`` prints them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

PACKAGE = "lightning_thd"
# The table of other packages' private names; its rows count as uses.
TABLE = "_private.py"
# Names of the standard library that begin with an underscore and are documented.
DOCUMENTED = {"_asdict", "_exit", "_field_defaults", "_fields", "_fields_", "_make", "_replace"}
# Attributes that hold source, bytecode, stacks or autograd's graph, and functions that read them.
READERS = {
    "__code__": "bytecode",
    "__globals__": "bytecode",
    "co_consts": "bytecode",
    "co_names": "bytecode",
    "get_instructions": "bytecode",
    "getclosurevars": "bytecode",
    "getsource": "source",
    "getsourcelines": "source",
    "getsourcefile": "source",
    "extract_stack": "stack",
    "_getframe": "stack",
    "currentframe": "stack",
    "next_functions": "autograd",
}
# These read source or a stack for a message, or read a user's files as data. They decide nothing.
NOT_DECIDING = {"_user_code.py", "data/read/text.py"}
# A subclass of one of these is a variant; so is a step beside a batch. Resumable is what Planner was before.
FACES = {"Boundaries", "Planner", "Prefixes", "Resumable", "StepPlan", "THDBatch", "THDStep"}
VARIANT_OF_A_BATCH = {"THDStep", "SharedLengths"}
CHANGING = {
    "add",
    "append",
    "clear",
    "discard",
    "extend",
    "insert",
    "pop",
    "popitem",
    "popleft",
    "remove",
    "setdefault",
    "update",
}

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Place:
    """One place of one count: the file below the package, the line, and the name that is counted."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        """Return it as editors read places."""
        return f"{self.file}:{self.line} {self.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """A module: its path below the package, its tree, and the parent of each node."""

    path: str
    tree: ast.Module
    parents: Mapping[ast.AST, ast.AST]

    def walk(self, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        """Yield the nodes of some kinds."""
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what a node stands in, from the inside out."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def function(self, node: ast.AST) -> str:
        """Return the dotted name of the function or class that a node stands in, "" at module level."""
        names = [x.name for x in self.above(node) if isinstance(x, ast.FunctionDef | ast.ClassDef)]
        return ".".join(reversed(names))

    def runs_at_import(self, node: ast.AST) -> bool:
        """Return whether importing the module runs a node: a type checker's imports and bodies do not run."""
        child = node
        for parent in self.above(node):
            if isinstance(parent, Function) and child in _body_of(parent):
                return False
            if isinstance(parent, ast.If) and "TYPE_CHECKING" in ast.dump(parent.test):
                return False
            child = parent
        return True

    def place(self, node: ast.AST, name: str) -> Place:
        """Return a node's place."""
        return Place(file=self.path, line=getattr(node, "lineno", 0), name=name)


def _body_of(function: Function) -> list[ast.AST]:
    if isinstance(function, ast.Lambda):
        return [function.body]
    return list(function.body)


def read_package(checkout: Path) -> list[File]:
    """Parse each module of a checkout."""
    root = checkout / PACKAGE
    files = []
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_text())
        parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
        files.append(File(path=path.relative_to(root).as_posix(), tree=tree, parents=parents))
    return files


# ---- names of other packages that begin with an underscore


def is_private(name: str) -> bool:
    """Return whether a name begins with one underscore; _thd begins this package's marks on others."""
    private = re.fullmatch(r"_[A-Za-z]\w*", name) is not None
    return private and name not in DOCUMENTED and not name.startswith("_thd")


def _defined(files: list[File]) -> set[str]:
    """Return the private names that this package gives to something of its own."""
    names: set[str] = set()
    for file in files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.alias) and node.asname:
                names.add(node.asname)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    names.add(node.attr)
            elif isinstance(node, ast.Assign) and "__slots__" in ast.dump(node.targets[0]):
                names.update(x.value for x in ast.walk(node) if isinstance(x, ast.Constant))
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                names.update(alias.name for alias in node.names)
    return {name for name in names if is_private(name)}


def _is_aten(node: ast.Attribute) -> bool:
    chain = f".{ast.unparse(node)}"
    return ".aten." in chain


def _is_a_name(file: File, node: ast.Constant) -> bool:
    """Return whether a string may name an attribute: it is no part, beginning or end of another string."""
    parent = file.parents[node]
    if isinstance(parent, ast.JoinedStr | ast.BinOp):
        return False
    call = next((x for x in file.above(node) if isinstance(x, ast.Call)), None)
    if call is None or not isinstance(call.func, ast.Attribute):
        return True
    return call.func.attr not in (
        "endswith",
        "startswith",
        "removesuffix",
        "removeprefix",
        "replace",
        "split",
    )


def _dotted(node: ast.Constant) -> list[str]:
    """Return the parts of a string that is a dotted name, or its beginning or end in an f-string."""
    text = node.value if isinstance(node.value, str) else ""
    is_file = text.endswith(".py")  # of this package, in the table
    return text.split(".") if re.fullmatch(r"[\w.]+", text) and not is_file else []


def foreign_names(
    files: list[File], inherited: Mapping[str, set[str]]
) -> tuple[list[Place], list[Place], list[Place]]:
    """List uses of other packages' private names.

    Args:
        files: the package's.
        inherited: file -> private names that its classes inherit from other packages, or override.

    Returns:
        All uses except of operators; those among them that run at import; uses of private aten operators.
    """
    import torch

    aten = torch.ops.aten

    ours = _defined(files)
    uses: list[Place] = []
    at_import: list[Place] = []
    operators: list[Place] = []

    def use(file: File, node: ast.AST, name: str) -> None:
        place = file.place(node, name)
        uses.append(place)
        if file.runs_at_import(node) and not isinstance(node, ast.Constant):
            at_import.append(place)

    for file in files:
        foreign = inherited.get(file.path, set())
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                module = node.module or ""
                if module.startswith((PACKAGE, "__future__")):
                    continue
                for part in filter(is_private, module.split(".")):
                    use(file, node, part)
                for alias in node.names:
                    if is_private(alias.name):
                        use(file, node, alias.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    parts = alias.name.split(".")
                    for part in filter(is_private, parts if parts[0] != PACKAGE else []):
                        use(file, node, part)
            elif isinstance(node, ast.Attribute) and is_private(node.attr):
                if _is_aten(node):
                    operators.append(file.place(node, node.attr))
                elif node.attr not in ours or node.attr in foreign:
                    use(file, node, node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if file.path == TABLE:  # its rows are dotted names, which private() takes by such strings
                    for part in filter(is_private, _dotted(node)):
                        use(file, node, part)
                    continue
                name = node.value.removeprefix("aten::")
                if not is_private(name) or name in ours or not _is_a_name(file, node):
                    continue
                if hasattr(aten, name):
                    operators.append(file.place(node, name))
                else:
                    use(file, node, name)
            elif isinstance(node, ast.FunctionDef) and is_private(node.name) and node.name in foreign:
                uses.append(file.place(node, node.name))
    return sorted(uses), sorted(at_import), sorted(operators)


# ---- decisions by source, bytecode, AST or stack


def readers_of_code(files: list[File]) -> list[Place]:
    """List the functions that read source, bytecode, a stack, an AST or autograd's graph."""
    places: dict[tuple[str, str], Place] = {}
    for file in files:
        if file.path in NOT_DECIDING:
            continue
        for node in ast.walk(file.tree):
            kind = ""
            if isinstance(node, ast.Attribute):
                kind = READERS.get(node.attr, "")
                if node.attr == "parse" and ast.unparse(node.value) == "ast":
                    kind = "AST"
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                kind = READERS.get(node.value, "")
            if kind:
                function = file.function(node)
                places.setdefault((file.path, function), file.place(node, f"{function} ({kind})"))
    return sorted(places.values())


# ---- ambient states


def ambient_states(files: list[File]) -> list[Place]:
    """List the values of modules and classes that functions change while they run.

    Such a value is assigned at the level of a module or in a class's body, and a function rebinds it, stores
    into it or calls a method that changes it; or it is a thread's local value or a context variable. Caches
    of pure functions (``functools.cache``) are none.
    """
    values: dict[str, dict[str, Place]] = {file.path: {} for file in files}
    states: set[Place] = set()
    for file in files:
        for owner in [file.tree, *file.walk(ast.ClassDef)]:
            for node in owner.body:  # type: ignore[attr-defined]
                for name in _assigned(node):
                    place = file.place(node, name)
                    if owner is file.tree:
                        values[file.path][name] = place
                    made = ast.unparse(node.value) if getattr(node, "value", None) else ""
                    if re.search(
                        r"\b(local|ContextVar|WeakKeyDictionary|WeakValueDictionary|WeakSet)\(", made
                    ):
                        states.add(place)
    for file in files:
        visible = dict(values[file.path])
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                path = "/".join((node.module or "").split(".")[1:])
                origin = values.get(f"{path}.py") or values.get(f"{path}/__init__.py".lstrip("/")) or {}
                for alias in node.names:
                    if alias.name in origin:
                        visible[alias.asname or alias.name] = origin[alias.name]
        for name in _changed(file):
            if name in visible:
                states.add(visible[name])
    return sorted(states)


def _assigned(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Assign):
        names = [name for target in node.targets for name in ast.walk(target)]
        return [name.id for name in names if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def _changed(file: File) -> Iterator[str]:
    """Yield names of module level that a function rebinds or changes."""
    for function in file.walk(ast.FunctionDef, ast.AsyncFunctionDef):
        locals_ = {x.arg for x in ast.walk(function) if isinstance(x, ast.arg)}
        declared = {n for x in ast.walk(function) if isinstance(x, ast.Global) for n in x.names}
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id not in declared:
                locals_.add(node.id)
        yield from declared
        for node in ast.walk(function):
            base: ast.AST | None = None
            if isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
                base = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                base = node.func.value if node.func.attr in CHANGING else None
            if isinstance(base, ast.Name) and base.id not in locals_:
                yield base.id


# ---- variants


def variants(files: list[File]) -> set[str]:
    """Name the classes of this package that stand beside others of the same face."""
    bases = {
        node.name: {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
        for file in files
        for node in file.walk(ast.ClassDef)
        if isinstance(node, ast.ClassDef)
    }
    names = set(VARIANT_OF_A_BATCH)
    before: set[str] = set()
    while before != names:
        before = set(names)
        names |= {name for name, above in bases.items() if above & (FACES | names)}
    return names


def questions_of_variants(files: list[File]) -> list[Place]:
    """List calls of isinstance and issubclass, and patterns of match, that ask which variant a value is."""
    kinds = variants(files)
    places = []
    for file in files:
        for node in ast.walk(file.tree):
            asked: list[ast.AST] = []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id in ("isinstance", "issubclass") and len(node.args) == 2:
                    asked = [node.args[1]]
            elif isinstance(node, ast.MatchClass):
                asked = [node.cls]
            elif isinstance(node, ast.Compare) and "type(" in ast.unparse(node.left):
                asked = list(node.comparators)
            words = {word for part in asked for word in re.findall(r"\w+", ast.unparse(part))}
            if words & kinds:
                places.append(file.place(node, ", ".join(sorted(words & kinds))))
    return sorted(places)


def _identifiers(file: File) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Name):
            yield node, node.id
        elif isinstance(node, ast.Attribute):
            yield node, node.attr
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            yield node, node.arg
        elif isinstance(node, ast.alias):
            yield from ((node, part) for part in node.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            yield from ((node, part) for part in (node.module or "").split("."))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node, node.name


# The shards of streams are files, those of tensor parallelism are parts of a weight.
OTHER_SHARDS = ("data/streams/", "parallel/tensor.py")


def files_that_know(files: list[File], is_of: Callable[[str], bool]) -> list[Place]:
    """List the files one of whose identifiers is of a variant, each with the first that is.

    An ``__init__.py`` only names what its folder offers.
    """
    places = []
    for file in files:
        if file.path.startswith(OTHER_SHARDS) or file.path.endswith("__init__.py"):
            continue
        first = next((file.place(n, name) for n, name in _identifiers(file) if is_of(name)), None)
        if first is not None:
            places.append(first)
    return places


# A user asks for shared prefixes by this option. Commands, data modules and trainers hand it on to the file
# that makes such a batch or plan. ``PrefixStore`` is torch's, of keys.
NOT_OF_PREFIXES = re.compile(r"_?(thd_)?shares?_prefixes|PrefixStore")


def is_of_prefixes(name: str) -> bool:
    """Return whether an identifier speaks of shared prefixes; a single ``prefix`` often begins a key."""
    if NOT_OF_PREFIXES.fullmatch(name):
        return False
    return re.search(r"prefixes|Prefix[A-Z]|Prefixes|Shared(Batch|Boundaries)", name) is not None


def is_of_shards(name: str) -> bool:
    """Return whether an identifier speaks of context-parallel shards."""
    return re.search(r"THDShard|Shard(Layout|Boundaries)|shard_(batch|step)|^shard$", name) is not None
