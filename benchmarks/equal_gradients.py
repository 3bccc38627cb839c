"""A model that nobody has: gradients of one size, ready one after the other."""

from __future__ import annotations

from syncline.records.profile import Gradient, Profile


def equal_gradients(count: int, nbytes: int, *, forward_s: float, backward_s: float) -> Profile:
    gradients = tuple(
        Gradient(
            name=f"layer{place}.weight",
            shape=(nbytes // 4,),
            dtype="float32",
            bytes=nbytes,
            ready_s=backward_s * (place + 1) / count,
        )
        for place in range(count)
    )
    return Profile(
        model=f"{count} gradients of {nbytes} bytes",
        gradients=gradients,
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=0.0,
        device="cpu",
        where="made up",
        how="made up",
        steps=1,
        batch=None,
    )
