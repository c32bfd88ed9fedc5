"""From a recipe (a source, a compiler, flags) to a shared library that is loaded, built unless the cache has it.

Libraries are kept under a digest of all that they are made of. A build happens in a folder of its own and only its
finished, checksummed library is renamed into the cache, under a lock that the kernel frees when its holder dies. So a
build that is killed leaves nothing that another would load or wait for.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from . import paths, steps
from .build_cache import cache_root, lock, sweep, writable_cache
from .errors import BuildError
from .notices import logger
from .toolchain import compiler_version, ninja_folder

_LINK_FLAGS = ("-Wl,--as-needed", "-Wl,-Bsymbolic", "-Wl,-z,defs")
_CHECKSUM = hashlib.sha256().digest_size
library_paths: dict[str, Path] = {}  # of those loaded here, by the name that reports have


@dataclass(frozen=True)
class Recipe:
    """All that a library is made of, beside the headers that its source reaches."""

    source: Path
    label: str
    language: Literal["cuda", "cpp"]
    flags: tuple[str, ...]
    compiler: Path
    host_compiler: Path | None = None
    links: Path | None = None
    link_flags: tuple[str, ...] = ()
    files: tuple[Path, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", (self.source, *steps.headers(self.source)))

    @property
    def stem(self) -> str:
        """The library's name in the cache: readable, then the digest."""
        digest = hashlib.sha256()
        for part in self._parts():
            digest.update(part.encode(errors="surrogateescape") + b"\0")
        for path in self.files:
            data = path.read_bytes()
            digest.update(f"{_shown_name(path)}\0{len(data)}\0".encode(errors="surrogateescape") + data)
        return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', self.label)}-{digest.hexdigest()[:20]}"

    def _parts(self) -> list[str]:
        compilers = [c for c in (self.compiler, self.host_compiler) if c]
        return [
            "1",  # the layout of the cache
            self.label,
            self.language,
            *self.flags,
            *_LINK_FLAGS,
            *self.link_flags,
            *(f"{c}\0{compiler_version(c)}" for c in compilers),
            torch.__version__,
            str(torch.version.cuda),
            *(self._cuda_parts() if self.language == "cuda" else ()),
            sysconfig.get_config_var("SOABI") or sys.version,
            platform.machine(),
            self.links.name if self.links else "",
        ]

    def _cuda_parts(self) -> list[str]:
        # The line table names the checkout, and nvcc adds these variables to its command line.
        return [str(paths.ROOT), *(os.environ.get(f"NVCC_{x}_FLAGS", "") for x in ("PREPEND", "APPEND"))]


def obtain_instance(recipe: Recipe, only: Mapping[str, int]) -> tuple[Path, ctypes.CDLL]:
    """The recipe's library: of all instances if it is there, else of one."""
    if not only:
        return obtain(recipe)
    whole = _open(cache_root() / f"{recipe.stem}.so")
    if whole:
        return whole
    defines = tuple(f"-DONLY_{name.upper()}={value}" for name, value in only.items())
    label = "-".join([recipe.label, *map(str, only.values())])
    return obtain(replace(recipe, flags=(*recipe.flags, *defines), label=label))


def obtain(recipe: Recipe) -> tuple[Path, ctypes.CDLL]:
    """The recipe's library, loaded: from the cache if it is there and whole, else built."""
    stem = recipe.stem
    found = _open(cache_root() / f"{stem}.so")
    if found:
        return found
    root = writable_cache()
    with lock(root / f"{stem}.lock"):
        found = _open(root / f"{stem}.so")
        if found:
            return found
        sweep(root, stem)
        return _build(recipe, root, stem)


def _open(library: Path) -> tuple[Path, ctypes.CDLL] | None:
    """The library loaded, or None where it is missing or not whole."""
    if not is_whole(library):
        return None
    handle = _dlopen(library)
    with contextlib.suppress(OSError):
        os.utime(library)  # the sweep keeps what is in use
    library_paths[library.name] = library
    return library, handle


def _dlopen(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        hint = "; nvcc's CUDA version must be torch's" if "libcudart" in str(error) else ""
        raise BuildError(f"{library} does not load: {error}{hint}") from error


def is_whole(library: Path) -> bool:
    """Whether a library ends in the checksum that the last act of its build put there."""
    try:
        data = library.read_bytes()
    except OSError:
        return False
    return len(data) > _CHECKSUM and hashlib.sha256(data[:-_CHECKSUM]).digest() == data[-_CHECKSUM:]


def _build(recipe: Recipe, root: Path, stem: str) -> tuple[Path, ctypes.CDLL]:
    logger.info("building %s", stem)
    staging = Path(tempfile.mkdtemp(prefix=f"{stem}.", dir=_ensure(root / "building")))
    try:
        with _plain_name(staging) as plain:
            built = _compile(recipe, plain, stem)
        # torch has loaded it where it was built; renaming keeps the file, so loading it again gives the same library.
        built = staging / built.relative_to(plain)
        data = built.read_bytes()
        with open(built, "ab") as file:
            file.write(hashlib.sha256(data).digest())
            file.flush()
            os.fsync(file.fileno())
        library = root / f"{stem}.so"
        os.replace(built, library)
        library_paths[built.name] = library_paths[library.name] = library
        return library, _dlopen(library)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _ensure(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _shown_name(path: Path) -> str:
    """A source's name in reports: relative to the repository, or absolute where it is not in there."""
    with contextlib.suppress(ValueError):
        return path.relative_to(paths.ROOT).as_posix()
    return path.as_posix()


def _staged_names(files: Sequence[Path]) -> dict[Path, str]:
    """Where each source lies in the build folder, so that "../" in an include leads to the same header.

    The project's as in the repository; others below the folder that they have in common, whatever that is called.
    """
    names = {path: _shown_name(path) for path in files}
    outside = [path for path, name in names.items() if os.path.isabs(name)]
    common = os.path.commonpath([path.parent for path in outside]) if outside else ""
    return {
        path: f"outside/{path.relative_to(common).as_posix()}" if path in outside else names[path] for path in files
    }


def _compile(recipe: Recipe, staging: Path, stem: str) -> Path:
    """Build in ``staging`` through torch's load_inline; the path of the library, which torch has loaded."""
    top = staging / "files"
    names = _staged_names(recipe.files)
    for path, name in names.items():
        target = top / name
        _ensure(target.parent).joinpath(target.name).write_text(_staged_text(path, recipe), encoding="utf-8")
    folder = (top / names[recipe.source]).parent
    include = os.path.relpath(top / _shown_name(paths.CSRC).lstrip("/"), folder)
    flags = [*recipe.flags, _quoted(f"-I{include}")]
    link_flags = [*_LINK_FLAGS, *recipe.link_flags]
    if recipe.links is not None:
        # By name only: the loader finds what is loaded already under this name, wherever the cache is.
        shutil.copyfile(recipe.links, folder / recipe.links.name)
        link_flags.append(f"./{recipe.links.name}")
    if recipe.language == "cpp":
        link_flags.append(f"-Wl,-soname,{stem}.so")
        if "clang" in compiler_version(recipe.compiler):
            flags = ["-fsanitize=bounds" if flag == "-fsanitize=bounds-strict" else flag for flag in flags]
        else:
            flags.append("-fno-gnu-unique")  # those symbols are one a process, across libraries
        flags.append(_quoted(f"-fdebug-prefix-map={folder}=."))
    source = _staged_text(recipe.source, recipe)
    sources: dict[str, Any] = (
        {"cpp_sources": "", "cuda_sources": source, "extra_cuda_cflags": flags}
        if recipe.language == "cuda"
        else {"cpp_sources": source, "extra_cflags": flags}
    )
    with _BUILDING, _torch_environment(recipe, staging, folder):
        from torch.utils import cpp_extension

        try:
            built = cpp_extension.load_inline(
                name=stem,
                build_directory=str(folder),
                extra_ldflags=link_flags,
                is_python_module=False,
                no_implicit_headers=True,
                verbose=False,
                **sources,
            )
        except RuntimeError as error:
            said = _compiler_output(str(error), recipe)
            raise BuildError(f"{_shown_name(recipe.source)} does not build ({recipe.label}):\n{said}") from None
    return Path(str(built))


def _staged_text(path: Path, recipe: Recipe) -> str:
    """The source with its name in line tables and reports set, so that no build folder shows there.

    Profilers open the file, so CUDA gets its absolute path; the emulation's reports are for reading.
    """
    shown = path.as_posix() if recipe.language == "cuda" else _shown_name(path)
    name = shown.replace("\\", "\\\\").replace('"', '\\"')
    return f'#line 1 "{name}"\n{path.read_text(encoding="utf-8")}'


def _quoted(flag: str) -> str:
    """A flag that survives ninja, then the shell."""
    return shlex.quote(flag).replace("$", "$$")


def _compiler_output(text: str, recipe: Recipe) -> str:
    """Only what the compiler said of ninja's output."""
    tools = "|".join(re.escape(str(tool)) for tool in (recipe.compiler, recipe.host_compiler) if tool)
    noise = re.compile(rf"\[\d+/\d+\]|ninja: |FAILED: |Error building extension|(?:{tools}) ")
    return "\n".join(line for line in text.splitlines() if not noise.match(line)) or text


_BUILDING = threading.Lock()
os.register_at_fork(after_in_child=lambda: globals().update(_BUILDING=threading.Lock()))
_SAFE_PATH = re.compile(r"[A-Za-z0-9_/.,+@%=-]+")


@contextlib.contextmanager
def _plain_name(staging: Path) -> Iterator[Path]:
    """The build folder under a name that needs no quoting: ninja, make rules and shells disagree about the others."""
    if _SAFE_PATH.fullmatch(str(staging)):
        yield staging
        return
    folder = Path(tempfile.mkdtemp(prefix="mila-", dir=_plain_temporary_folder()))
    try:
        (folder / "b").symlink_to(staging.resolve(), target_is_directory=True)
        yield folder / "b"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _plain_temporary_folder() -> str:
    for folder in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"):
        if _SAFE_PATH.fullmatch(folder) and os.access(folder, os.W_OK):
            return folder
    return tempfile.gettempdir()


@contextlib.contextmanager
def _torch_environment(recipe: Recipe, staging: Path, folder: Path) -> Iterator[None]:
    """What load_inline reads from the process: environment and module globals, put back after."""
    from torch.utils import cpp_extension

    host = recipe.host_compiler or recipe.compiler
    # Nothing here links to torch's C++ interface, so the compiler's ABI does not matter; a wrapper adds only risks.
    variables = {"CXX": str(host), "TORCH_DONT_CHECK_COMPILER_ABI": "1", "TORCH_NO_COMPILER_WRAPPER": "1"}
    variables["PWD"] = str(folder)  # the name by which compilers know the folder that they run in
    ninja = ninja_folder()
    if ninja:
        variables["PATH"] = os.pathsep.join([ninja, os.environ.get("PATH", os.defpath)])
    settings: dict[str, Any] = {"TORCH_LIB_PATH": _linked(staging, "torch_lib", cpp_extension.TORCH_LIB_PATH)}
    if recipe.language == "cuda":
        variables["CC"] = str(host)  # torch passes it to nvcc as -ccbin
        settings["CUDA_HOME"] = _linked(staging, "cuda_home", str(recipe.compiler.parent.parent))
    before = {name: os.environ.get(name) for name in variables}
    previous = {name: getattr(cpp_extension, name) for name in settings}
    try:
        os.environ.update(variables)
        for name, value in settings.items():
            setattr(cpp_extension, name, value)
        yield
    finally:
        for name, value in previous.items():
            setattr(cpp_extension, name, value)
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text


def _linked(staging: Path, name: str, folder: str) -> str:
    """The folder itself, or a link to it in the build folder where torch's unquoted use of its name would break."""
    if _SAFE_PATH.fullmatch(folder):
        return folder
    (staging / name).symlink_to(folder, target_is_directory=True)
    return str(staging / name)
