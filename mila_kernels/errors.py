"""What goes wrong when a step is built or launched."""

from __future__ import annotations


class BuildError(RuntimeError):
    """A step could not be built: a tool is missing, or the compiler refused it (its output is the text)."""


class KernelError(RuntimeError):
    """A launch was refused, or the emulation reported a fault. ``step`` is the step's id, ``text`` the reason."""

    def __init__(self, step: str, text: str) -> None:
        super().__init__(step, text)
        self.step = step
        self.text = text

    def __str__(self) -> str:
        return f"{self.step}: {self.text}"
