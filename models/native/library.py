"""The compiled kernels: found, checked and made known to jax, or the reason why the reference serves instead.

The library is made by setup.py, from `csrc/`. It has every kernel in several forms, one for each instruction set, and
says which of them this processor runs. A form of a kernel is a target of jax's foreign-function interface, whose name
has the library's version and the form: a program that was compiled and kept runs what it was made for, or nothing.
"""

import ctypes
import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.ffi

logger = logging.getLogger(__name__)

VERSION = 5  # as in csrc/library.cc: of the kernels' arguments and results
PATH = Path(__file__).parent / "kernels.so"


class LibraryError(Exception):
    """Why there are no kernels: one message."""


@dataclass(frozen=True, slots=True)
class Library:
    """A library that can be used."""

    forms: tuple[str, ...]  # that this processor runs, the best first
    addresses: Mapping[tuple[str, str], int]  # of the functions, by kernel and form

    @property
    def best(self) -> str:
        return self.forms[0]


@functools.cache
def chosen() -> Library | None:
    """This installation's library, known to jax: a kept program may call it without being traced in this process.

    None where there is none, and the reference serves. Says which, once a process.
    """
    try:
        library = open_library(PATH)
    except LibraryError as error:
        logger.warning("kernels for CPUs: %s; steps run as XLA compiles them", error)
        return None
    for (kernel, form), address in library.addresses.items():
        function: Any = ctypes.CFUNCTYPE(ctypes.c_void_p)(address)
        jax.ffi.register_ffi_target(_name(kernel, form), jax.ffi.pycapsule(function), platform="cpu")
    logger.info("kernels for CPUs: %s", library.best)
    return library


def open_library(path: Path) -> Library:
    """LibraryError where the file is not there or does not load, and for another version or processor."""
    if not path.exists():
        raise LibraryError(f"{path.name} was not built when moonshard was installed")
    try:
        loaded = ctypes.CDLL(str(path))
        found = loaded.moonshard_version()
        list_forms, list_kernels = loaded.moonshard_forms, loaded.moonshard_kernels
        handler = loaded.moonshard_handler
    except (OSError, AttributeError) as error:
        raise LibraryError(f"{path.name} does not load: {error}") from error
    if found != VERSION:
        raise LibraryError(f"{path.name} has version {found}, not {VERSION}: install moonshard again")
    list_forms.restype = list_kernels.restype = ctypes.c_char_p
    handler.argtypes, handler.restype = (ctypes.c_char_p, ctypes.c_char_p), ctypes.c_void_p
    forms, kernels = list_forms().decode().split(), list_kernels().decode().split()
    if not forms:
        raise LibraryError("this processor lacks instructions that they need")
    pairs = [(kernel, form) for kernel in kernels for form in forms]
    return Library(tuple(forms), {pair: handler(*(part.encode() for part in pair)) for pair in pairs})


def made_of() -> tuple[object, ...]:
    """What decides what a program with kernels computes, besides its code."""
    library = chosen()
    return ("reference",) if library is None else (VERSION, library.best)


def target(kernel: str, form: str | None = None) -> str:
    """The name under which jax calls a kernel, in the form that suits this processor best unless it is named.

    Raises:
        LibraryError: no library, or no such kernel or form on this processor.
    """
    library = chosen()
    if library is None:
        raise LibraryError("there are no kernels here")
    form = form or library.best
    if (kernel, form) not in library.addresses:
        raise LibraryError(f"there is no {kernel} in form {form} here")
    return _name(kernel, form)


def _name(kernel: str, form: str) -> str:
    return f"moonshard_{kernel}_v{VERSION}_{form}"
