"""Import stand-in for sgl_kernel, which has CUDA builds only. Any call of a kernel raises."""

import importlib.abc
import importlib.machinery
import sys
import types


class _Stub(types.ModuleType):
    __path__ = ()
    __version__ = "0.4.10"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_args, **_kwargs):
            raise NotImplementedError(f"GPU kernel {self.__name__}.{name} was called on a CPU-only SGLang")

        missing.__name__ = missing.__qualname__ = name
        setattr(self, name, missing)
        return missing


class _AnyType:
    """Answers to every attribute: scalar types are only named, never used, on the CPU path."""

    def __getattr__(self, name):
        return f"scalar_type.{name}"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] == "sgl_kernel":
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Stub(spec.name)

    def exec_module(self, module):
        if module.__name__ in ("sgl_kernel", "sgl_kernel.scalar_type"):
            module.ScalarType = type("ScalarType", (), {})
            module.scalar_types = _AnyType()


sys.meta_path.insert(0, _Finder())
