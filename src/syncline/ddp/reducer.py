"""The reducer of a DDP model: its buckets, when a backward pass is over, and which parameters got a result.

DDP closes a bucket when it reaches its cap, so caps that equal the sizes of the planned buckets give these buckets. For
a live model, a new reducer is built inside the same DDP object, with private functions of torch (`can_change`).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel import distributed as ddp_module

from syncline.ddp.hook import forget, other_hook
from syncline.errors import UsageError
from syncline.predict.schedule import MIB
from syncline.runtime.backward_end import when_backward_ends

_original: weakref.WeakKeyDictionary[DDP, Any] = weakref.WeakKeyDictionary()
"""The original bucket configuration of each model that has the buckets of a plan, or of a profile."""


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
    return bool(ddp.static_graph or not ddp.find_unused_parameters)


def can_change() -> bool:
    """Return whether this version of torch permits changing the buckets of a live model."""
    config = getattr(ddp_module, "_BucketCapacityConfig", None)
    needed = ("_ddp_init_helper", "_build_params_for_reducer", "_build_debug_param_to_name_mapping")
    return config is not None and hasattr(config, "create") and all(hasattr(DDP, name) for name in needed)


def why_not_change(ddp: DDP) -> str | None:
    """Return why the buckets of this model cannot be changed, or None if they can."""
    if not can_change():
        return "this torch cannot change the buckets of a live model"
    if ddp._use_python_reducer:
        return "plans do not support DDP's Python reducer, which compiled autograd uses"
    if ddp._delay_all_reduce_params:
        return "delay_all_reduce_named_params leaves DDP no buckets"
    if (other := other_hook(ddp)) is not None:
        return f"this model has a communication hook already ({other}), and DDP takes only one"
    return _changed_parameters(ddp)


def _changed_parameters(ddp: DDP) -> str | None:
    """Describe how the trained parameters differ from those that DDP was built for, or return None if they do not."""
    built, now = ddp._get_ddp_logging_data().get("num_parameter_tensors"), len(ddp._build_params_for_reducer()[0])
    if built in (None, now):
        return None
    return f"DDP was built for {built} parameters, and {now} are trained now: freeze parameters before DDP is built"


def own(ddp: DDP) -> Any:
    """Return the bucket configuration without a plan: the user's, or DDP's default if `wrap` built the model."""
    return _original.get(ddp, getattr(ddp, "_bucket_config", None))


def planned_from_the_start(ddp: DDP) -> None:
    """Record that a model was built with the buckets of a plan: without a plan it gets DDP's default."""
    if can_change():
        _original[ddp] = _config(None)


def own_caps(ddp: DDP) -> tuple[int, ...]:
    """Return the caps in bytes of the buckets without a plan, once DDP has rebuilt them."""
    config = own(ddp)
    usual = dict.fromkeys((config.first_bucket_bytes_cap, config.bucket_bytes_cap))
    return tuple(config.per_bucket_bytes_caps or usual)


def change(ddp: DDP, caps: Sequence[int]) -> None:
    """Remove our hook, and give a live model buckets of these sizes in bytes. All ranks call this between steps."""
    _original.setdefault(ddp, own(ddp))
    _rebuild(ddp, _config(cap_arguments(caps, rebuilt=rebuilds(ddp))["bucket_cap_mb_list"]))


def is_changed(ddp: DDP) -> bool:
    """Return whether a model has other buckets than without a plan."""
    return ddp in _original


def set_caps(ddp: DDP, caps: Sequence[int]) -> None:
    """Give a live model buckets of these sizes in bytes, or, without any, those that it has without a plan. All ranks
    call this between steps."""
    if caps:
        change(ddp, caps)
    elif is_changed(ddp) and why_not_change(ddp) is None:
        make_plain(ddp)


def make_plain(ddp: DDP) -> None:
    """Remove our hook, and restore the buckets that a live model has without a plan."""
    _rebuild(ddp, own(ddp))
    _original.pop(ddp, None)


def _config(caps_mb: Any) -> Any:
    create = ddp_module._BucketCapacityConfig.create
    return create(bucket_cap_mb=None, bucket_cap_mb_list=caps_mb, use_python_reducer=False)


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
    inside._ddp_init_helper(parameters, expect_sparse, names, ddp.static_graph)
    inside._has_rebuilt_buckets = False
    if ddp.static_graph:
        inside._static_graph_delay_allreduce_enqueued = False  # otherwise the first step would wait forever
        inside.reducer._set_static_graph()
        inside.logger._set_static_graph()


class Reduction:
    """The results that the reducer of a DDP model has applied in a step. The reducer may be replaced at any time.

    DDP leaves the gradients of parameters alone that no rank has used, and may skip whole buckets of them. So buckets
    show neither the end of a step nor which results were applied. The reducer knows both after it has finished.
    """

    def __init__(self, ddp: DDP) -> None:
        self._ddp = weakref.ref(ddp)  # the model holds the hook, which holds the engine, which holds this object
        self._static = bool(ddp.static_graph)
        self.skips_buckets = bool(getattr(ddp, "skip_all_reduce_unused_params", False))  # that no rank uses
        self.may_leave_out = self._static or bool(ddp.find_unused_parameters)  # some parameters may get no result
        self._static_use: tuple[Any, Tensor] = (None, torch.empty(0))

    def check(self, keeps: bool) -> None:
        """Raise if an exchange has a residual, which depends on unused parameters, and torch does not report them."""
        if keeps and self.may_leave_out and not hasattr(self._reducer, "_get_local_used_map"):
            text = "this version of torch does not report unused parameters, so find_unused_parameters or static_graph"
            remedy = "build the model without them, or use a lossless exchange"
            raise UsageError(f"{text} would lose part of the residual: {remedy}")

    def when_over(self, call: Callable[[], None]) -> bool:
        """Schedule `call` for when DDP has finished this backward pass. Return False outside one, as in `join()`."""
        return when_backward_ends(call)  # DDP queues its own callback after its last bucket

    @property
    def finished(self) -> bool:
        """Whether DDP is done with the buckets. It is not after a nested backward pass (activation checkpointing)."""
        try:
            self._reducer._check_reducer_finalized()
        except RuntimeError:
            return False
        return True

    def used(self, names: Mapping[int, str], bucketed: Collection[str]) -> dict[str, Tensor] | None:
        """Return for each parameter whether it got a result in the last step, as a 0-dim tensor; None if all did.

        `names` are those of all parameters that DDP may exchange, by `id`; `bucketed` were seen in a bucket.
        """
        if not self.may_leave_out:
            return None
        if not self._static:
            counts: Tensor = self._reducer._get_local_used_map()
        else:  # a static graph uses the same parameters in every step: read them, and wait for the device, only once
            if self._static_use[0] is not self._reducer:
                self._static_use = self._reducer, self._reducer._get_local_used_map().cpu()
            counts = self._static_use[1]
        if not counts.is_cuda and bool(counts.all()):
            return None
        # DDP numbers the parameters that were trained when it was built, module by module. A parameter that was frozen
        # later keeps its number, and is in a bucket.
        ordered: dict[str, None] = {}
        for module in self._model.module.modules():
            for parameter in module.parameters(recurse=False):
                name = names.get(id(parameter))
                if name is not None and (parameter.requires_grad or name in bucketed):
                    ordered[name] = None
        if len(ordered) != counts.numel():
            text = f"DDP exchanges {counts.numel()} parameters, but the model now has {len(ordered)} to exchange"
            raise UsageError(f"{text}: freeze, add and remove parameters before DDP is built")
        return dict(zip(ordered, (counts > 0).unbind(), strict=True))

    @property
    def _model(self) -> Any:
        return self._ddp()

    @property
    def _reducer(self) -> Any:
        return self._model.reducer
