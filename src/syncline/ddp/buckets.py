"""Set the buckets of a DDP model, when it is built or while it lives.

DDP closes a bucket when it reaches its cap, so caps that equal the sizes of the planned buckets give these buckets. For
a live model, a new reducer is built inside the same DDP object, with private functions of torch (`can_change`).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel import distributed as ddp_module

from syncline.ddp.hook import forget, other_hook
from syncline.errors import UsageError
from syncline.predict.schedule import MIB

_original: weakref.WeakKeyDictionary[DDP, Any] = weakref.WeakKeyDictionary()
"""The original bucket configuration of each model that has the buckets of a plan."""


def caps_are_known() -> bool:
    """Return whether this version of torch accepts a cap for each bucket."""
    return "bucket_cap_mb_list" in inspect.signature(DDP.__init__).parameters


def cap_arguments(caps: Sequence[int], *, rebuilt: bool = True) -> dict[str, Any]:
    """Return the arguments with which DDP makes buckets of these sizes in bytes, in the order of their exchange."""
    if not caps_are_known():  # one cap for all: the buckets will differ from the plan's, and a warning follows
        return {"bucket_cap_mb": sorted(caps)[len(caps) // 2] / MIB}
    # If DDP does not rebuild its buckets, it fills them from the first parameter on, and exchanges the last one first.
    ordered = caps if rebuilt else tuple(reversed(caps))
    return {"bucket_cap_mb_list": [cap / MIB for cap in ordered]}


def rebuilds(ddp: DDP) -> bool:
    """Return whether DDP rebuilds its buckets once it knows the order in which gradients become ready."""
    return bool(getattr(ddp, "static_graph", False)) or not ddp.find_unused_parameters


def settled_after(ddp: DDP) -> int:
    """Return the number of steps after which the buckets no longer change."""
    return 2 if getattr(ddp, "static_graph", False) else int(rebuilds(ddp))


def can_change() -> bool:
    """Return whether this version of torch permits changing the buckets of a live model."""
    config = getattr(ddp_module, "_BucketCapacityConfig", None)
    needed = ("_ddp_init_helper", "_build_params_for_reducer", "_build_debug_param_to_name_mapping")
    return config is not None and hasattr(config, "create") and all(hasattr(DDP, name) for name in needed)


def why_not_change(ddp: DDP) -> str | None:
    """Return why the buckets of this model cannot be changed, or None if they can."""
    if not can_change():
        return "this torch cannot change the buckets of a live model"
    if getattr(ddp, "_use_python_reducer", False):
        return "plans do not support DDP's Python reducer, which compiled autograd uses"
    if getattr(ddp, "_delay_all_reduce_params", None):
        return "delay_all_reduce_named_params leaves DDP no buckets"
    if (other := other_hook(ddp)) is not None:
        return f"this model has a communication hook already ({other}), and DDP takes only one"
    return _changed_parameters(ddp)


def _changed_parameters(ddp: DDP) -> str | None:
    """Describe how the trained parameters differ from those that DDP was built for, or return None if they do not."""
    built = ddp._get_ddp_logging_data().get("num_parameter_tensors")
    now = len(ddp._build_params_for_reducer()[0])
    if built in (None, now):
        return None
    return f"DDP was built for {built} parameters, and {now} are trained now: freeze parameters before DDP is built"


def own(ddp: DDP) -> Any:
    """Return the bucket configuration without a plan: the user's, or DDP's default if `wrap` built the model."""
    return _original.get(ddp, getattr(ddp, "_bucket_config", None))


def planned_from_the_start(ddp: DDP) -> None:
    """Record that a model was built with the buckets of a plan: without a plan it gets DDP's default."""
    if can_change():
        _original[ddp] = _config()


def own_caps(ddp: DDP) -> tuple[int, ...]:
    """Return the caps in bytes of the buckets without a plan, once DDP has rebuilt them."""
    config = own(ddp)
    caps: tuple[int, ...] = config.per_bucket_bytes_caps
    return caps or tuple(dict.fromkeys((config.first_bucket_bytes_cap, config.bucket_bytes_cap)))


def change(ddp: DDP, caps: Sequence[int]) -> None:
    """Remove our hook, and give a live model buckets of these sizes in bytes. All ranks call this between steps."""
    _original.setdefault(ddp, own(ddp))
    _rebuild(ddp, _config(**cap_arguments(caps, rebuilt=rebuilds(ddp))))


def make_plain(ddp: DDP) -> None:
    """Remove our hook, and restore the buckets that a live model has without a plan."""
    _rebuild(ddp, own(ddp))
    _original.pop(ddp, None)


def _config(bucket_cap_mb: Any = None, bucket_cap_mb_list: Any = None) -> Any:
    return ddp_module._BucketCapacityConfig.create(
        bucket_cap_mb=bucket_cap_mb, bucket_cap_mb_list=bucket_cap_mb_list, use_python_reducer=False
    )


def _rebuild(ddp: DDP, config: Any) -> None:
    """Build a new reducer with this bucket configuration, and without our hook."""
    forget(ddp)
    inside: Any = ddp
    if (changed := _changed_parameters(ddp)) is not None:  # a parameter that is frozen now would never be exchanged
        raise UsageError(changed)
    inside._bucket_config = config
    inside.bucket_bytes_cap = config.bucket_bytes_cap
    inside.bucket_bytes_cap_list = list(config.per_bucket_bytes_caps)
    inside.bucket_bytes_cap_default = config.first_bucket_bytes_cap < config.bucket_bytes_cap
    parameters, expect_sparse = inside._build_params_for_reducer()
    names = inside._build_debug_param_to_name_mapping(parameters)
    inside._ddp_init_helper(parameters, expect_sparse, names, getattr(ddp, "static_graph", False))
    inside._has_rebuilt_buckets = False
    if getattr(ddp, "static_graph", False):
        inside._static_graph_delay_allreduce_enqueued = False  # otherwise the first step would wait forever
        inside.reducer._set_static_graph()
        inside.logger._set_static_graph()
