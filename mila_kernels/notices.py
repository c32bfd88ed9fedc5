"""What is said to whoever runs this: through one logger, and some texts once a process."""

from __future__ import annotations

import logging

logger = logging.getLogger("mila_kernels")
said: set[str] = set()  # what needs no saying any more


def say_once(text: str) -> None:
    """A warning that is given the first time only."""
    if text not in said:
        said.add(text)
        logger.warning(text)
