"""Builds the `native` backend as part of the package: hatchling's build hook.

Without a compiler the package is built all the same, and `longspan doctor` says what is missing.
"""

import importlib.util
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeHook(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        path = Path(self.root, "src/longspan/ops/window/native/build.py")
        spec = importlib.util.spec_from_file_location("longspan_native_build", path)
        assert spec is not None
        assert spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        reason = build.build()
        if reason is not None:
            self.app.display_warning(f"longspan is built without its native backend: {reason}")
            return
        # It depends on the machine, but on no version of Python.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        print(f"longspan: built {build.LIBRARY.name}", file=sys.stderr)
