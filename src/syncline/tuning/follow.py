"""`follow`: tune a DDP model while a script trains it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from syncline.balance.shares import Shares
from syncline.exchange import Exchange
from syncline.records.plan import Plan
from syncline.runtime.topology import NetworkOrFile
from syncline.runtime.validation import ddp_of
from syncline.tuning.following import Following
from syncline.tuning.settings import PROBE_S, PathLike, TuneSettings
from syncline.updates.policy import Nesterov


def follow(
    model: nn.Module,
    *,
    exchange: Exchange | None = None,
    plan: Plan | PathLike | None = None,
    quality: str | None = None,
    allow: Sequence[str] = (),
    network: NetworkOrFile = None,
    change: bool = True,
    scaler: GradScaler | None = None,
    probe_s: float = PROBE_S,
    cache: bool = True,
    retune: str | None = None,
    timeout_s: float | None = None,
    quiet: bool = False,
    optimizer: Optimizer | None = None,
    every: int = 1,
    warmup: int | None = None,
    delay: int = 0,
    outer: Nesterov | None = None,
    shares: Shares | None = None,
) -> Following:
    """Make a DDP model exchange its gradients faster, during the training that a script does anyway.

    With an `exchange` or a `plan`, that is applied in the model's first training forward. Without, the model is tuned:
    some steps are measured, and if they wait for communication, the links are probed while the script waits, and
    some more steps are tried. If tuning is not possible, plain DDP stays and rank 0 prints the reason. From then on
    each rank logs one line when another rank stops sending heartbeats. All ranks must call `follow` with the same
    arguments and train the model in the same forwards.

    Args:
        model: A DistributedDataParallel model.
        exchange: The exchange to attach.
        plan: The plan to apply, or its file.
        quality: How far tuning may go: `"exact"`, `"same"` or `"close"`, as in `tune`. Overlap with the next forward
            pass is not considered, because it would need changes of the script. Default: `"exact"`.
        allow: Instead of `quality`: lossy exchanges that tuning may use: "bf16", "fp16", "int8", "int4", "int3",
            "sparse".
        network: The links, or the file that `syncline probe` wrote. Without it, the links are probed, unless too little
            is at stake, or they are remembered from an earlier run.
        change: If False, change nothing and only report what would be faster.
        scaler: The GradScaler of the loss, as in `attach`.
        probe_s: The most time for probing the links, in seconds. It is less where less is at stake.
        cache: Whether to remember probed links between runs, in a file under `$XDG_CACHE_HOME`.
        retune: `"auto"` to tune again when steps wait over 1.5 times as long for communication as after the last
            tuning, in two checks in a row. Checks come about every five seconds, and at most 100 steps apart. Further
            tunings take at most 2 % of the training time, and come at growing distances.
        timeout_s: Timeout of a collective in seconds. It becomes the timeout of the model's process group, so it also
            bounds plain DDP's all-reduces and the script's own collectives in that group, but not probes.
        quiet: Print nothing. By default rank 0 prints what was done.
        optimizer: The optimizer of the model, to exchange its updates through `exchange`, as in `attach`; or, with
            `quality`, where tuning chooses so.
        every, warmup, delay, outer: As in `attach`, for updates. With `quality="close"`, only `warmup`.
        shares: The batches of the ranks, as in `attach`. The exchange is then `Dense()` by default: to tune such a
            model, call `attach(model, shares=shares)` and then `tune`.

    Returns:
        The state of the model, which says what was measured and done.

    Raises:
        UsageError: An argument is invalid, or the model is not a DistributedDataParallel. An exchange or a plan that
            does not fit the model raises later, in its first training forward, on all ranks.

    Example:
        >>> following = syncline.follow(DDP(net))  # doctest: +SKIP
        >>> train()  # doctest: +SKIP
        >>> print(following.describe())  # doctest: +SKIP
    """
    settings = TuneSettings(
        exchange=exchange,
        plan=plan,
        quality=quality,
        allow=allow,
        network=network,
        change=change,
        scaler=scaler,
        probe_s=probe_s,
        cache=cache,
        retune=retune,
        timeout_s=timeout_s,
        quiet=quiet,
        updates=optimizer is not None and quality is None,
        every=every,
        warmup=warmup,
        delay=delay,
        outer=outer,
        shares=shares,
    )
    return Following(ddp_of(model, "follow"), settings, find_optimizer=lambda: optimizer, tunes_updates=True)
