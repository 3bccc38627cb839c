"""Select which engine the hooks of a model use."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar


class Closable(Protocol):
    """An engine that can be replaced by another one."""

    def finish(self) -> None:
        """Collective: give all ranks the same weights. Does nothing if they have them."""

    def close(self) -> None:
        """Stop exchanging, and release all resources."""


AnyEngine = TypeVar("AnyEngine", bound=Closable)


class EngineSwitch(Generic[AnyEngine]):
    """Has the engine that the hooks of a model use, or None if they do what they would do without Syncline."""

    def __init__(self) -> None:
        self.engine: AnyEngine | None = None

    def turn_to(self, engine: AnyEngine | None) -> None:
        """Use `engine` from now on, or none, and close the engine that was used before."""
        before, self.engine = self.engine, engine
        if before is not None:
            try:
                before.finish()
            finally:
                before.close()
