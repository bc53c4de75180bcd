# SPDX-License-Identifier: Apache-2.0
"""Import megatron-core without the modules that training does not use; each is imported when one of its names is used.

megatron-core and torch.distributed.checkpoint import DTensor (and with it sympy), TensorBoard, the C++ extension
builder and the inference engine. These imports took most of the start of a process. While `deferred` is active,
`from MODULE import NAME` gives a `DeferredName` for the modules that it lists. A DeferredName imports the module and
forwards to the real object when it is called, subclassed or read. The listed modules can be imported as usual
afterwards; the real objects then take the place of the DeferredNames.

Used by `set_up_device` around the first import of megatron-core.
"""

import functools
import importlib
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

Group = tuple[str, ...]  # modules, each with all of its submodules, whose names stand for the same objects

UNUSED_IN_TRAINING: tuple[Group, ...] = (
    ("torch.distributed.tensor", "torch.distributed._tensor"),  # imports sympy
    ("torch.distributed.fsdp",),
    ("torch.distributed._symmetric_memory",),
    ("torch.utils.tensorboard",),
    ("torch.utils.cpp_extension",),  # imports setuptools
    ("triton",),
    ("megatron.core.inference",),
    ("megatron.core.tensor_parallel.inference_layers",),
    ("megatron.core.fusions.fused_indices_converter",),  # triton kernels
    ("megatron.core.fusions.fused_pad_routing_map",),
    ("megatron.core.fusions.fused_mla_yarn_rope_apply",),
)
# Imported while `deferred` is active, because these import the modules above.
USED_IN_TRAINING = (
    "megatron.core.models.gpt",
    "megatron.core.transformer.moe.moe_layer",
    "torch.distributed.checkpoint",
)


class DeferredName:
    """One name of a module that is not imported yet. Every use imports it, except in annotations and isinstance()."""

    def __init__(self, finder: "_Finder", module: str, name: str) -> None:
        self._finder, self._module, self._name = finder, module, name

    def _real(self) -> Any:
        module = self._finder.import_real(self._module)
        try:
            return getattr(module, self._name)
        except AttributeError:
            return self._finder.import_real(f"{self._module}.{self._name}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # read by copy, inspect and typing from every object
            raise AttributeError(name)
        return getattr(self._real(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._real()(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self._real()[key]

    def __bool__(self) -> bool:
        return bool(self._real())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (self._real(),)

    # No object is an instance of a class, or equal to it, before the module of the class is imported.
    def __instancecheck__(self, instance: object) -> bool:
        return self._finder.is_imported(self._module) and isinstance(instance, self._real())

    def __subclasscheck__(self, subclass: type) -> bool:
        return self._finder.is_imported(self._module) and issubclass(subclass, self._real())

    def __eq__(self, other: object) -> bool:
        return self is other or (self._finder.is_imported(self._module) and bool(self._real() == other))

    def __hash__(self) -> int:
        return hash((self._module, self._name))  # typing hashes annotations

    def __or__(self, other: Any) -> Any:
        return Any  # in an annotation

    __ror__ = __or__

    def __repr__(self) -> str:
        return f"<deferred {self._module}.{self._name}>"


@contextmanager
def deferred(groups: Sequence[Group] = UNUSED_IN_TRAINING) -> Iterator[None]:
    """Defer the import of the named modules, and of all below them, while modules that use their names are imported."""
    finder = _Finder(groups)
    before = set(sys.modules)
    sys.meta_path.insert(0, finder)  # it stays there, to put the real objects in place
    try:
        yield
    finally:
        finder.stop(before)


def defer_dynamo() -> None:
    """Keep torch's optimizers from importing torch._dynamo before something is compiled.

    Four methods of Optimizer are excluded from compiled functions by torch._dynamo.disable, which they import when
    they are first called. Without torch._dynamo no function has been compiled.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(torch.optim.Optimizer, name)
        if hasattr(method, "__wrapped__"):
            setattr(torch.optim.Optimizer, name, _disabled_after_import(method))


def _disabled_after_import(disabled: Callable[..., Any]) -> Callable[..., Any]:
    plain = disabled.__wrapped__  # type: ignore[attr-defined]

    @functools.wraps(plain)
    def method(*args: Any, **kwargs: Any) -> Any:
        return (disabled if "torch._dynamo" in sys.modules else plain)(*args, **kwargs)

    return method


class _DeferredModule(ModuleType):
    """The entry of sys.modules for a listed module while `deferred` is active."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return DeferredName(self.__loader__.finder, self.__name__, name)  # type: ignore[union-attr]


class _Loader:
    """Makes a _DeferredModule instead of executing a file."""

    def __init__(self, finder: "_Finder") -> None:
        self.finder = finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


class _Finder:
    """Finds the listed modules before Python's own finders do."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._deferring = list(groups)
        # By module: the namespaces that hold one of its names, the attribute there, and the DeferredName.
        self._holders: dict[str, list[tuple[dict[str, Any], str, DeferredName]]] = {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Called by the import system for every module that is not imported yet."""
        defers = _group_of(name, self._deferring) is not None
        real = importlib.machinery.PathFinder.find_spec(name, path) if defers or name in self._holders else None
        if real is None:
            return None
        if not defers:
            execute = real.loader.exec_module  # type: ignore[union-attr]

            def execute_and_replace(module: ModuleType) -> None:
                execute(module)
                self._replace(module)

            real.loader.exec_module = execute_and_replace  # type: ignore[union-attr,method-assign]
            return real
        found = importlib.machinery.ModuleSpec(name, _Loader(self), origin=real.origin)  # type: ignore[arg-type]
        found.submodule_search_locations = list(real.submodule_search_locations or [])
        return found

    def import_real(self, name: str) -> ModuleType:
        """The module itself; the import of its group is not deferred from now on."""
        group = _group_of(name, self._deferring)
        if group is not None:
            self._deferring.remove(group)
            _forget(group)
        return importlib.import_module(name)

    def is_imported(self, name: str) -> bool:
        """Whether a module that defines the objects of this one has been imported."""
        group = _group_of(name, self._groups) or ()
        return any(root in sys.modules and not isinstance(sys.modules[root], _DeferredModule) for root in group)

    def stop(self, before: set[str]) -> None:
        """Import every module as usual from now on, and note who holds something deferred.

        Args:
            before: Modules that were imported before this finder was installed.
        """
        for group in self._deferring:
            _forget(group)
        self._deferring = []
        for name in sys.modules.keys() - before:
            namespace = vars(sys.modules[name])
            for attribute, value in namespace.items():
                if isinstance(value, DeferredName):
                    self._holders.setdefault(value._module, []).append((namespace, attribute, value))

    def _replace(self, module: ModuleType) -> None:
        for namespace, attribute, value in self._holders.pop(module.__name__):
            if namespace.get(attribute) is value and hasattr(module, value._name):
                namespace[attribute] = getattr(module, value._name)


def _group_of(name: str, groups: Sequence[Group]) -> Group | None:
    return next((group for group in groups if any(name == root or name.startswith(f"{root}.") for root in group)), None)


def _forget(group: Group) -> None:
    """Remove the deferred modules of a group from sys.modules and from the packages that hold them."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, _DeferredModule) and _group_of(name, [group]) is not None:
            del sys.modules[name]
            package, _, attribute = name.rpartition(".")
            if vars(sys.modules.get(package, module)).get(attribute) is module:
                delattr(sys.modules[package], attribute)
