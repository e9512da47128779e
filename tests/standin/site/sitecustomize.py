"""Every Python process with this folder on its path computes CUDA's operators on the CPU, from the
moment that torch is imported."""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any


class _BehindTorch(MetaPathFinder):
    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        found = find_spec("torch")
        assert found is not None
        assert found.loader is not None
        load = found.loader.exec_module

        def and_install(module: Any) -> None:
            load(module)
            from tests.standin.operators import install

            install()

        found.loader.exec_module = and_install  # type: ignore[method-assign]
        return found


sys.meta_path.insert(0, _BehindTorch())
