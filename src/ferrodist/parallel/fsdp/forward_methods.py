"""Methods other than forward, such as ``generate``, of a model that FSDP shards: its units are gathered as they run."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.arguments import check_type
from ferrodist.parallel.fsdp.fsdp import FSDP, fsdp_of
from ferrodist.wording import with_article

if TYPE_CHECKING:
    from collections.abc import Callable


class _ForwardMethod:
    """A registered method, which takes the place of the model's."""

    def __init__(self, fsdp: FSDP, name: str, method: Callable[..., Any]) -> None:
        functools.update_wrapper(self, method)
        self._fsdp, self._name, self._method = fsdp, name, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method; every rank must."""
        return self._fsdp._run_method(self._name, self._method, args, kwargs)  # noqa: SLF001 - not for users


def register_forward_method(module: torch.nn.Module, method_name: str) -> None:
    """Let a method of an FSDP's model be called by itself, as its forward is: it gathers the units as they run.

    The counterpart of torch's ``register_fsdp_forward_method``. Afterwards both ``fsdp.generate(...)`` and
    ``fsdp.module.generate(...)`` work::

        fsdp = fd.FSDP(model, wrap=DecoderLayer)
        fd.register_forward_method(fsdp, "generate")
        tokens = fsdp.generate(prompts, max_new_tokens=100)

    All ranks call the method, each with its own inputs. The outermost unit is gathered from the method's beginning to
    its end, every other unit while it runs. The ranks may call units a different number of times, as when their
    sequences end at different lengths or their batches differ in size: a rank that is done takes part in the others'
    gathers until all are done, so all ranks leave the method together. A rank that has nothing to do, and whose method
    refuses an empty batch as that of Hugging Face does, calls `join_forward_method`. Nothing is gathered ahead.

    A rank waits for the others at most the group's timeout at a time: from one unit to the next, or at the end if no
    unit is gathered meanwhile, as with ``NO_SHARD`` or one unit for the whole model.

    Results that require grad have a backward, as those of a forward, if all ranks have called the same units in the
    same order. Inside of a forward, of another such method or of `FSDP.summon_full_params` the method is called as it
    is.

    Args:
        module: The FSDP, its module, or a module inside of that. A module that is in no FSDP is left as it is, so that
            a program is the same without FSDP.
        method_name: The method's name; not one of `torch.nn.Module` or of `FSDP`.

    Raises:
        TypeError: An argument has the wrong type, or the attribute of that name can't be called.
        ValueError: The method does not exist, or is not the model's own; or the module's FSDP has been collected.

    The method raises on every rank:
        CollectiveMismatchError: The ranks called different methods; or a result requires grad, and the ranks called
            different units.
        RankFailedError: The method raised on some rank, which raises its own error. The group stays usable.
        DistributedError: Communication between the ranks failed.
    """
    check_type(module, torch.nn.Module, "register_forward_method takes an FSDP or a module inside of one")
    check_type(method_name, str, "method_name must be the name of a method")
    fsdp = fsdp_of(module)
    if fsdp is None:
        return
    owner = fsdp.module if module is fsdp else module
    method = _find_method(owner, method_name)
    if not isinstance(method, _ForwardMethod):
        method = _ForwardMethod(fsdp, method_name, method)
        setattr(owner, method_name, method)
    if owner is fsdp.module:
        setattr(fsdp, method_name, method)


def join_forward_method(module: torch.nn.Module, method_name: str) -> None:
    """Take part in the other ranks' call of a registered method, on a rank that has nothing to do in it.

    It returns when all ranks are done. See `register_forward_method`, whose arguments and errors it has.

    Raises:
        ValueError: The method was not registered.
    """
    check_type(module, torch.nn.Module, "join_forward_method takes an FSDP or a module inside of one")
    check_type(method_name, str, "method_name must be the name of a method")
    fsdp = fsdp_of(module)
    if fsdp is None:
        return
    is_registered = isinstance(getattr(module, method_name, None), _ForwardMethod)
    if not is_registered:
        raise ValueError(f"{method_name!r} was not registered: call register_forward_method(fsdp, {method_name!r})")
    fsdp._run_method(method_name, lambda: None, (), {})  # noqa: SLF001 - as above


def _find_method(owner: torch.nn.Module, name: str) -> Callable[..., Any]:
    kind = type(owner).__name__
    if name in dir(FSDP):
        raise ValueError(
            f"{name!r} is a method of every torch.nn.Module or FSDP: register one of the model's own, which calls its"
            " forward"
        )
    if name in {child for child, _ in owner.named_children()}:
        raise TypeError(f"{name!r} of {with_article(kind)} is a sub-module: register a method's name")
    try:
        method = getattr(owner, name)
    except AttributeError:
        raise ValueError(f"{with_article(kind)} has no method {name!r}") from None
    if not callable(method):
        raise TypeError(f"{name!r} of {with_article(kind)} is {with_article(type(method).__name__)}, not a method")
    if inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
        raise TypeError(
            f"{name!r} of {with_article(kind)} returns before its code has run, as generators and coroutines do: units"
            " are gathered within the call alone, so register a method that returns its result"
        )
    found: Callable[..., Any] = method
    return found
