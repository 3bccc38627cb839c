"""DDP's buckets, made to measure: for a model that is to be wrapped, and for one that is wrapped already.

DDP takes a cap for each bucket, and closes a bucket when it reaches its cap: caps of exactly so many bytes give exact
buckets. A live model gets new ones by building its reducer anew, inside the same object, so that whoever refers to the
model still does. That is private to torch, and looked for before it is used.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel import distributed as ddp_module

from syncline.errors import UsageError
from syncline.predict.schedule import MIB

_own: weakref.WeakKeyDictionary[DDP, Any] = weakref.WeakKeyDictionary()
"""Of models that have a plan's buckets: how theirs were."""


def caps_are_known() -> bool:
    """Whether this torch takes a cap for each bucket."""
    return "bucket_cap_mb_list" in inspect.signature(DDP.__init__).parameters


def cap_arguments(caps: Sequence[int], *, rebuilt: bool = True) -> dict[str, Any]:
    """What to build DDP with for buckets of so many bytes, in the order in which they are launched.

    Where DDP does not rebuild its buckets, it fills them from the first parameter on, and launches them backwards. A
    torch that knows one cap for all gets the middle one: its buckets are others, and that will be told.
    """
    if not caps_are_known():
        return {"bucket_cap_mb": sorted(caps)[len(caps) // 2] / MIB}
    ordered = caps if rebuilt else tuple(reversed(caps))
    return {"bucket_cap_mb_list": [cap / MIB for cap in ordered]}


def rebuilds(ddp: DDP) -> bool:
    """Whether it forms its buckets anew when it has seen in which order gradients are ready."""
    return bool(getattr(ddp, "static_graph", False)) or not ddp.find_unused_parameters


def settled_after(ddp: DDP) -> int:
    """Steps after which its buckets stay as they are."""
    return 2 if getattr(ddp, "static_graph", False) else int(rebuilds(ddp))


def can_change() -> bool:
    """Whether a live model's buckets can be changed with this torch."""
    config = getattr(ddp_module, "_BucketCapacityConfig", None)
    needed = ("_ddp_init_helper", "_build_params_for_reducer", "_build_debug_param_to_name_mapping")
    return config is not None and hasattr(config, "create") and all(hasattr(DDP, name) for name in needed)


def why_not_change(ddp: DDP) -> str | None:
    """Why this model's buckets cannot be changed, if they cannot."""
    if not can_change():
        return "this torch cannot change the buckets of a live model"
    if getattr(ddp, "_use_python_reducer", False):
        return "DDP's reducer in Python, which compiled autograd uses, takes no plan"
    if getattr(ddp, "_delay_all_reduce_params", None):
        return "delay_all_reduce_named_params leaves DDP no buckets"
    logged = ddp._get_ddp_logging_data()
    if str(logged.get("comm_hook", "")).startswith("BuiltinCommHookType"):
        return f"this model has a communication hook already ({logged['comm_hook']}), and DDP takes only one"
    return _why_others(ddp)


def _why_others(ddp: DDP) -> str | None:
    """Whether other parameters are trained at the moment than DDP was built for."""
    built = ddp._get_ddp_logging_data().get("num_parameter_tensors")
    now = len(ddp._build_params_for_reducer()[0])
    if built in (None, now):
        return None
    return f"DDP was built for {built} parameters, and {now} are trained now: freeze and thaw before DDP is built"


def own(ddp: DDP) -> Any:
    """How its buckets are without a plan: as the user built it, or DDP's default where a plan was there first."""
    return _own.get(ddp, getattr(ddp, "_bucket_config", None))


def planned_from_the_start(ddp: DDP) -> None:
    """It was built with a plan's caps."""
    if can_change():
        _own[ddp] = _config().create(bucket_cap_mb=None, bucket_cap_mb_list=None, use_python_reducer=False)


def own_caps(ddp: DDP) -> tuple[int, ...]:
    """Bytes at which it closes its buckets without a plan, once they are rebuilt."""
    config = own(ddp)
    each: tuple[int, ...] = config.per_bucket_bytes_caps
    return each or tuple(dict.fromkeys((config.first_bucket_bytes_cap, config.bucket_bytes_cap)))


def change(ddp: DDP, caps: Sequence[int]) -> None:
    """Gives a live model buckets of so many bytes, between steps, on all ranks. Its hook stays."""
    if not can_change():
        raise UsageError("this torch cannot change the buckets of a live model: build it with syncline.wrap(net, plan)")
    arguments = cap_arguments(caps, rebuilt=rebuilds(ddp))
    _own.setdefault(ddp, own(ddp))
    _build(
        ddp,
        _config().create(
            bucket_cap_mb=arguments.get("bucket_cap_mb"),
            bucket_cap_mb_list=arguments.get("bucket_cap_mb_list"),
            use_python_reducer=getattr(ddp, "_use_python_reducer", False),
        ),
    )


def put_back(ddp: DDP) -> None:
    """Gives a live model its own buckets again."""
    _build(ddp, own(ddp))
    _own.pop(ddp, None)


def _config() -> Any:
    return ddp_module._BucketCapacityConfig


def _build(ddp: DDP, config: Any) -> None:
    """The reducer, anew."""
    inside: Any = ddp
    if (frozen := _why_others(ddp)) is not None:  # what is left out now would never be exchanged again
        raise UsageError(frozen)
    inside._bucket_config = config
    inside.bucket_bytes_cap = config.bucket_bytes_cap
    inside.bucket_bytes_cap_list = list(config.per_bucket_bytes_caps)
    inside.bucket_bytes_cap_default = config.first_bucket_bytes_cap < config.bucket_bytes_cap
    parameters, expect_sparse = inside._build_params_for_reducer()
    names = inside._build_debug_param_to_name_mapping(parameters)
    inside._ddp_init_helper(parameters, expect_sparse, names, getattr(ddp, "static_graph", False))
    inside._has_rebuilt_buckets = False
    if getattr(ddp, "static_graph", False):
        inside._static_graph_delay_allreduce_enqueued = False  # or the first step would wait for it for good
        inside.reducer._set_static_graph()
        inside.logger._set_static_graph()
    for hook, state in inside._comm_hooks:
        inside.logger._set_comm_hook_name(hook.__qualname__)
        dist._register_comm_hook(inside.reducer, state, hook)  # type: ignore[attr-defined]
