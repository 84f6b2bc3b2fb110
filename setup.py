"""Tags the wheel: for this platform where the CUDA library has been built (`make wheel`), else for any.

Everything else is in pyproject.toml.
"""

from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

LIBRARY = Path(__file__).parent / "trtllm_replayssm" / "lib" / "libtrtllm_replayssm.so"


class LibraryDistribution(Distribution):
    """Platform files, where the library is among them."""

    def has_ext_modules(self) -> bool:
        return LIBRARY.exists()


class LibraryWheel(bdist_wheel):
    """ctypes loads the library, so that one wheel serves every Python 3 of its platform."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if LIBRARY.exists() else (python, abi, platform)


setup(cmdclass={"bdist_wheel": LibraryWheel}, distclass=LibraryDistribution)
